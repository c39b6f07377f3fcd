#include "kernels/cuda/simt/weights.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<Float16>::weights(const WeightsParams& p, const DeviceLimits& device,
                                   void* stream) {
  return launch(weights_kernel<Float16>, p, weights_blocks(p), kThreads,
                sizeof(Shared<Accumulation<Float16>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
