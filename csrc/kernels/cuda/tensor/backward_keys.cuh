// Gradients of key and value: a block of four warps owns 64 keys of one key/value head, and at most
// kColumns columns of their gradients, and walks over the query tiles that see them, head by head
// of the group, adding in that order: no atomics. Q and dO tiles come in two stages where shared
// memory allows.
//
// A tile, with keys down: S^T = K Q^T and dP^T = V dO^T; P and dS (gradient.cuh); dV += P^T dO and
// dK += dS^T Q with the left sides rounded to 16 bits, straight from the registers: since scores
// are made transposed, nothing is turned round in shared memory.
//
// Shared memory: K and V, 128 rows, and kStages times 2 * kRows rows of kSize numbers and three
// statistics for each of kRows rows. Two blocks fit a multiprocessor (budget in walk.cuh).
#pragma once

#include "kernels/cuda/tensor/gradient.cuh"

namespace attention_ext::kernels::cuda::tensor {

template <int kSize>
struct KeysShape {
  static constexpr int kKeys = 16 * kWarps;
  static constexpr int kRows = kSize <= 64 ? 64 : 32;
  static constexpr int kStages = kSize <= 128 ? 2 : 1;
  static constexpr int kColumns = kSize <= 128 ? kSize : 128;
  static constexpr int kChunks = kSize / kColumns;
  struct State {
    Head heads[2];  // of the tile at work and of the one whose copies are under way
    int64_t end_head;
    float lse[kStages][kRows], rest[kStages][kRows], delta[kStages][kRows];
    TileKind kinds[kChunk];
  };
  static constexpr int kSharedMemory =
      (2 * kKeys + kStages * 2 * kRows) * kSize * 2 + static_cast<int>(sizeof(State));
  static_assert(fits_budget(kSize, kSharedMemory));
};

// The keys of a block, columns [begin, begin + count) of both gradients, a key to each warp at a
// time: rows in lanes for the pairs, two columns a lane for the sums. All threads of the block take
// part; `head` lies in shared memory and stands for each head of the group in turn.
template <ScalarType kType>
__device__ __attribute__((noinline)) void careful_keys(const BackwardParams& p, Head& head,
                                                       int64_t j0, int keys, int begin, int count) {
  const Problem& problem = head.problem;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int64_t first = head.kv_head * p.group();
  const float scale = static_cast<float>(p.scale);
  const float rescale = static_cast<float>(p.dropout.rescale);
  for (int step = 0; step < keys / kWarps * (count / 64); ++step) {
    const int64_t j = j0 + step % (keys / kWarps) * kWarps + warp;
    const int64_t e = begin + step / (keys / kWarps) * 64 + 2 * lane;
    const bool inside = j < problem.k_length;
    const RowRange rows = window_rows(p, problem, j, j);
    float key_low = 0.0f, key_high = 0.0f, value_low = 0.0f, value_high = 0.0f;
    for (int64_t h = first; h < first + p.group(); ++h) {
      __syncthreads();
      if (threadIdx.x == 0) head.h = h;
      __syncthreads();
      for (int64_t i0 = rows.begin; inside && i0 < rows.end; i0 += 32) {
        PairGradient g{false, 0.0f, 0.0f};
        if (i0 + lane < rows.end) g = pair_gradient<kType>(p, head, i0 + lane, j);
        const uint32_t shown = ptx::ballot(g.visible);
        for (int x = 0; x < 32; ++x) {
          const float ds = ptx::shuffle(g.ds, x), weight = ptx::shuffle(g.weight, x);
          if ((shown >> x & 1) == 0) continue;
          const int64_t i = problem.q_begin + i0 + x;
          if (e < p.qk_size) {
            const Bits* const q = p.query.at<const Bits>(problem.batch, h, i, e);
            key_low += ds * ptx::unpack<kType>(q[0]);
            key_high += ds * ptx::unpack<kType>(q[1]);
          }
          if (e < p.v_size && p.grad_output.defined()) {
            const Bits* const d = p.grad_output.at<const Bits>(problem.batch, h, i, e);
            value_low += weight * ptx::unpack<kType>(d[0]);
            value_high += weight * ptx::unpack<kType>(d[1]);
          }
        }
      }
    }
    const int64_t at = problem.k_begin + j;
    if (inside && e < p.qk_size && p.grad_key.defined()) {
      store_pair<kType>(p.grad_key, p.grad_key.offset(problem.batch, head.kv_head, at, e),
                        key_low * scale, key_high * scale);
    }
    if (inside && e < p.v_size && p.grad_value.defined()) {
      store_pair<kType>(p.grad_value, p.grad_value.offset(problem.batch, head.kv_head, at, e),
                        value_low * rescale, value_high * rescale);
    }
  }
}

template <ScalarType kType, int kSize, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 2)
    keys_kernel(const __grid_constant__ BackwardParams p, int64_t first_block) {
  using Shape = KeysShape<kSize>;
  constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kStages = Shape::kStages;
  constexpr int kColumns = Shape::kColumns;
  // Probabilities below float16's range count, too.
  constexpr float kLift = kType == ScalarType::kFloat16 ? 0x1p14f : 1.0f;
  AE_DYNAMIC_SHARED(memory);
  Bits* const key = reinterpret_cast<Bits*>(memory);
  Bits* const value = key + kKeys * kSize;
  Bits* const stages = value + kKeys * kSize;
  using State = typename Shape::State;
  State& state = *reinterpret_cast<State*>(stages + kStages * 2 * kRows * kSize);

  int64_t block = first_block + blockIdx.x;
  const int column0 = Shape::kChunks == 1 ? 0 : static_cast<int>(block % Shape::kChunks) * kColumns;
  block /= Shape::kChunks;
  const int64_t key_tiles = (p.k_length + kKeys - 1) / kKeys;
  const int64_t j0 = block % key_tiles * kKeys;  // early keys are seen by most rows
  if (threadIdx.x == 0) {
    const int64_t g = block / key_tiles % p.kv_heads;
    state.heads[0] = head_of(p, block / key_tiles / p.kv_heads, g * p.group());
    state.end_head = (g + 1) * p.group();
  }
  __syncthreads();
  if (j0 >= state.heads[0].problem.k_length) return;
  const int row = 16 * (static_cast<int>(threadIdx.x) >> 5);  // of this warp: keys
  const bool natural = kGeneral && natural_scores(p);
  const bool drops = kGeneral && p.dropout.threshold != 0;
  const bool has_grad = p.grad_output.defined();
  const float scale = static_cast<float>(p.scale);

  Fragments<1, kColumns> key_sums, value_sums;
  clear<1, kColumns>(key_sums);
  clear<1, kColumns>(value_sums);
  TermScale<kType> term_scale;
  bool met_mixed = false;

  // The walk over (head, query tile). `slot` is the place in heads[] of the walk's head; the tile
  // at work may still need the other one.
  int slot = 0;
  Walk<false, kRows, kKeys> walk(p, state.heads[0], j0, state.kinds);
  auto next = [&](int slot_at_work) {
    while (!walk.next()) {
      const int64_t h = state.heads[slot].h + 1;
      if (h == state.end_head) return false;
      __syncthreads();  // nobody looks at the walk's last head any more
      slot = slot_at_work ^ 1;
      if (threadIdx.x == 0) {
        state.heads[slot] = state.heads[slot_at_work];
        state.heads[slot].h = h;
      }
      __syncthreads();
      walk.restart(state.heads[slot]);
    }
    return true;
  };
  auto copy = [&](int stage) {
    const Head& head = state.heads[slot];
    const Problem& problem = head.problem;
    const int64_t i0 = walk.position(), at = problem.q_begin + i0;
    const int64_t rows = problem.q_length - i0;
    Bits* const to = stages + stage * 2 * kRows * kSize;
    copy_tile<kRows, kSize>(to, rows_of(p.query, problem.batch, head.h, at), rows,
                            static_cast<int>(p.qk_size));
    if (has_grad) {
      copy_tile<kRows, kSize>(to + kRows * kSize, rows_of(p.grad_output, problem.batch, head.h, at),
                              rows, static_cast<int>(p.v_size));
    }
    ptx::commit_copies();
    const int x = static_cast<int>(threadIdx.x);
    if (x < kRows) {
      const bool inside = x < rows;  // rows behind the end are hidden, whatever they hold
      state.lse[stage][x] =
          inside ? *p.logsumexp.at<const float>(problem.batch, head.h, at + x, 0) : 0.0f;
      state.rest[stage][x] =
          inside ? *p.residual.at<const float>(problem.batch, head.h, at + x, 0) : 0.0f;
      state.delta[stage][x] =
          inside ? *p.delta.at<const float>(problem.batch, head.h, at + x, 0) : 0.0f;
    }
  };
  bool more = next(0);
  if (more) {
    const Head& head = state.heads[slot];
    const Problem& problem = head.problem;
    copy_tile<kKeys, kSize>(key, rows_of(p.key, problem.batch, head.kv_head, problem.k_begin + j0),
                            problem.k_length - j0, static_cast<int>(p.qk_size));
    copy_tile<kKeys, kSize>(value,
                            rows_of(p.value, problem.batch, head.kv_head, problem.k_begin + j0),
                            problem.k_length - j0, static_cast<int>(p.v_size));
    copy(0);
  }
  for (int stage = 0; more; stage ^= kStages - 1) {
    const int64_t i0 = walk.position();
    const int slot_at_work = slot;
    const Head& head = state.heads[slot_at_work];
    const bool mixed = walk.kind == TileKind::kMixed;
    met_mixed = met_mixed || mixed;
    more = next(slot_at_work);
    if (kStages == 2 && more) {
      copy(stage ^ 1);
      ptx::wait_copies<1>();
    } else {
      ptx::wait_copies<0>();
    }
    __syncthreads();
    const Bits* const query = stages + stage * 2 * kRows * kSize;
    const Bits* const grad = query + kRows * kSize;

    const uint32_t visible = mixed ? visible_bits<true, kRows>(p, head, i0, j0, row) : ~0u;
    const uint32_t kept = drops ? kept_bits<true, kRows>(head, i0, j0, row) : ~0u;
    const SharedLeft<kSize, 1> keys{key, row}, values{value, row};
    Fragments<1, kRows> s, dp;
    multiply_columns<kType, kSize, 1, kRows>(s, keys, query);
    if (natural) adjust_scores<true, kRows>(p, head, i0, j0, row, s[0]);
    const float* const lse = state.lse[stage];
    const float* const rest = state.rest[stage];
    const float* const delta = state.delta[stage];
    make_probabilities<kRows>(
        s[0], natural, scale, visible, [&](int n, int c) { return lse[fragment_column(n, c)]; },
        [&](int n, int c) { return rest[fragment_column(n, c)]; });
    if (has_grad) {
      multiply_columns<kType, kSize, 1, kRows>(dp, values, grad);
    } else {
      clear<1, kRows>(dp);
    }
    make_gradients<kRows>(dp[0], s[0], visible, kept, static_cast<float>(p.dropout.rescale),
                          [&](int n, int c) { return delta[fragment_column(n, c)]; });
    if (has_grad) {
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          s[0][n][c] = (kept >> (4 * n + c) & 1) != 0 ? s[0][n][c] * kLift : 0.0f;
        }
      }
      multiply_rows<kType, kSize, 1, kRows, kColumns>(value_sums, s, grad, column0);
    }
    if (kGeneral && p.softcap > 0) {
      multiply_columns<kType, kSize, 1, kRows>(s, keys, query);
      multiply_by_slope<kRows>(dp[0], s[0], scale, static_cast<float>(p.softcap));
    }
    term_scale.template apply<kRows, kColumns>(dp[0], key_sums[0]);
    multiply_rows<kType, kSize, 1, kRows, kColumns>(key_sums, dp, query, column0);
    __syncthreads();  // nobody reads this stage any more
    if (kStages == 1 && more) copy(0);
  }

  const Head& head = state.heads[slot];
  const Problem& problem = head.problem;
  if (met_mixed) {
    bool finite = true;
#pragma unroll
    for (int e = 0; e < kColumns / 8; ++e) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        finite = finite && is_finite(key_sums[0][e][c]) && is_finite(value_sums[0][e][c]);
      }
    }
    if (__syncthreads_or(!finite)) {
      careful_keys<kType>(p, state.heads[slot], j0, kKeys, column0, kColumns);
      return;
    }
  }
  const float rescale = static_cast<float>(p.dropout.rescale) / kLift;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t j = j0 + row + fragment_row(0, 2 * half);
    if (j >= problem.k_length) continue;
    const int64_t at = problem.k_begin + j;
    const float factor = scale * term_scale.undo(half);
#pragma unroll
    for (int e = 0; e < kColumns / 8; ++e) {
      const int column = column0 + fragment_column(e, 0);
      if (p.grad_key.defined() && column < p.qk_size) {
        store_pair<kType>(p.grad_key, p.grad_key.offset(problem.batch, head.kv_head, at, column),
                          key_sums[0][e][2 * half] * factor, key_sums[0][e][2 * half + 1] * factor);
      }
      if (p.grad_value.defined() && column < p.v_size) {
        store_pair<kType>(
            p.grad_value, p.grad_value.offset(problem.batch, head.kv_head, at, column),
            value_sums[0][e][2 * half] * rescale, value_sums[0][e][2 * half + 1] * rescale);
      }
    }
  }
}

template <ScalarType kType>
const char* launch_keys(const BackwardParams& p, const DeviceLimits& device, void* stream) {
  return for_instance(p, [&]<int kSize, bool kGeneral>() {
    using Shape = KeysShape<kSize>;
    const int64_t blocks =
        p.problems * p.kv_heads * blocks_of(p.k_length, Shape::kKeys) * Shape::kChunks;
    return launch<BackwardParams>(keys_kernel<kType, kSize, kGeneral>, p, blocks, kThreads,
                                  Shape::kSharedMemory, device, stream);
  });
}

}  // namespace attention_ext::kernels::cuda::tensor
