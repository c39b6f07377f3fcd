#include "kernels/cuda/simt/weights.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<double>::weights(const WeightsParams& p, const DeviceLimits& device,
                                  void* stream) {
  return launch(weights_kernel<double>, p, weights_blocks(p), kThreads,
                sizeof(Shared<Accumulation<double>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
