#include "kernels/cuda/simt/backward.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<BFloat16>::queries(const BackwardParams& p, const DeviceLimits& device,
                                    void* stream) {
  return launch(backward_queries_kernel<BFloat16>, p,
                queries_blocks(p, kColumns<Accumulation<BFloat16>>), kThreads,
                sizeof(Shared<Accumulation<BFloat16>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
