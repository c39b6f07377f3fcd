// Attention weights rebuilt from the row statistics: a block for each tile of (L, S) of one head,
// or of the mean over the heads, which are summed in registers.
#pragma once

#include "kernels/cuda/simt/scores.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

AE_INLINE int64_t weights_blocks(const WeightsParams& p) {
  return p.problems * (p.average ? 1 : p.heads) * blocks_of(p.q_length, kTile) *
         blocks_of(p.k_length, kTile);
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<Accumulation<T>>)
    weights_kernel(const __grid_constant__ WeightsParams p, int64_t first_block) {
  using A = Accumulation<T>;
  AE_DYNAMIC_SHARED(memory);
  Shared<A>& shared = *reinterpret_cast<Shared<A>*>(memory);
  const Lane lane;
  const int64_t key_tiles = blocks_of(p.k_length, kTile), row_tiles = blocks_of(p.q_length, kTile);
  const int64_t block = first_block + blockIdx.x, heads = p.average ? 1 : p.heads;
  const int64_t j0 = block % key_tiles * kTile, i0 = block / key_tiles % row_tiles * kTile;
  const int64_t head = block / (key_tiles * row_tiles) % heads;
  const Problem& problem =
      share_problem(p.problem(block / (key_tiles * row_tiles * heads)), shared);
  const TileAt at(problem, i0, j0);
  const bool drop = p.dropout.threshold != 0;
  const A rescale = static_cast<A>(p.dropout.rescale);

  A sums[kPer][kPer] = {};
  for (int64_t h = head; h < (p.average ? p.heads : head + 1); ++h) {
    const uint32_t visible = visible_pairs<A>(p, problem, h, at);
    if (__syncthreads_or(visible != 0) == 0) continue;
    if (drop) fill_keep(p, problem, h, at, shared);
    A s[kPer][kPer];
    multiply(Rows<T>(p.query, problem.batch, h, i0, at.rows),
             Rows<T>(p.key, problem.batch, h / p.group(), j0, at.keys), p.qk_size, shared, s);
    adjust_scores</*kSlope=*/false>(p, problem, h, at, visible, shared, s);
    RowStatistics<A> rows;
    rows.load(p, nullptr, problem, h, at);
    const int shift = drop ? keep_shift(p, at) : 0;
#pragma unroll
    for (int r = 0; r < kPer; ++r) {
#pragma unroll
      for (int n = 0; n < kPer; ++n) {
        A prob = rows.probability(r, s[r][n]);
        if (drop) prob = is_kept(shared, shift, lane.row(r), lane.key(n)) ? prob * rescale : A{0};
        if ((visible & pair_bit(r, n)) != 0) sums[r][n] += prob;
      }
    }
  }
  const A factor = p.average ? A{1} / static_cast<A>(p.heads) : A{1};
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
#pragma unroll
    for (int n = 0; n < kPer; ++n) {
      const int row = lane.row(r), key = lane.key(n);
      if (row >= at.rows || key >= at.keys) continue;
      *p.weights.at<T>(problem.batch, head, i0 + row, j0 + key) = narrow<T>(sums[r][n] * factor);
    }
  }
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
