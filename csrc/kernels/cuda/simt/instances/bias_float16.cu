#include "kernels/cuda/simt/bias_gradient.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<Float16>::bias(const BackwardParams& p, void* workspace,
                                const DeviceLimits& device, void* stream) {
  return launch_bias_gradient<Float16>(p, workspace, device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
