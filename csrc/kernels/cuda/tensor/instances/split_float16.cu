#include "kernels/cuda/tensor/split.cuh"

namespace attention_ext::kernels::cuda::tensor {

template <>
const char* TensorCore<ScalarType::kFloat16>::split_forward(const AttentionParams& p,
                                                            void* workspace,
                                                            const DeviceLimits& device,
                                                            void* stream) {
  return launch_split_forward<ScalarType::kFloat16>(p, workspace, device, stream);
}

}  // namespace attention_ext::kernels::cuda::tensor
