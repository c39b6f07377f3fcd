#include "kernels/cuda/simt/backward.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<Float16>::keys(const BackwardParams& p, const DeviceLimits& device, void* stream) {
  return launch(backward_keys_kernel<Float16>, p,
                keys_blocks(p, kKeyColumns<Accumulation<Float16>>), kThreads,
                sizeof(Shared<Accumulation<Float16>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
