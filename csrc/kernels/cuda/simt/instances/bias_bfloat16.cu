#include "kernels/cuda/simt/bias_gradient.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<BFloat16>::bias(const BackwardParams& p, void* workspace,
                                 const DeviceLimits& device, void* stream) {
  return launch_bias_gradient<BFloat16>(p, workspace, device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
