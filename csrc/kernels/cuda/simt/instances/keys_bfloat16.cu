#include "kernels/cuda/simt/backward.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<BFloat16>::keys(const BackwardParams& p, const DeviceLimits& device,
                                 void* stream) {
  return launch(backward_keys_kernel<BFloat16>, p,
                keys_blocks(p, kKeyColumns<Accumulation<BFloat16>>), kThreads,
                sizeof(Shared<Accumulation<BFloat16>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
