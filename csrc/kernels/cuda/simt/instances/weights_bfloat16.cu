#include "kernels/cuda/simt/weights.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<BFloat16>::weights(const WeightsParams& p, const DeviceLimits& device,
                                    void* stream) {
  return launch(weights_kernel<BFloat16>, p, weights_blocks(p), kThreads,
                sizeof(Shared<Accumulation<BFloat16>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
