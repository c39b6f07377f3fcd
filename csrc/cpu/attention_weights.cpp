// attention_weights on the CPU.
#include "common/prepare.h"
#include "cpu/attention.h"
#include "cpu/launch.h"

namespace attention_ext::cpu {

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options, const at::Tensor& logsumexp,
                             const at::Tensor& logsumexp_residual, bool average_heads) {
  WeightsCall call(/*on_device=*/false, query, key, options, logsumexp, logsumexp_residual,
                   average_heads);
  if (call.weights.numel() == 0) return call.weights;
  const kernels::CpuKernels& tier = active_kernels();
  run_items(
      tier.weights_items(call.params), tier.weights_scratch(call.params), work_of(call.params, 1),
      [&](kernels::WorkQueue& queue, void* memory) { tier.weights(call.params, queue, memory); });
  return call.weights;
}

}  // namespace attention_ext::cpu
