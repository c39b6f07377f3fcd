#include "kernels/cuda/simt/rows.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

template <>
const char* Simt<double>::delta(const BackwardParams& p, const DeviceLimits& device, void* stream) {
  return launch(delta_kernel<double>, p, blocks_of(row_count(p), kRowsPerBlock), kThreads, 0,
                device, stream);
}

template <>
const char* Simt<double>::sinks(const BackwardParams& p, const DeviceLimits& device, void* stream) {
  using A = Accumulation<double>;
  return launch(sink_kernel<A>, p, p.heads, kThreads, kThreads * sizeof(A), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
