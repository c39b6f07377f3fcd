// Attention forward. A block owns 64 query rows of one head and up to kColumns columns of the
// output and walks over the key tiles with an online softmax; wider values mean more blocks, each
// of which forms the scores again. Tiles without a visible pair cost the reading of the mask only.
#pragma once

#include "kernels/cuda/simt/scores.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

// The running softmax of a thread's four rows. The maximum is the same in the 16 lanes of a row,
// the sum is this lane's part of it.
template <class A>
struct OnlineSoftmax {
  A maximum[kPer], sum[kPer];
  uint32_t seen = 0;  // bits of visible pairs, all tiles together

  AE_DEVICE OnlineSoftmax() {
#pragma unroll
    for (int r = 0; r < kPer; ++r) {
      maximum[r] = -kInfinity<A>;
      sum[r] = A{0};
    }
  }
  // Scores become probabilities relative to the new maximum; shrink[r] is what older sums of row r
  // are multiplied by.
  AE_DEVICE void add(A (&s)[kPer][kPer], uint32_t visible, A (&shrink)[kPer]) {
    seen |= visible;
#pragma unroll
    for (int r = 0; r < kPer; ++r) {
      A most = maximum[r];
#pragma unroll
      for (int n = 0; n < kPer; ++n) {
        if ((visible & pair_bit(r, n)) != 0) most = std::fmax(most, s[r][n]);
      }
      most = row_max(most);
      // A row that has seen nothing finite keeps -inf; its scores must not become NaN.
      const A base = most == -kInfinity<A> ? A{0} : most;
      shrink[r] = std::exp(maximum[r] - base);
      maximum[r] = most;
      sum[r] *= shrink[r];
#pragma unroll
      for (int n = 0; n < kPer; ++n) {
        s[r][n] = (visible & pair_bit(r, n)) != 0 ? std::exp(s[r][n] - base) : A{0};
        sum[r] += s[r][n];
      }
    }
  }
};

// The end of a row: logsumexp = fl(m + log l), its residual (m - logsumexp) + log l, and the factor
// that normalises the output. Dead is decided from the mask: output 0, logsumexp -inf or the sink,
// whatever that is. A row that saw only scores of -inf is NaN, as softmax is.
template <class A>
struct RowEnd {
  A lse, residual, factor;
  AE_DEVICE RowEnd(A m, A l, bool seen, bool has_sink, A sink, A rescale) {
    A weight{1};
    if (has_sink) {
      const A most = std::fmax(m, sink);
      const A base = most == -kInfinity<A> ? A{0} : most;
      weight = std::exp(m - base);
      l = l * weight + std::exp(sink - base);
      m = most;
    }
    const A log_sum = std::log(l);
    lse = m + log_sum;
    residual = (m - lse) + log_sum;
    factor = weight * rescale / l;
    if (!seen) {
      lse = has_sink ? sink : -kInfinity<A>;
      residual = factor = A{0};
    } else if (m == -kInfinity<A>) {
      lse = -kInfinity<A>;
      residual = factor = kNan<A>;
    } else if (!(l > A{0})) {
      lse = residual = factor = kNan<A>;
    }
  }
};

// Output rows, and what rounding took from them.
template <class T, class A>
AE_DEVICE void write_output(const AttentionParams& p, const Problem& problem, bool bad, int64_t h,
                            const TileAt& at, int64_t column, const A (&factor)[kPer],
                            const A (&c)[kPer][kColumnsPer<A>]) {
  const Lane lane;
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
    if (lane.row(r) >= at.rows) break;
    const int64_t i = problem.q_begin + at.i0 + lane.row(r);
#pragma unroll
    for (int n = 0; n < kColumnsPer<A>; ++n) {
      const int64_t e = column + lane.key(n);
      if (e >= p.v_size) break;
      // A dead row's sums are zero already; its factor is too.
      const A exact = bad ? kNan<A> : c[r][n] * factor[r];
      const T rounded = narrow<T>(exact);
      *p.output.at<T>(problem.batch, h, i, e) = rounded;
      if (p.output_residual.defined()) {
        *p.output_residual.at<T>(problem.batch, h, i, e) =
            narrow<T>(is_finite(widen(rounded)) ? exact - widen(rounded) : A{0});
      }
    }
  }
}

// Blocks: heads x slots of query tiles x chunks of columns, the last fastest.
AE_INLINE int64_t forward_blocks(const AttentionParams& p, int64_t columns) {
  return p.heads * tile_slots(p.packed(), p.problems, p.q_length, kTile) *
         larger(1, blocks_of(p.v_size, columns));
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<Accumulation<T>>)
    forward_kernel(const __grid_constant__ AttentionParams p, int64_t first_block) {
  using A = Accumulation<T>;
  AE_DYNAMIC_SHARED(memory);
  Shared<A>& shared = *reinterpret_cast<Shared<A>*>(memory);
  const Lane lane;
  const int64_t block = first_block + blockIdx.x;
  const int64_t chunks = larger(1, blocks_of(p.v_size, kColumns<A>));
  const int64_t slots = tile_slots(p.packed(), p.problems, p.q_length, kTile);
  const int chunk = static_cast<int>(block % chunks);
  const int h = static_cast<int>(block / chunks / slots);
  const Slot slot = find_slot(p, block / chunks % slots, /*along_keys=*/false);
  if (slot.empty) return;
  const Problem& problem = share_problem(slot.problem, shared);
  const int64_t i0 = slot.tile * kTile, column = int64_t{chunk} * kColumns<A>;
  const int g = h / static_cast<int>(p.group());
  const TileAt rows(problem, i0, 0);
  KeyRange keys = p.windowed() ? window_hull(p, problem, i0, i0 + rows.rows - 1)
                               : KeyRange{0, problem.k_length};
  if (slot.bad) keys = {0, 0};

  OnlineSoftmax<A> softmax;
  A c[kPer][kColumnsPer<A>];
  clear(c);
  const bool drop = p.dropout.threshold != 0;
  const int tiles = static_cast<int>(blocks_of(keys.end, kTile));
  for (int tile = static_cast<int>(keys.begin / kTile); tile < tiles; ++tile) {
    const int64_t j0 = int64_t{tile} * kTile;
    const TileAt at(problem, i0, j0);
    const uint32_t visible = visible_pairs<A>(p, problem, h, at);
    if (__syncthreads_or(visible != 0) == 0) continue;
    if (threadIdx.x == 0) ++shared.visited;
    if (drop) fill_keep(p, problem, h, at, shared);
    A s[kPer][kPer], shrink[kPer];
    multiply(Rows<T>(p.query, problem.batch, h, problem.q_begin + i0, at.rows),
             Rows<T>(p.key, problem.batch, g, problem.k_begin + j0, at.keys), p.qk_size, shared, s);
    adjust_scores</*kSlope=*/false>(p, problem, h, at, visible, shared, s);
    softmax.add(s, visible, shrink);
    const int shift = drop ? keep_shift(p, at) : 0;
#pragma unroll
    for (int r = 0; r < kPer; ++r) {
#pragma unroll
      for (int n = 0; n < kColumnsPer<A>; ++n) c[r][n] *= shrink[r];
#pragma unroll
      for (int n = 0; n < kPer; ++n) {
        if (drop && !is_kept(shared, shift, lane.row(r), lane.key(n))) s[r][n] = A{0};
      }
    }
    store_pairs(s, shared);
    accumulate<Along::kRows>(Rows<T>(p.value, problem.batch, g, problem.k_begin + j0, at.keys),
                             column, p.v_size, visible, shared, c);
  }

  A factor[kPer];
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
    uint32_t seen = softmax.seen >> (r * kPer) & 0xfu;
#pragma unroll
    for (int step = kSide / 2; step > 0; step /= 2) {
      seen |= __shfl_xor_sync(kWholeWarp, seen, step);
    }
    const A sink = p.sinks != nullptr ? static_cast<const A*>(p.sinks)[h] : A{0};
    const RowEnd<A> end(softmax.maximum[r], row_sum(softmax.sum[r]), seen != 0, p.sinks != nullptr,
                        sink, static_cast<A>(p.dropout.rescale));
    factor[r] = end.factor;
    if (chunk == 0 && lane.x == 0 && lane.row(r) < rows.rows) {
      const int64_t i = problem.q_begin + i0 + lane.row(r);
      *p.logsumexp.at<A>(problem.batch, h, i, 0) = slot.bad ? kNan<A> : end.lse;
      *p.residual.at<A>(problem.batch, h, i, 0) = slot.bad ? kNan<A> : end.residual;
    }
  }
  write_output<T>(p, problem, slot.bad, h, rows, column, factor, c);
  if (chunk == 0) report_visited(p, shared);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
