// attention on the CPU: allocate the output and the row statistics, fill params, run the forward
// kernels.
#include "cpu/attention.h"

#include <ATen/ops/empty.h>

#include "common/make_params.h"
#include "cpu/launch.h"
#include "cpu/outputs.h"

namespace attention_ext::cpu {

Tensor4 attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const AttentionOptions& options) {
  const CallShape shape = call_shape(query, key, value.size(-1));
  const auto statistics = query.options().dtype(accumulation_type(query.scalar_type()));
  at::Tensor output = empty_heads(query, shape.heads, shape.q_length, shape.v_size);
  at::Tensor logsumexp = at::empty(query.sizes().slice(0, query.dim() - 1), statistics);
  at::Tensor residual = at::empty(logsumexp.sizes(), statistics);
  at::Tensor output_residual;
  if (accumulation_type(query.scalar_type()) != query.scalar_type()) {
    output_residual = empty_heads(query, shape.heads, shape.q_length, shape.v_size);
  }

  ParamsStorage storage;
  kernels::AttentionParams params;
  fill_params(params, shape, query, key, value, options, storage);
  params.output = make_view(output, shape.batch_sizes, storage);
  params.logsumexp = make_row_view(logsumexp, shape.batch_sizes, storage);
  params.residual = make_row_view(residual, shape.batch_sizes, storage);
  if (output_residual.defined()) {
    params.output_residual = make_view(output_residual, shape.batch_sizes, storage);
  }
  params.visited = &visited_block_pairs();

  const kernels::CpuKernels& tier = active_kernels();
  const int64_t scratch = tier.forward_scratch(params);
  const double work = work_of(params, shape, /*products=*/2);
  const int64_t splits = kernels::forward_splits(params);
  at::DataPtr partials;
  if (splits > 1) {
    const int64_t element = logsumexp.element_size();
    partials = c10::GetCPUAllocator()->allocate(static_cast<size_t>(
        shape.batch * shape.heads * splits * kernels::forward_partial_elements(params) * element));
  }
  run_items(tier.forward_items(params), scratch, work,
            [&](kernels::WorkQueue& queue, void* memory) {
              tier.forward(params, partials.get(), queue, memory);
            });
  if (splits > 1) {
    run_items(shape.batch * shape.heads, scratch, work,
              [&](kernels::WorkQueue& queue, void* memory) {
                tier.forward_join(params, partials.get(), queue, memory);
              });
  }
  return {std::move(output), std::move(logsumexp), std::move(residual), std::move(output_residual)};
}

}  // namespace attention_ext::cpu
