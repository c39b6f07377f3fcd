#include "kernels/cuda/simt/forward.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<BFloat16>::forward(const AttentionParams& p, const DeviceLimits& device,
                                    void* stream) {
  return launch(forward_kernel<BFloat16>, p, forward_blocks(p, kColumns<Accumulation<BFloat16>>),
                kThreads, sizeof(Shared<Accumulation<BFloat16>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
