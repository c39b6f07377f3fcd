#include "kernels/cuda/simt/backward.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<Float16>::queries(const BackwardParams& p, const DeviceLimits& device,
                                   void* stream) {
  return launch(backward_queries_kernel<Float16>, p,
                queries_blocks(p, kColumns<Accumulation<Float16>>), kThreads,
                sizeof(Shared<Accumulation<Float16>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
