#include "kernels/cuda/simt/forward.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<double>::forward(const AttentionParams& p, const DeviceLimits& device,
                                  void* stream) {
  return launch(forward_kernel<double>, p, forward_blocks(p, kColumns<Accumulation<double>>),
                kThreads, sizeof(Shared<Accumulation<double>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
