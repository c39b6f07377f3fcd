#include "kernels/cuda/simt/forward.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<Float16>::forward(const AttentionParams& p, const DeviceLimits& device,
                                   void* stream) {
  return launch(forward_kernel<Float16>, p, forward_blocks(p, kColumns<Accumulation<Float16>>),
                kThreads, sizeof(Shared<Accumulation<Float16>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
