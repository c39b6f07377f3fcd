#include "kernels/cuda/simt/backward.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<float>::queries(const BackwardParams& p, const DeviceLimits& device,
                                 void* stream) {
  return launch(backward_queries_kernel<float>, p, queries_blocks(p, kColumns<Accumulation<float>>),
                kThreads, sizeof(Shared<Accumulation<float>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
