// attention on the CPU: the forward kernels, and the joining of split keys.
#include "cpu/attention.h"

#include "common/prepare.h"
#include "cpu/launch.h"

namespace attention_ext::cpu {

Tensor4 attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const AttentionOptions& options) {
  ForwardCall call(/*on_device=*/false, query, key, value, options);
  kernels::AttentionParams& params = call.params;
  const int64_t heads_together = kernels::fold_group(params);
  std::atomic<int64_t> visited{0};
  params.visited = &visited;

  const kernels::CpuKernels& tier = active_kernels();
  const int64_t scratch = tier.forward_scratch(params);
  const double work = work_of(params, /*products=*/2);
  const int64_t splits = kernels::forward_splits(params);
  at::DataPtr partials;
  if (splits > 1) {
    const int64_t element = call.logsumexp.element_size();
    partials = c10::GetCPUAllocator()->allocate(
        static_cast<size_t>(params.problems * params.heads * splits *
                            kernels::forward_partial_elements(params) * element));
  }
  run_items(tier.forward_items(params), scratch, work,
            [&](kernels::WorkQueue& queue, void* memory) {
              tier.forward(params, partials.get(), queue, memory);
            });
  if (splits > 1) {
    run_items(params.problems * params.heads, scratch, work,
              [&](kernels::WorkQueue& queue, void* memory) {
                tier.forward_join(params, partials.get(), queue, memory);
              });
  }
  visited_block_pairs() += visited * heads_together;
  return std::move(call).results();
}

}  // namespace attention_ext::cpu
