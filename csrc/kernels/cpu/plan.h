// How work is cut into blocks, splits and ranges: functions of the lengths, the kind of mask and
// the head group only, never of batch, heads or threads, so that results do not depend on those.
// Used by the kernels and by the glue that sizes buffers.
#pragma once

#include <initializer_list>

#include "kernels/mask.h"
#include "kernels/params.h"

namespace attention_ext::kernels {

AE_INLINE int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
AE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
AE_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
AE_INLINE int64_t blocks_of(int64_t length, int64_t block) { return (length + block - 1) / block; }

// Blocks of at most 96 x 96 (a multiple of every register tile, and the best or within 1 % of the
// best of ten sizes on an AVX2 machine, in both directions), evened out so that no block is a
// sliver.
constexpr int64_t kBlock = 96;

AE_INLINE int64_t even_block(int64_t length, int64_t multiple) {
  if (length <= 0) return kBlock;
  const int64_t blocks = blocks_of(length, kBlock);
  return smaller(kBlock, round_up(blocks_of(length, blocks), multiple));
}
AE_INLINE int64_t query_block(int64_t length) { return even_block(length, 16); }
AE_INLINE int64_t key_block(int64_t length) { return even_block(length, 8); }

// Forward: a short query against many keys leaves too few query blocks to share among threads, so
// its keys are split. More rows make enough blocks of their own.
constexpr int64_t kSplitRows = 64;
constexpr int64_t kSplitKeys = 1024;

// Rows up to which a head's queries are so few that head sizes, not queries, fill the lanes
// (cpu/decode.h).
constexpr int64_t kDecodeRows = 4;
// Rows of a group's heads that are decoded together: their scratch stays within 256 KiB.
constexpr int64_t kDecodeRowsAtOnce = 64;

// Whether the forward kernel takes the heads of a group as the rows of one head: of single query
// rows, with nothing that might tell heads apart and no key outside the window. They share every
// reading of K and V, and products have queries in lanes. That pays where the group fills vectors
// of 16 lanes: with 32 heads 1.1 to 1.2 times as fast, with 64 1.2 to 1.35 times (AVX2 and
// AVX-512), with 16 1.1 to 1.2 times on AVX2 and in float64, and as fast (D64) or a twentieth
// slower (D128) on AVX-512, where 24 lose a sixth that way. Layouts decide nothing, so that no bit
// depends on them.
AE_INLINE bool folds_group(const AttentionParams& p) {
  const int64_t group = p.group();
  if (p.packed() || p.q_length != 1 || group == 0) return false;
  if (16 * group < 15 * round_up(group, 16)) return false;
  if (p.sinks != nullptr || p.alibi_slopes != nullptr || p.dropout.threshold != 0) return false;
  if (p.attn_mask.defined() || p.attn_bias.defined()) return false;
  if (!p.windowed()) return true;
  if (p.query_offsets != nullptr) return false;
  const KeyRange hull = window_hull(p, p.problem(0), 0, 0);
  return hull.begin == 0 && hull.end == p.k_length;
}
// Does so; returns how many heads a row block then stands for.
AE_INLINE int64_t fold_group(AttentionParams& p) {
  if (!folds_group(p)) return 1;
  const int64_t group = p.group();
  for (View* view : {&p.query, &p.output, &p.output_residual, &p.logsumexp, &p.residual}) {
    view->stride[2] = view->stride[1];
    view->stride[1] *= group;
  }
  p.heads = p.kv_heads;
  p.q_length = group;
  p.window_left = p.window_right = kUnbounded;
  return group;
}

AE_INLINE bool decoding(const AttentionParams& p) {
  return !p.packed() && p.q_length <= kDecodeRows && !folds_group(p);
}
AE_INLINE int64_t forward_splits(const AttentionParams& p) {
  if (p.packed() || p.q_length > kSplitRows || p.k_length <= kSplitKeys) return 1;
  return blocks_of(p.k_length, kSplitKeys);
}
// Keys of one split: whole key blocks.
AE_INLINE int64_t forward_split_keys(const AttentionParams& p) {
  return round_up(blocks_of(p.k_length, forward_splits(p)), key_block(p.k_length));
}
// One partial result, in elements of the accumulation type: output rows (L x Ev), then maximum, sum
// and seen per row.
AE_INLINE int64_t forward_partial_elements(const AttentionParams& p) {
  return p.q_length * (p.v_size + 3);
}

// Backward: the keys that one work item owns. Their dK and dV stay in the cache while it walks over
// the queries, whose dQ is added to in the order of the ranges. 576 keys keep the packing of the
// queries cheap, and 1024 or 2048 keys make an even number of ranges; a window makes ranges
// unequal, so they are shorter there (on an AVX2 machine one causal head of 2048 reached 61 % of
// peak with 1024, 88 % with 192). Several query heads to one key head make more work of fewer
// items, so ranges shrink with the group.
AE_INLINE int64_t backward_range_blocks(const AttentionParams& p) {  // at most
  const int64_t wanted = p.windowed() ? 2 : 6, group = larger(1, p.group());
  return larger(1, wanted / smaller(group, 3));
}

// The ranges of a problem: whole key blocks, the first ranges a block longer where they are not
// even, since neighbours wait for each other and threads share them.
struct KeyRanges {
  int64_t length, block;  // keys, keys of a block
  int64_t whole, longer;  // blocks that every range has, how many ranges have one more

  AE_INLINE KeyRanges(const AttentionParams& p, int64_t k_length)
      : length(k_length), block(key_block(k_length)) {
    const int64_t blocks = larger(1, blocks_of(length, block));
    const int64_t ranges = blocks_of(blocks, backward_range_blocks(p));
    whole = blocks / ranges;
    longer = blocks % ranges;
  }
  AE_INLINE int64_t begin(int64_t range) const {
    return smaller(length, (range * whole + smaller(range, longer)) * block);
  }
  AE_INLINE KeyRange keys(int64_t range) const { return {begin(range), begin(range + 1)}; }
  AE_INLINE int64_t of(int64_t key) const {
    const int64_t at = key / block, in_longer = longer * (whole + 1);
    return at < in_longer ? at / (whole + 1) : longer + (at - in_longer) / whole;
  }
};

// How many ranges every problem is given; the last ones of a short packed sequence are empty.
AE_INLINE int64_t backward_ranges(const AttentionParams& p) {
  return larger(1, blocks_of(blocks_of(p.k_length, kBlock), backward_range_blocks(p)));
}

// Work items of the pass over the keys. Ranges of one head wait for each other, so as many heads as
// there are threads take turns: all their first ranges, then all their second ones. More would push
// each other out of the caches. One head alone runs its ranges side by side, each a query block
// behind the one before. Only the order of the work depends on `at_once`, no result.
struct RangeIndex {
  int64_t problem, kv_head, range;
};
AE_INLINE RangeIndex range_index(const AttentionParams& p, int64_t item, int64_t at_once) {
  const int64_t ranges = backward_ranges(p);
  const int64_t first = item / (at_once * ranges) * at_once;
  const int64_t heads = smaller(at_once, p.problems * p.kv_heads - first);
  const int64_t rest = item - first * ranges, head = first + rest % heads;
  return {head / p.kv_heads, head % p.kv_heads, rest / heads};
}

// Whether the pass over the keys adds the bias gradient on its way, in the order of batch and
// heads: it has dS at hand, which a pass over the bias would have to compute again. Not where the
// bias broadcasts over rows or keys (the sum over them is small work for that pass), where
// softcap's slope is already in dS, or where a window leaves out parts of the order.
AE_INLINE bool bias_with_keys(const BackwardParams& p) {
  return p.grad_bias.defined() && !p.windowed() && p.softcap == 0 &&
         (p.grad_query.defined() || p.grad_key.defined()) && p.grad_bias.batch_offsets == nullptr &&
         (p.bias_size[0] == 1 || p.bias_size[0] == p.problems) && p.bias_size[2] == p.q_length &&
         p.bias_size[3] == p.k_length;
}
AE_INLINE int64_t bias_turns(const BackwardParams& p) {
  return p.bias_size[0] * p.bias_size[1] * blocks_of(p.q_length, query_block(p.q_length)) *
         backward_ranges(p);
}

// Work on a single key block is done before what it asks for arrives, so the work before it asks
// for the rows of its results as well.
AE_INLINE bool single_key_block(const Problem& problem) { return problem.k_length <= kBlock; }

// Keys of the head that comes next that the forward kernel asks for: more would push out what the
// head at work needs.
constexpr int64_t kKeysAhead = 4 * kBlock;

// The query blocks of all problems, those of a head together: which one is `item`?
struct BlockIndex {
  int64_t problem, head, block;
};
AE_INLINE BlockIndex block_index(const AttentionParams& p, int64_t item) {
  if (!p.packed()) {
    const int64_t blocks = blocks_of(p.q_length, query_block(p.q_length));
    return {item / (blocks * p.heads), item / blocks % p.heads, item % blocks};
  }
  int64_t low = 0, high = p.problems;  // starts[low] * heads <= item < starts[high] * heads
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (p.q_block_starts[middle] * p.heads <= item ? low : high) = middle;
  }
  const int64_t blocks = p.q_block_starts[low + 1] - p.q_block_starts[low];
  const int64_t rest = item - p.q_block_starts[low] * p.heads;
  return {low, rest / blocks, rest % blocks};
}
AE_INLINE int64_t query_blocks(const AttentionParams& p) {
  return p.packed() ? p.q_block_starts[p.problems]
                    : p.problems * blocks_of(p.q_length, query_block(p.q_length));
}

}  // namespace attention_ext::kernels
