#include "kernels/cuda/tensor/forward.cuh"

namespace attention_ext::kernels::cuda::tensor {

template <>
const char* TensorCore<ScalarType::kBFloat16>::forward(const AttentionParams& p,
                                                       const DeviceLimits& device, void* stream) {
  return launch_forward<ScalarType::kBFloat16>(p, device, stream);
}

}  // namespace attention_ext::kernels::cuda::tensor
