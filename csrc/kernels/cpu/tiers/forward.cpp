// Entry points of the forward kernels of one tier. Compiled once per tier.
#include "kernels/cpu/decode.h"
#include "kernels/cpu/tiers/entries.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

namespace {

template <class T, class In = T>
int64_t scratch(const AttentionParams& p) {
  Arena arena{nullptr};
  Forward<T, In> forward(p, arena);
  return arena.used;
}

template <class T>
int64_t scratch_of_either(const AttentionParams& p) {
  Arena short_queries{nullptr};
  if (decoding(p)) Decode<T> decode(p, short_queries);
  return larger(scratch<T>(p), short_queries.used);
}

AE_INLINE KeyRange split_keys(const AttentionParams& p, const Problem& problem, int64_t split) {
  if (forward_splits(p) == 1) return {0, problem.k_length};
  const int64_t keys = forward_split_keys(p);
  return {smaller(problem.k_length, split * keys), smaller(problem.k_length, (split + 1) * keys)};
}

// Short queries: items are (problem, key/value head, split).
template <class T>
void decode(const AttentionParams& p, void* partials, WorkQueue& queue, void* memory) {
  Arena arena{static_cast<char*>(memory)};
  Decode<T> kernel(p, arena);
  const int64_t splits = forward_splits(p);
  int64_t visited = 0;
  queue.for_each([&](int64_t item) {
    const Problem problem = p.problem(item / (splits * p.kv_heads));
    const int64_t g = item / splits % p.kv_heads, split = item % splits;
    const int64_t step = kernel.heads_at_once;
    for (int64_t first = 0; first < p.group(); first += step) {
      kernel.run(problem, g, first, smaller(step, p.group() - first), split_keys(p, problem, split),
                 visited);
      kernel.finish_heads(problem, g * p.group() + first, partials, split);
    }
  });
  if (p.visited != nullptr) p.visited->fetch_add(visited);
}

// The rows of a query block.
struct QueryRows {
  Problem problem;
  int64_t head, i0, nq;
  bool first;  // of its head

  AE_INLINE QueryRows(const AttentionParams& p, const BlockIndex& at)
      : problem(p.problem(at.problem)), head(at.head), first(at.block == 0) {
    const int64_t rows = query_block(problem.q_length);
    // Last rows first: under a causal mask they are the longest.
    i0 = (blocks_of(problem.q_length, rows) - 1 - at.block) * rows;
    nq = smaller(rows, problem.q_length - i0);
  }
};

AE_INLINE void prefetch_output(Ahead& ahead, const AttentionParams& p, const QueryRows& at) {
  const OutputRows to(p, at.problem, at.head, at.i0);
  prefetch_rows<true>(ahead, to.output, at.nq, p.v_size);
  if (to.rest_or_null() != nullptr) prefetch_rows<true>(ahead, to.rest, at.nq, p.v_size);
}
// What the query block that comes next is going to read.
AE_INLINE void prefetch_inputs(Ahead& ahead, const AttentionParams& p, const QueryRows& next) {
  const int64_t b = next.problem.batch, g = next.head / p.group();
  const Rows query(p.query, b, next.head, next.problem.q_begin + next.i0, 0);
  prefetch_rows<false>(ahead, query, next.nq, p.qk_size);
  if (!next.first || next.head % p.group() != 0) return;
  const KeyRange hull = p.windowed() ? window_hull(p, next.problem, next.i0, next.i0 + next.nq - 1)
                                     : KeyRange{0, next.problem.k_length};
  const int64_t row = next.problem.k_begin + hull.begin;
  const int64_t keys = smaller(hull.end - hull.begin, kKeysAhead);
  prefetch_rows<false>(ahead, Rows(p.key, b, g, row, 0), keys, p.qk_size);
  prefetch_rows<false>(ahead, Rows(p.value, b, g, row, 0), keys, p.v_size);
}

template <class T, class In = T>
void run(const AttentionParams& p, void* partials, WorkQueue& queue, void* memory) {
  Arena arena{static_cast<char*>(memory)};
  Forward<T, In> forward(p, arena);
  const int64_t splits = forward_splits(p);
  int64_t visited = 0;
  const auto prefetch = [&](const QueryRows& at, int64_t next) {
    Ahead& ahead = forward.tile.ahead;
    if (!single_key_block(at.problem)) prefetch_output(ahead, p, at);
    if (next >= queue.count) return;
    const QueryRows then(p, block_index(p, next));
    const bool is_short = single_key_block(then.problem);
    if (is_short && !short_streams_are_slow()) return;
    prefetch_inputs(ahead, p, then);
    if (is_short) prefetch_output(ahead, p, then);
  };
  queue.for_each([&](int64_t item) {
    const QueryRows at(p, block_index(p, item / splits));
    const int64_t split = item % splits;
    forward.tile.ahead.forget();
    if (splits == 1) prefetch(at, item + 1);
    forward.query_rows(at.problem, at.head, at.i0, at.nq, split_keys(p, at.problem, split),
                       visited);
    if (splits == 1) {
      finish<T>(p, at.problem, at.head, at.i0, at.nq, forward.part);
    } else {
      save_split<T>(p, at.nq, forward.part,
                    SplitResult<T>(partials, p, at.problem.index * p.heads + at.head, split));
    }
  });
  if (p.visited != nullptr) p.visited->fetch_add(visited);
}

template <class T>
void join(const AttentionParams& p, void* partials, WorkQueue& queue, void* memory) {
  Arena arena{static_cast<char*>(memory)};
  Forward<T> forward(p, arena);
  queue.for_each([&](int64_t item) {
    join_splits<T>(p, p.problem(item / p.heads), item % p.heads, partials, forward.part);
  });
}

}  // namespace

int64_t forward_items(const AttentionParams& p) {
  if (decoding(p)) return p.q_length > 0 ? p.problems * p.kv_heads * forward_splits(p) : 0;
  return query_blocks(p) * p.heads * forward_splits(p);
}

#if defined(__AVX512BF16__)

int64_t forward_scratch(const AttentionParams& p) {
  const int64_t others = avx512::kKernels.forward_scratch(p);  // forward_join takes it, too
  return has_kernels_for(p) ? larger(others, scratch<float, BFloat16Pair>(p)) : others;
}

void forward(const AttentionParams& p, void* partials, WorkQueue& queue, void* memory) {
  const auto kernel = has_kernels_for(p) ? run<float, BFloat16Pair> : avx512::kKernels.forward;
  kernel(p, partials, queue, memory);
}

void forward_join(const AttentionParams& p, void* partials, WorkQueue& queue, void* memory) {
  avx512::kKernels.forward_join(p, partials, queue, memory);
}

#else

int64_t forward_scratch(const AttentionParams& p) {
  return p.type == ScalarType::kFloat64 ? scratch_of_either<double>(p)
                                        : scratch_of_either<float>(p);
}

void forward(const AttentionParams& p, void* partials, WorkQueue& queue, void* memory) {
  const bool is_double = p.type == ScalarType::kFloat64;
  const auto kernel = decoding(p) ? (is_double ? decode<double> : decode<float>)
                                  : (is_double ? run<double> : run<float>);
  kernel(p, partials, queue, memory);
}

void forward_join(const AttentionParams& p, void* partials, WorkQueue& queue, void* memory) {
  if (p.type == ScalarType::kFloat64) return join<double>(p, partials, queue, memory);
  join<float>(p, partials, queue, memory);
}

#endif

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
