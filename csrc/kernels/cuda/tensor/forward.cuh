// Attention forward on tensor cores, float16 and bfloat16, FlashAttention-2's scheme: a block of
// four warps owns 64 * kSlices query rows, each warp its own 16 * kSlices; K and V pass through
// shared memory, a tile at a time; scores, softmax and sums stay in float32 registers. The
// probabilities are rounded to 16 bits for the second product, their sum is not.
//
// The road of a tile, with what the copies do meanwhile:
//   1 wait K, barrier            V of this tile starts
//   2 scores = Q K^T             ... and arrives
//   3 options and masks, only where a call has them; the next visible tile is looked for
//   4 wait V, barrier            K of the next visible tile starts
//   5 online softmax, output += P V
// A hidden value that is not finite spoils the output by 0 * V: that shows in the result, and then
// the block is computed again the careful way (careful.cuh).
//
// Shared memory: Q, K and V tiles, 64 * kSlices + 2 * kKeys rows of kSize numbers, and the block's
// state.
#pragma once

#include "kernels/cuda/choose.h"
#include "kernels/cuda/plan.h"
#include "kernels/cuda/simt/forward.cuh"
#include "kernels/cuda/tensor/careful.cuh"
#include "kernels/cuda/tensor/entries.h"
#include "kernels/cuda/tensor/walk.cuh"

namespace attention_ext::kernels::cuda::tensor {

// Sizes of an instance. kGeneral: takes every option; the plain ones take windows and bool masks.
// kResident: the query operand stays in registers.
template <int kSize, bool kGeneral>
struct ForwardShape {
  static constexpr int kSlices = kSize <= 64 && !kGeneral ? 2 : 1;
  static constexpr int kRows = 16 * kWarps * kSlices;
  static constexpr int kKeys = 64;
  static constexpr bool kResident = kSize <= 128 && kSlices == 1;
  static constexpr int kSharedMemory =
      (kRows + 2 * kKeys) * kSize * 2 + static_cast<int>(sizeof(BlockState));
  static_assert(fits_budget(kSize, kSharedMemory));
};

// Writes logsumexp and its residual of row i, returns what normalises its output.
AE_DEVICE float finish_row(const AttentionParams& p, const Head& head, int64_t i, float maximum,
                           float sum, bool seen, bool writes) {
  const float sink = p.sinks != nullptr ? static_cast<const float*>(p.sinks)[head.h] : 0.0f;
  const simt_kernels::RowEnd<float> end(maximum, sum, seen, p.sinks != nullptr, sink,
                                        static_cast<float>(p.dropout.rescale));
  if (writes) {
    const int64_t row = head.problem.q_begin + i;
    *p.logsumexp.at<float>(head.problem.batch, head.h, row, 0) = end.lse;
    *p.residual.at<float>(head.problem.batch, head.h, row, 0) = end.residual;
  }
  return end.factor;
}

// Two neighbouring output numbers, and what rounding took from them.
template <ScalarType kType>
AE_DEVICE void write_pair(const AttentionParams& p, int64_t offset, int64_t residual_offset,
                          float low, float high) {
  const uint32_t pair = ptx::pack<kType>(low, high);
  *reinterpret_cast<uint32_t*>(reinterpret_cast<Bits*>(p.output.data) + offset) = pair;
  if (p.output_residual.defined()) {
    const float rest_low = low - ptx::unpack<kType>(static_cast<Bits>(pair));
    const float rest_high = high - ptx::unpack<kType>(static_cast<Bits>(pair >> 16));
    *reinterpret_cast<uint32_t*>(reinterpret_cast<Bits*>(p.output_residual.data) +
                                 residual_offset) = ptx::pack<kType>(rest_low, rest_high);
  }
}

// Row i by one warp, keys in lanes for the softmax, head sizes in lanes for the values.
template <ScalarType kType>
__device__ __attribute__((noinline)) void careful_row(const AttentionParams& p, const Head& head,
                                                      int64_t i) {
  const Problem& problem = head.problem;
  const int64_t h = head.h;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const KeyRange keys = window_hull(p, problem, i, i);
  float m = -kInfinity, l = 0.0f;
  bool seen = false;
  for (int64_t j0 = keys.begin; j0 < keys.end; j0 += 32) {
    bool visible = false;
    float product = 0.0f, s = -kInfinity;
    if (j0 + lane < keys.end) s = score_of<kType>(p, head, i, j0 + lane, visible, product);
    seen = seen || ptx::any(visible);
    const float most = std::fmax(m, warp_max(s)), base = most == -kInfinity ? 0.0f : most;
    l = l * std::exp(m - base) + warp_sum(visible ? std::exp(s - base) : 0.0f);
    m = most;
  }
  const float base = m == -kInfinity ? 0.0f : m;
  const float factor = finish_row(p, head, i, m, l, seen, lane == 0);
  const int64_t offset = p.output.offset(problem.batch, head.h, problem.q_begin + i, 0);
  const int64_t rest = p.output_residual.defined()
                           ? p.output_residual.offset(problem.batch, head.h, problem.q_begin + i, 0)
                           : 0;
  for (int64_t e0 = 0; e0 < p.v_size; e0 += 64) {  // 64 columns at a time, scores once for each
    const int64_t e = e0 + 2 * lane;
    float low = 0.0f, high = 0.0f;
    for (int64_t j0 = keys.begin; j0 < keys.end; j0 += 32) {
      bool visible = false;
      float product = 0.0f, prob = 0.0f;
      const int64_t j = j0 + lane;
      if (j < keys.end) prob = std::exp(score_of<kType>(p, head, i, j, visible, product) - base);
      const bool drops =
          p.dropout.threshold != 0 && visible && !keep(head.dropout, problem.index, h, i, j);
      if (drops) prob = 0.0f;
      const uint32_t shown = ptx::ballot(visible);
      for (int y = 0; y < 32; ++y) {
        const float weight = ptx::shuffle(prob, y);
        if ((shown >> y & 1) == 0 || e >= p.v_size) continue;
        const Bits* const v =
            p.value.at<Bits>(problem.batch, head.kv_head, problem.k_begin + j0 + y, e);
        low += weight * ptx::unpack<kType>(v[0]);
        high += weight * ptx::unpack<kType>(v[1]);
      }
    }
    if (e < p.v_size) {
      write_pair<kType>(p, offset + e, rest + e, seen ? low * factor : 0.0f,
                        seen ? high * factor : 0.0f);
    }
  }
}

// Running state of the two rows a thread has in each slice.
template <int kSlices>
struct RowState {
  float maximum[kSlices][2];  // of the scores in their working unit
  float sum[kSlices][2];      // this thread's columns
  uint32_t seen;              // bit 2 m + half

  AE_DEVICE void start() {
    seen = 0;
#pragma unroll
    for (int m = 0; m < kSlices; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[m][half] = -kInfinity;
        sum[m][half] = 0.0f;
      }
    }
  }
};

// Online softmax of one slice: scores become probabilities, older sums shrink. `unit` turns working
// scores into powers of two. kScaled: working scores are products, unit holds the scale too and one
// fused step makes the exponent; otherwise they are natural, where unit * score may overflow.
template <bool kScaled, int kKeys, int kSize>
AE_DEVICE void softmax(float (&s)[kKeys / 8][4], float (&output)[kSize / 8][4], float (&maximum)[2],
                       float (&sum)[2], float unit) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = maximum[half];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      most = std::fmax(most, std::fmax(s[n][2 * half], s[n][2 * half + 1]));
    }
    most = quad_max(most);
    // A row that has seen nothing finite yet keeps -inf; its scores must not become NaN.
    const float base = most == -kInfinity ? 0.0f : most;
    const float shrink = kScaled ? ptx::exp2_approx(maximum[half] * unit - base * unit)
                                 : ptx::exp2_approx((maximum[half] - base) * unit);
    const float start = base * unit;
    maximum[half] = most;
    float total = sum[half] * shrink;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int c = 2 * half; c < 2 * half + 2; ++c) {
        s[n][c] = kScaled ? ptx::exp2_approx(std::fma(s[n][c], unit, -start))
                          : ptx::exp2_approx((s[n][c] - base) * unit);
        total += s[n][c];
      }
    }
    sum[half] = total;
#pragma unroll
    for (int n = 0; n < kSize / 8; ++n) {
      output[n][2 * half] *= shrink;
      output[n][2 * half + 1] *= shrink;
    }
  }
}

template <ScalarType kType, int kSize, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ AttentionParams p, int64_t first_block) {
  using Shape = ForwardShape<kSize, kGeneral>;
  constexpr int kSlices = Shape::kSlices, kRows = Shape::kRows, kKeys = Shape::kKeys;
  AE_DYNAMIC_SHARED(memory);
  Bits* const query = reinterpret_cast<Bits*>(memory);
  Bits* const key = query + kRows * kSize;
  Bits* const value = key + kKeys * kSize;
  BlockState& state = *reinterpret_cast<BlockState*>(value + kKeys * kSize);

  const int64_t block = first_block + blockIdx.x;
  const int64_t row_tiles = (p.q_length + kRows - 1) / kRows;
  // Long rows of a causal mask first, so that the last blocks are short ones.
  const int64_t i0 = (row_tiles - 1 - block % row_tiles) * kRows;
  if (threadIdx.x == 0) {
    state.head = head_of(p, block / row_tiles / p.heads, block / row_tiles % p.heads);
  }
  __syncthreads();
  const Head& head = state.head;
  const Problem& problem = head.problem;
  if (i0 >= problem.q_length) return;
  const int row = 16 * kSlices * (static_cast<int>(threadIdx.x) >> 5);  // of this warp

  const bool natural = kGeneral && natural_scores(p);
  const bool drops = kGeneral && p.dropout.threshold != 0;
  const float scale = static_cast<float>(p.scale);
  const float unit = natural ? kLog2E : scale * kLog2E;

  Fragments<kSlices, kSize> output;
  clear<kSlices, kSize>(output);
  RowState<kSlices> rows;
  rows.start();
  bool met_mixed = false;
  int64_t visited = 0;

  Walk<true, kRows, kKeys> walk(p, head, i0, state.kinds);
  bool more = walk.next();
  auto copy = [&](Bits* to, const View& from, int64_t j0, int64_t size) {
    copy_tile<kKeys, kSize>(to, rows_of(from, problem.batch, head.kv_head, problem.k_begin + j0),
                            problem.k_length - j0, static_cast<int>(size));
    ptx::commit_copies();
  };
  using Left = std::conditional_t<Shape::kResident, RegisterLeft<kSize, kSlices>,
                                  SharedLeft<kSize, kSlices>>;
  Left left;
  if (more) {
    copy_tile<kRows, kSize>(query, rows_of(p.query, problem.batch, head.h, problem.q_begin + i0),
                            problem.q_length - i0, static_cast<int>(p.qk_size));
    copy(key, p.key, walk.position(), p.qk_size);
  }
  bool first = true;
  while (more) {
    const int64_t j0 = walk.position();
    const bool mixed = walk.kind == TileKind::kMixed;
    met_mixed = met_mixed || mixed;
    ++visited;
    ptx::wait_copies<0>();
    __syncthreads();  // K is here for all; nobody reads the V of the tile before any more
    copy(value, p.value, j0, p.v_size);
    if (first) {
      if constexpr (Shape::kResident) {
        left.load(query, row);
      } else {
        left = Left{query, row};
      }
      first = false;
    }
    // Masks and dropout as bits, before the scores take up registers.
    uint32_t visible[kSlices], kept[kSlices];
#pragma unroll
    for (int m = 0; m < kSlices; ++m) {
      visible[m] = mixed ? visible_bits<false, kKeys>(p, head, i0, j0, row + 16 * m) : ~0u;
      kept[m] = drops ? kept_bits<false, kKeys>(head, i0, j0, row + 16 * m) : ~0u;
      // Bits 0, 1 of a block belong to the upper row, bits 2, 3 to the lower one.
      if ((visible[m] & 0x33333333u) != 0) rows.seen |= 1u << (2 * m);
      if ((visible[m] & 0xccccccccu) != 0) rows.seen |= 2u << (2 * m);
    }
    more = walk.next();

    Fragments<kSlices, kKeys> s;
    multiply_columns<kType, kSize, kSlices, kKeys>(s, left, key);
#pragma unroll
    for (int m = 0; m < kSlices; ++m) {
      if (natural) adjust_scores<false, kKeys>(p, head, i0, j0, row + 16 * m, s[m]);
      if (mixed) hide<kKeys>(s[m], visible[m], -kInfinity);
    }

    ptx::wait_copies<0>();
    __syncthreads();  // V is here for all; nobody reads K any more
    if (more) copy(key, p.key, walk.position(), p.qk_size);
#pragma unroll
    for (int m = 0; m < kSlices; ++m) {
      if (natural) {
        softmax<false, kKeys, kSize>(s[m], output[m], rows.maximum[m], rows.sum[m], unit);
      } else {
        softmax<true, kKeys, kSize>(s[m], output[m], rows.maximum[m], rows.sum[m], unit);
      }
      if (drops) hide<kKeys>(s[m], kept[m], 0.0f);
    }
    multiply_rows<kType, kSize, kSlices, kKeys, kSize>(output, s, value, 0);
  }

  if (p.visited != nullptr && threadIdx.x == 0 && visited != 0) count_visits(p, visited);
  if (met_mixed) {
    bool finite = true;
#pragma unroll
    for (int m = 0; m < kSlices; ++m) {
#pragma unroll
      for (int e = 0; e < kSize / 8; ++e) {
#pragma unroll
        for (int c = 0; c < 4; ++c) finite = finite && is_finite(output[m][e][c]);
      }
    }
    if (__syncthreads_or(!finite)) {
      for (int x = static_cast<int>(threadIdx.x) >> 5; x < kRows; x += kWarps) {
        if (i0 + x < problem.q_length) careful_row<kType>(p, head, i0 + x);
      }
      return;
    }
  }
#pragma unroll
  for (int m = 0; m < kSlices; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = i0 + row + fragment_row(m, 2 * half);
      const bool inside = i < problem.q_length;
      uint32_t seen = rows.seen >> (2 * m + half) & 1;
      seen |= __shfl_xor_sync(0xffffffffu, seen, 1);
      seen |= __shfl_xor_sync(0xffffffffu, seen, 2);
      const float maximum = natural ? rows.maximum[m][half] : rows.maximum[m][half] * scale;
      const float factor = finish_row(p, head, i, maximum, quad_sum(rows.sum[m][half]), seen != 0,
                                      inside && (threadIdx.x & 3) == 0);
      if (!inside) continue;
      const int64_t to = p.output.offset(problem.batch, head.h, problem.q_begin + i, 0);
      const int64_t rest =
          p.output_residual.defined()
              ? p.output_residual.offset(problem.batch, head.h, problem.q_begin + i, 0)
              : 0;
#pragma unroll
      for (int e = 0; e < kSize / 8; ++e) {
        const int column = fragment_column(e, 0);
        if (column >= p.v_size) continue;
        const float low = output[m][e][2 * half], high = output[m][e][2 * half + 1];
        write_pair<kType>(p, to + column, rest + column, seen != 0 ? low * factor : 0.0f,
                          seen != 0 ? high * factor : 0.0f);
      }
    }
  }
}

template <ScalarType kType>
const char* launch_forward(const AttentionParams& p, const DeviceLimits& device, void* stream) {
  return for_instance(p, [&]<int kSize, bool kGeneral>() {
    using Shape = ForwardShape<kSize, kGeneral>;
    const int64_t blocks = p.problems * p.heads * blocks_of(p.q_length, Shape::kRows);
    return launch<AttentionParams>(forward_kernel<kType, kSize, kGeneral>, p, blocks, kThreads,
                                   Shape::kSharedMemory, device, stream);
  });
}

}  // namespace attention_ext::kernels::cuda::tensor
