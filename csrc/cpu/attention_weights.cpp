// attention_weights on the CPU.
#include <ATen/ops/empty.h>

#include "common/make_params.h"
#include "cpu/attention.h"
#include "cpu/launch.h"
#include "cpu/outputs.h"

namespace attention_ext::cpu {

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options, const at::Tensor& logsumexp,
                             const at::Tensor& logsumexp_residual, bool average_heads) {
  const CallShape shape = call_shape(query, key, /*v_size=*/0);
  c10::SmallVector<int64_t, 6> sizes(shape.batch_sizes.begin(), shape.batch_sizes.end());
  if (!average_heads) sizes.push_back(shape.heads);
  sizes.insert(sizes.end(), {shape.q_length, shape.k_length});
  at::Tensor weights = at::empty(sizes, query.options());
  if (weights.numel() == 0) return weights;

  ParamsStorage storage;
  kernels::WeightsParams p;
  fill_params(p, shape, query, key, at::Tensor(), options, storage);
  p.logsumexp = make_row_view(logsumexp, shape.batch_sizes, storage);
  p.residual = make_row_view(logsumexp_residual, shape.batch_sizes, storage);
  p.average = average_heads;
  p.weights =
      make_view(average_heads ? weights.unsqueeze(-3) : weights, shape.batch_sizes, storage);

  const kernels::CpuKernels& tier = active_kernels();
  run_items(tier.weights_items(p), tier.weights_scratch(p), work_of(p, shape, 1),
            [&](kernels::WorkQueue& queue, void* memory) { tier.weights(p, queue, memory); });
  return weights;
}

}  // namespace attention_ext::cpu
