// Entry points of the forward kernels of one tier. Compiled once per tier.
#include "kernels/cpu/finish.h"
#include "kernels/cpu/tiers/entries.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

namespace {

template <class T>
int64_t scratch(const AttentionParams& p) {
  Arena arena{nullptr};
  Forward<T> measure(p, arena);
  return arena.used;
}

template <class T>
void run(const AttentionParams& p, void* partials, WorkQueue& queue, void* memory) {
  Arena arena{static_cast<char*>(memory)};
  Forward<T> forward(p, arena);
  const int64_t splits = forward_splits(p), split_keys = forward_split_keys(p);
  int64_t visited = 0;
  for (int64_t item; (item = queue.next.fetch_add(1)) < queue.count;) {
    const BlockIndex at = block_index(p, item / splits);
    const Problem problem = p.problem(at.problem);
    const int64_t rows = query_block(problem.q_length);
    // Last rows first: under a causal mask they are the longest.
    const int64_t i0 = (blocks_of(problem.q_length, rows) - 1 - at.block) * rows;
    const int64_t nq = smaller(rows, problem.q_length - i0);
    const int64_t split = item % splits;
    const KeyRange keys{split * split_keys, smaller(problem.k_length, (split + 1) * split_keys)};
    forward.query_rows(problem, at.head, i0, nq, splits == 1 ? KeyRange{0, problem.k_length} : keys,
                       visited);
    if (splits == 1) {
      finish<T>(p, problem, at.head, i0, nq, forward.part);
    } else {
      save_split<T>(p, nq, forward.part,
                    SplitResult<T>(partials, p, at.problem * p.heads + at.head, split));
    }
  }
  if (p.visited != nullptr) p.visited->fetch_add(visited);
}

template <class T>
void join(const AttentionParams& p, void* partials, WorkQueue& queue, void* memory) {
  Arena arena{static_cast<char*>(memory)};
  Forward<T> forward(p, arena);
  for (int64_t item; (item = queue.next.fetch_add(1)) < queue.count;) {
    join_splits<T>(p, p.problem(item / p.heads), item % p.heads, partials, forward.part);
  }
}

}  // namespace

int64_t forward_items(const AttentionParams& p) {
  return query_blocks(p) * p.heads * forward_splits(p);
}

int64_t forward_scratch(const AttentionParams& p) {
  return p.type == ScalarType::kFloat64 ? scratch<double>(p) : scratch<float>(p);
}

void forward(const AttentionParams& p, void* partials, WorkQueue& queue, void* memory) {
  if (p.type == ScalarType::kFloat64) return run<double>(p, partials, queue, memory);
  run<float>(p, partials, queue, memory);
}

void forward_join(const AttentionParams& p, void* partials, WorkQueue& queue, void* memory) {
  if (p.type == ScalarType::kFloat64) return join<double>(p, partials, queue, memory);
  join<float>(p, partials, queue, memory);
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
