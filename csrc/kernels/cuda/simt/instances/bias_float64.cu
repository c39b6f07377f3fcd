#include "kernels/cuda/simt/bias_gradient.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<double>::bias(const BackwardParams& p, void* workspace, const DeviceLimits& device,
                               void* stream) {
  return launch_bias_gradient<double>(p, workspace, device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
