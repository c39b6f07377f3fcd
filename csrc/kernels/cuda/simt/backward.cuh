// Attention backward in two kernels without atomics, each sum in a fixed order:
//   keys      a block owns 64 keys of one key/value head and up to kColumns columns of dK and of
//   dV,
//             and walks over the query tiles of every head of the group;
//   queries   a block owns 64 query rows of one head and up to kColumns columns of dQ, and walks
//   over
//             the key tiles; the gradient of a bias that broadcasts nowhere is written
//             on the way, or delta of attention weights is all that is.
// Both rebuild P and dS (scores.cuh). The same kernels serve attention_weights_backward, whose
// incoming gradient takes the place of dP.
#pragma once

#include "kernels/cuda/simt/scores.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

AE_INLINE int64_t key_chunks(const BackwardParams& p, int64_t columns) {
  return larger(p.grad_key.defined() ? larger(1, blocks_of(p.qk_size, columns)) : 0,
                p.grad_value.defined() ? larger(1, blocks_of(p.v_size, columns)) : 0);
}
AE_INLINE int64_t keys_blocks(const BackwardParams& p, int64_t columns) {
  return p.kv_heads * tile_slots(p.packed(), p.problems, p.k_length, kTile) *
         key_chunks(p, columns);
}
AE_INLINE int64_t query_chunks(const BackwardParams& p, int64_t columns) {
  return p.grad_query.defined() ? larger(1, blocks_of(p.qk_size, columns)) : 1;
}
AE_INLINE int64_t queries_blocks(const BackwardParams& p, int64_t columns) {
  return p.heads * tile_slots(p.packed(), p.problems, p.q_length, kTile) * query_chunks(p, columns);
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<Accumulation<T>>)
    backward_keys_kernel(const __grid_constant__ BackwardParams p, int64_t first_block) {
  using A = Accumulation<T>;
  AE_DYNAMIC_SHARED(memory);
  Shared<A>& shared = *reinterpret_cast<Shared<A>*>(memory);
  const int64_t block = first_block + blockIdx.x, chunks = key_chunks(p, kKeyColumns<A>);
  const int64_t slots = tile_slots(p.packed(), p.problems, p.k_length, kTile);
  const int chunk = static_cast<int>(block % chunks);
  const int g = static_cast<int>(block / chunks / slots);
  const Slot slot = find_slot(p, block / chunks % slots, /*along_keys=*/true);
  if (slot.empty) return;
  const Problem& problem = share_problem(slot.problem, shared);
  const int64_t j0 = slot.tile * kTile;
  const int column = chunk * kKeyColumns<A>;
  const bool want_key = p.grad_key.defined() && (column < p.qk_size);
  const bool want_value = p.grad_value.defined() && (column < p.v_size);
  A key_grad[kPer][kKeyColumns<A> / kSide], value_grad[kPer][kKeyColumns<A> / kSide];
  clear(key_grad);
  clear(value_grad);
  const int group = static_cast<int>(p.group());
  for (int h = slot.bad ? (g + 1) * group : g * group; h < (g + 1) * group; ++h) {
    const RowRange rows =
        p.windowed() ? window_rows(p, problem, j0, smaller(problem.k_length, j0 + kTile) - 1)
                     : RowRange{0, problem.q_length};
    const int tiles = static_cast<int>(blocks_of(rows.end, kTile));
    for (int tile = static_cast<int>(rows.begin / kTile); tile < tiles; ++tile) {
      const int64_t i0 = int64_t{tile} * kTile;
      const TileAt at(problem, i0, j0);
      const uint32_t visible = visible_pairs<A>(p, problem, h, at);
      if (__syncthreads_or(visible != 0) == 0) continue;
      GradientPairs<A> pairs;
      gradient_pairs<T>(p, problem, h, at, visible, want_key, shared, pairs);
      if (threadIdx.x == 0) ++shared.visited;
      const int64_t i = problem.q_begin + i0;
      if (want_value) {
        store_pairs(pairs.kept, shared);
        accumulate<Along::kKeys>(Rows<T>(p.grad_output, problem.batch, h, i, at.rows), column,
                                 p.v_size, visible, shared, value_grad);
        __syncthreads();  // before dS takes the place of P
      }
      if (want_key) {
        store_pairs(pairs.inner, shared);
        accumulate<Along::kKeys>(Rows<T>(p.query, problem.batch, h, i, at.rows), column, p.qk_size,
                                 visible, shared, key_grad);
      }
    }
  }
  const int64_t j = problem.k_begin + j0;
  const TileAt keys(problem, 0, j0);
  if (want_key) {
    write_columns<T>(p.grad_key, problem.batch, g, j, keys.keys, column, p.qk_size,
                     static_cast<A>(p.scale), slot.bad, key_grad);
  }
  if (want_value) {
    write_columns<T>(p.grad_value, problem.batch, g, j, keys.keys, column, p.v_size, A{1}, slot.bad,
                     value_grad);
  }
  if (column == 0) report_visited(p, shared);
}

// dS of a bias that has an element for every pair; zeros if nothing is visible.
template <class A>
AE_DEVICE void write_bias_pairs(const BackwardParams& p, const Problem& problem, int64_t h,
                                const TileAt& at, bool visible, const A (&scores)[kPer][kPer]) {
  const Lane lane;
  A* row = p.grad_bias.at<A>(problem.batch, h, at.i0 + lane.row(0), at.j0 + lane.x);
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
    A* to = row;
#pragma unroll
    for (int n = 0; n < kPer; ++n) {
      if (lane.row(r) < at.rows && lane.key(n) < at.keys) *to = visible ? scores[r][n] : A{0};
      to += kSide * p.grad_bias.stride[3];
    }
    row += p.grad_bias.stride[2];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<Accumulation<T>>)
    backward_queries_kernel(const __grid_constant__ BackwardParams p, int64_t first_block) {
  using A = Accumulation<T>;
  AE_DYNAMIC_SHARED(memory);
  Shared<A>& shared = *reinterpret_cast<Shared<A>*>(memory);
  const Lane lane;
  const int64_t block = first_block + blockIdx.x, chunks = query_chunks(p, kColumns<A>);
  const int64_t slots = tile_slots(p.packed(), p.problems, p.q_length, kTile);
  const int chunk = static_cast<int>(block % chunks);
  const int h = static_cast<int>(block / chunks / slots);
  const Slot slot = find_slot(p, block / chunks % slots, /*along_keys=*/false);
  if (slot.empty) return;
  const Problem& problem = share_problem(slot.problem, shared);
  const int64_t i0 = slot.tile * kTile, column = int64_t{chunk} * kColumns<A>;
  const int g = h / static_cast<int>(p.group());
  const TileAt rows(problem, i0, 0);
  const bool want_query = p.grad_query.defined() && column < p.qk_size;
  const bool want_bias = chunk == 0 && p.grad_bias.defined() && bias_is_full(p);
  const bool want_delta = chunk == 0 && p.new_delta.defined();
  KeyRange keys = p.windowed() && !want_bias ? window_hull(p, problem, i0, i0 + rows.rows - 1)
                                             : KeyRange{0, problem.k_length};
  if (slot.bad) keys = {0, 0};

  A query_grad[kPer][kColumnsPer<A>];
  clear(query_grad);
#pragma unroll
  for (int r = 0; r < kPer; ++r) shared.sums[lane.row(r)][lane.x] = A{0};
  const int tiles = static_cast<int>(blocks_of(keys.end, kTile));
  for (int tile = static_cast<int>(keys.begin / kTile); tile < tiles; ++tile) {
    const int64_t j0 = int64_t{tile} * kTile;
    const TileAt at(problem, i0, j0);
    const uint32_t visible = visible_pairs<A>(p, problem, h, at);
    GradientPairs<A> pairs;
    if (__syncthreads_or(visible != 0) == 0) {
      if (want_bias) write_bias_pairs(p, problem, h, at, false, pairs.scores);
      continue;
    }
    gradient_pairs<T>(p, problem, h, at, visible, /*want_scores=*/true, shared, pairs);
    if (want_bias) write_bias_pairs(p, problem, h, at, true, pairs.scores);
    if (want_delta) {
#pragma unroll
      for (int r = 0; r < kPer; ++r) {
        A& sum = shared.sums[lane.row(r)][lane.x];
#pragma unroll
        for (int n = 0; n < kPer; ++n) sum += pairs.scores[r][n];
      }
    }
    if (want_query) {
      store_pairs(pairs.inner, shared);
      accumulate<Along::kRows>(Rows<T>(p.key, problem.batch, g, problem.k_begin + j0, at.keys),
                               column, p.qk_size, visible, shared, query_grad);
    }
  }
  if (want_query) {
    write_columns<T>(p.grad_query, problem.batch, h, problem.q_begin + i0, rows.rows, column,
                     p.qk_size, static_cast<A>(p.scale), slot.bad, query_grad);
  }
  if (want_delta) {
#pragma unroll
    for (int r = 0; r < kPer; ++r) {
      const A total = row_sum(shared.sums[lane.row(r)][lane.x]);
      if (lane.x == 0 && lane.row(r) < rows.rows) {
        *p.new_delta.at<A>(problem.batch, h, problem.q_begin + i0 + lane.row(r), 0) =
            slot.bad ? kNan<A> : total;
      }
    }
  }
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
