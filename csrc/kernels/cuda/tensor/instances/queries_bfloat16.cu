#include "kernels/cuda/tensor/backward_queries.cuh"

namespace attention_ext::kernels::cuda::tensor {

template <>
const char* TensorCore<ScalarType::kBFloat16>::queries(const BackwardParams& p,
                                                       const DeviceLimits& device, void* stream) {
  return launch_queries<ScalarType::kBFloat16>(p, device, stream);
}

}  // namespace attention_ext::kernels::cuda::tensor
