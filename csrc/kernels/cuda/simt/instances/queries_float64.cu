#include "kernels/cuda/simt/backward.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<double>::queries(const BackwardParams& p, const DeviceLimits& device,
                                  void* stream) {
  return launch(backward_queries_kernel<double>, p,
                queries_blocks(p, kColumns<Accumulation<double>>), kThreads,
                sizeof(Shared<Accumulation<double>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
