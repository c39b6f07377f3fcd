#include "kernels/cuda/simt/backward.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<double>::keys(const BackwardParams& p, const DeviceLimits& device, void* stream) {
  return launch(backward_keys_kernel<double>, p, keys_blocks(p, kKeyColumns<Accumulation<double>>),
                kThreads, sizeof(Shared<Accumulation<double>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
