#include "kernels/cuda/simt/forward.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<float>::forward(const AttentionParams& p, const DeviceLimits& device,
                                 void* stream) {
  return launch(forward_kernel<float>, p, forward_blocks(p, kColumns<Accumulation<float>>),
                kThreads, sizeof(Shared<Accumulation<float>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
