#include "kernels/cuda/simt/weights.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<float>::weights(const WeightsParams& p, const DeviceLimits& device, void* stream) {
  return launch(weights_kernel<float>, p, weights_blocks(p), kThreads,
                sizeof(Shared<Accumulation<float>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
