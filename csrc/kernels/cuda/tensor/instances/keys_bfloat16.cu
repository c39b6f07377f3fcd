#include "kernels/cuda/tensor/backward_keys.cuh"

namespace attention_ext::kernels::cuda::tensor {

template <>
const char* TensorCore<ScalarType::kBFloat16>::keys(const BackwardParams& p,
                                                    const DeviceLimits& device, void* stream) {
  return launch_keys<ScalarType::kBFloat16>(p, device, stream);
}

}  // namespace attention_ext::kernels::cuda::tensor
