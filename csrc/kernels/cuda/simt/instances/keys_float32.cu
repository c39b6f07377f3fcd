#include "kernels/cuda/simt/backward.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<float>::keys(const BackwardParams& p, const DeviceLimits& device, void* stream) {
  return launch(backward_keys_kernel<float>, p, keys_blocks(p, kKeyColumns<Accumulation<float>>),
                kThreads, sizeof(Shared<Accumulation<float>>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
