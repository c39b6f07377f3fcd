// Gradients of the query, and of a bias that no dimension broadcasts: a block of four warps owns 64
// query rows and walks over the key tiles they see, adding in their order: no atomics. K and V
// tiles come in two stages where shared memory allows.
//
// A tile: S = Q K^T and dP = dO V^T, both with query rows down; P and dS (gradient.cuh); dS into
// the bias gradient; dQ += dS K with dS rounded to 16 bits, straight from the registers.
//
// Shared memory: Q and dO, 128 rows, and kStages times 2 * kKeys rows of kSize numbers.
#pragma once

#include "kernels/cuda/tensor/gradient.cuh"

namespace attention_ext::kernels::cuda::tensor {

template <int kSize>
struct QueriesShape {
  static constexpr int kRows = 16 * kWarps;
  static constexpr int kKeys = kSize <= 64 ? 64 : 32;
  static constexpr int kStages = kSize <= 128 ? 2 : 1;
  static constexpr int kSharedMemory =
      (2 * kRows + kStages * 2 * kKeys) * kSize * 2 + static_cast<int>(sizeof(BlockState));
  static_assert(fits_budget(kSize, kSharedMemory));
};

// Row i by one warp: keys in lanes for the pairs, two columns a lane for the sums.
template <ScalarType kType>
__device__ __attribute__((noinline)) void careful_query(const BackwardParams& p, const Head& head,
                                                        int64_t i) {
  const Problem& problem = head.problem;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const KeyRange keys = window_hull(p, problem, i, i);
  const float scale = static_cast<float>(p.scale);
  for (int64_t e0 = 0; e0 < p.qk_size; e0 += 64) {
    const int64_t e = e0 + 2 * lane;
    float low = 0.0f, high = 0.0f;
    for (int64_t j0 = keys.begin; j0 < keys.end; j0 += 32) {
      PairGradient g{false, 0.0f, 0.0f};
      if (j0 + lane < keys.end) g = pair_gradient<kType>(p, head, i, j0 + lane);
      const uint32_t shown = ptx::ballot(g.visible);
      for (int y = 0; y < 32; ++y) {
        const float ds = ptx::shuffle(g.ds, y);
        if ((shown >> y & 1) == 0 || e >= p.qk_size) continue;
        const Bits* const k =
            p.key.at<const Bits>(problem.batch, head.kv_head, problem.k_begin + j0 + y, e);
        low += ds * ptx::unpack<kType>(k[0]);
        high += ds * ptx::unpack<kType>(k[1]);
      }
    }
    if (e < p.qk_size) {
      store_pair<kType>(p.grad_query,
                        p.grad_query.offset(problem.batch, head.h, problem.q_begin + i, e),
                        low * scale, high * scale);
    }
  }
}

// Zeros for the columns [from, to) of the bias gradient that no visible tile covers.
template <int kRows>
AE_DEVICE void clear_bias_gradient(const BackwardParams& p, const Head& head, int64_t i0,
                                   int64_t from, int64_t to) {
  const int64_t rows = head.problem.q_length - i0 < kRows ? head.problem.q_length - i0 : kRows;
  const int64_t columns = to - from;
  for (int64_t n = threadIdx.x; n < rows * columns; n += kThreads) {
    *p.grad_bias.at<float>(head.problem.batch, head.h, i0 + n / columns, from + n % columns) = 0.0f;
  }
}

template <ScalarType kType, int kSize, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 2)
    queries_kernel(const __grid_constant__ BackwardParams p, int64_t first_block) {
  using Shape = QueriesShape<kSize>;
  constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kStages = Shape::kStages;
  AE_DYNAMIC_SHARED(memory);
  Bits* const query = reinterpret_cast<Bits*>(memory);
  Bits* const grad = query + kRows * kSize;
  Bits* const stages = grad + kRows * kSize;
  BlockState& state = *reinterpret_cast<BlockState*>(stages + kStages * 2 * kKeys * kSize);

  const int64_t block = first_block + blockIdx.x;
  const int64_t row_tiles = (p.q_length + kRows - 1) / kRows;
  const int64_t i0 = (row_tiles - 1 - block % row_tiles) * kRows;
  if (threadIdx.x == 0) {
    state.head = head_of(p, block / row_tiles / p.heads, block / row_tiles % p.heads);
  }
  __syncthreads();
  const Head& head = state.head;
  const Problem& problem = head.problem;
  if (i0 >= problem.q_length) return;
  const int row = 16 * (static_cast<int>(threadIdx.x) >> 5);
  const bool natural = kGeneral && natural_scores(p);
  const bool drops = kGeneral && p.dropout.threshold != 0;
  const bool has_grad = p.grad_output.defined();
  const bool writes_bias = kGeneral && p.grad_bias.defined() && bias_is_full(p);
  const float scale = static_cast<float>(p.scale);

  float lse[2], rest[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t i = i0 + row + fragment_row(0, 2 * half);
    const bool inside = i < problem.q_length;
    const int64_t at = problem.q_begin + (inside ? i : 0);
    lse[half] = *p.logsumexp.at<const float>(problem.batch, head.h, at, 0);
    rest[half] = *p.residual.at<const float>(problem.batch, head.h, at, 0);
    delta[half] = *p.delta.at<const float>(problem.batch, head.h, at, 0);
  }

  Fragments<1, kSize> sums;
  clear<1, kSize>(sums);
  TermScale<kType> term_scale;
  bool met_mixed = false;
  int64_t bias_done = 0;
  Walk<true, kRows, kKeys> walk(p, head, i0, state.kinds);
  bool more = walk.next();
  auto copy = [&](int stage, int64_t j0) {
    Bits* const to = stages + stage * 2 * kKeys * kSize;
    copy_tile<kKeys, kSize>(to, rows_of(p.key, problem.batch, head.kv_head, problem.k_begin + j0),
                            problem.k_length - j0, static_cast<int>(p.qk_size));
    copy_tile<kKeys, kSize>(to + kKeys * kSize,
                            rows_of(p.value, problem.batch, head.kv_head, problem.k_begin + j0),
                            problem.k_length - j0, static_cast<int>(p.v_size));
    ptx::commit_copies();
  };
  if (more) {
    copy_tile<kRows, kSize>(query, rows_of(p.query, problem.batch, head.h, problem.q_begin + i0),
                            problem.q_length - i0, static_cast<int>(p.qk_size));
    if (has_grad) {
      copy_tile<kRows, kSize>(grad,
                              rows_of(p.grad_output, problem.batch, head.h, problem.q_begin + i0),
                              problem.q_length - i0, static_cast<int>(p.v_size));
    }
    copy(0, walk.position());
  }
  for (int stage = 0; more; stage ^= kStages - 1) {
    const int64_t j0 = walk.position();
    const bool mixed = walk.kind == TileKind::kMixed;
    met_mixed = met_mixed || mixed;
    more = walk.next();
    if (kStages == 2 && more) {
      copy(stage ^ 1, walk.position());
      ptx::wait_copies<1>();
    } else {
      ptx::wait_copies<0>();
    }
    __syncthreads();
    const Bits* const key = stages + stage * 2 * kKeys * kSize;
    const Bits* const value = key + kKeys * kSize;

    const uint32_t visible = mixed ? visible_bits<false, kKeys>(p, head, i0, j0, row) : ~0u;
    const uint32_t kept = drops ? kept_bits<false, kKeys>(head, i0, j0, row) : ~0u;
    const SharedLeft<kSize, 1> queries{query, row}, grads{grad, row};
    Fragments<1, kKeys> s, dp;
    multiply_columns<kType, kSize, 1, kKeys>(s, queries, key);
    if (natural) adjust_scores<false, kKeys>(p, head, i0, j0, row, s[0]);
    make_probabilities<kKeys>(
        s[0], natural, scale, visible, [&](int, int c) { return lse[c >> 1]; },
        [&](int, int c) { return rest[c >> 1]; });
    if (has_grad) {
      multiply_columns<kType, kSize, 1, kKeys>(dp, grads, value);
    } else {
      clear<1, kKeys>(dp);
    }
    make_gradients<kKeys>(dp[0], s[0], visible, kept, static_cast<float>(p.dropout.rescale),
                          [&](int, int c) { return delta[c >> 1]; });
    if (writes_bias) {
      clear_bias_gradient<kRows>(p, head, i0, bias_done, j0);
      bias_done = j0 + kKeys;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int64_t i = i0 + row + fragment_row(0, c), j = j0 + fragment_column(n, c);
          if (i < problem.q_length && j < problem.k_length) {
            *p.grad_bias.at<float>(problem.batch, head.h, i, j) = dp[0][n][c];
          }
        }
      }
    }
    if (kGeneral && p.softcap > 0) {
      multiply_columns<kType, kSize, 1, kKeys>(s, queries, key);
      multiply_by_slope<kKeys>(dp[0], s[0], scale, static_cast<float>(p.softcap));
    }
    term_scale.template apply<kKeys, kSize>(dp[0], sums[0]);
    multiply_rows<kType, kSize, 1, kKeys, kSize>(sums, dp, key, 0);
    __syncthreads();  // nobody reads this stage any more
    if (kStages == 1 && more) copy(0, walk.position());
  }
  if (writes_bias) {
    clear_bias_gradient<kRows>(p, head, i0, bias_done, problem.k_length);
  }
  if (!p.grad_query.defined()) return;
  if (met_mixed) {
    bool finite = true;
#pragma unroll
    for (int e = 0; e < kSize / 8; ++e) {
#pragma unroll
      for (int c = 0; c < 4; ++c) finite = finite && is_finite(sums[0][e][c]);
    }
    if (__syncthreads_or(!finite)) {
      for (int x = static_cast<int>(threadIdx.x) >> 5; x < kRows; x += kWarps) {
        if (i0 + x < problem.q_length) careful_query<kType>(p, head, i0 + x);
      }
      return;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t i = i0 + row + fragment_row(0, 2 * half);
    if (i >= problem.q_length) continue;
    const int64_t to = p.grad_query.offset(problem.batch, head.h, problem.q_begin + i, 0);
    const float factor = scale * term_scale.undo(half);
#pragma unroll
    for (int e = 0; e < kSize / 8; ++e) {
      const int column = fragment_column(e, 0);
      if (column >= p.qk_size) continue;
      store_pair<kType>(p.grad_query, to + column, sums[0][e][2 * half] * factor,
                        sums[0][e][2 * half + 1] * factor);
    }
  }
}

template <ScalarType kType>
const char* launch_queries(const BackwardParams& p, const DeviceLimits& device, void* stream) {
  return for_instance(p, [&]<int kSize, bool kGeneral>() {
    using Shape = QueriesShape<kSize>;
    const int64_t blocks = p.problems * p.heads * blocks_of(p.q_length, Shape::kRows);
    return launch<BackwardParams>(queries_kernel<kType, kSize, kGeneral>, p, blocks, kThreads,
                                  Shape::kSharedMemory, device, stream);
  });
}

}  // namespace attention_ext::kernels::cuda::tensor
