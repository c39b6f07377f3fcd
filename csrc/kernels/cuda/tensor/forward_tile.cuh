// The forward of one query tile over a walk of key tiles, on tensor cores, FlashAttention-2's
// scheme: a block of four warps owns 64 * kSlices query rows, each warp its own 16 * kSlices; K and
// V pass through shared memory, a tile at a time; scores, softmax and sums stay in float32
// registers. The probabilities are rounded to 16 bits for the second product, their sum is not.
// forward.cuh ends rows with it, split.cuh parts of rows.
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

#include "kernels/cuda/plan.h"
#include "kernels/cuda/tensor/careful.cuh"
#include "kernels/cuda/tensor/walk.cuh"

namespace attention_ext::kernels::cuda::tensor {

// Sizes of an instance. kGeneral: takes every option; the plain ones take windows and bool masks.
// kResident: the query operand stays in registers.
template <int kSize, bool kGeneral>
struct ForwardShape {
  static constexpr int kColumns = kSize;
  static constexpr bool kTakesAll = kGeneral;
  // 32 rows a warp halve the reading of K and V from shared memory; 128 columns leave registers for
  // them with 32 keys, and with few copies under way in the code.
  static constexpr int kSlices = kSize <= 128 && !kGeneral ? 2 : 1;
  static constexpr int kRows = 16 * kWarps * kSlices;
  static constexpr bool kTight = kSize == 128 && kSlices == 2;
  static constexpr int kKeys = kTight ? 32 : 64;
  static constexpr int kUnrolledCopies = kTight ? 2 : 4;
  static constexpr int kTileRows = kRows + 2 * kKeys;  // of Q, K and V together
  static constexpr bool kResident = kSize <= 128 && kSlices == 1;
  static constexpr int kSharedMemory = kTileRows * kSize * 2 + static_cast<int>(sizeof(BlockState));
  static_assert(fits_budget(kSize, kSharedMemory));
};

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
  // Whether a row saw a key, by all four lanes that share it.
  AE_DEVICE bool saw(int m, int half) const {
    uint32_t bit = seen >> (2 * m + half) & 1;
    bit |= __shfl_xor_sync(0xffffffffu, bit, 1);
    bit |= __shfl_xor_sync(0xffffffffu, bit, 2);
    return bit != 0;
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

// Where the query rows of a tile lie in global memory.
template <class Rows>
struct QueryRows {
  const Bits* data;
  const View& view;
  const Rows& rows;

  AE_DEVICE int64_t offset(int row) const { return rows.offset(view, row); }
};

// Adds the tiles of `walk` to the sums of the block's rows. True if one of them was mixed: sums
// that are not finite may then come from hidden values.
template <ScalarType kType, class Shape, class Rows>
AE_DEVICE bool attend(const AttentionParams& p, const Head& head, int64_t i0, const Rows& layout,
                      Walk<true, Shape::kRows, Shape::kKeys, Rows>& walk, Bits* query,
                      Fragments<Shape::kSlices, Shape::kColumns>& output,
                      RowState<Shape::kSlices>& rows) {
  constexpr int kSize = Shape::kColumns, kSlices = Shape::kSlices, kRows = Shape::kRows,
                kKeys = Shape::kKeys;
  const Problem& problem = head.problem;
  Bits* const key = query + kRows * kSize;
  Bits* const value = key + kKeys * kSize;
  const int row = 16 * kSlices * (static_cast<int>(threadIdx.x) >> 5);  // of this warp
  const bool natural = Shape::kTakesAll && natural_scores(p);
  const bool drops = Shape::kTakesAll && p.dropout.threshold != 0;
  const float unit = natural ? kLog2E : static_cast<float>(p.scale) * kLog2E;
  // Rows of a group are often fewer than a tile has: warps without any only copy.
  int query_rows = static_cast<int>(smaller(kRows, problem.q_length - i0));
  if constexpr (Rows::kGrouped) query_rows = layout.count - layout.first;
  const bool works = !Rows::kGrouped || row < query_rows;
  bool met_mixed = false;
  int64_t visited = 0;
  bool more = walk.next();
  auto copy = [&](Bits* to, const View& from, int64_t j0, int64_t size) {
    copy_tile<kKeys, kSize, Shape::kUnrolledCopies>(
        to, rows_of(from, problem.batch, head.kv_head, problem.k_begin + j0), problem.k_length - j0,
        static_cast<int>(size));
    ptx::commit_copies();
  };
  using Left = std::conditional_t<Shape::kResident, RegisterLeft<kSize, kSlices>,
                                  SharedLeft<kSize, kSlices>>;
  Left left;
  if (more) {
    const QueryRows<Rows> from{p.query.at<Bits>(problem.batch, head.h, problem.q_begin + i0, 0),
                               p.query, layout};
    copy_tile<kRows, kSize, Shape::kUnrolledCopies>(query, from, query_rows,
                                                    static_cast<int>(p.qk_size));
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
      visible[m] = kept[m] = ~0u;
      if (!works) continue;
      if (mixed) visible[m] = visible_bits<false, kKeys>(p, head, i0, j0, row + 16 * m, layout);
      if (drops) kept[m] = kept_bits<false, kKeys>(head, i0, j0, row + 16 * m, layout);
      // Bits 0, 1 of a block belong to the upper row, bits 2, 3 to the lower one.
      if ((visible[m] & 0x33333333u) != 0) rows.seen |= 1u << (2 * m);
      if ((visible[m] & 0xccccccccu) != 0) rows.seen |= 2u << (2 * m);
    }
    more = walk.next();

    Fragments<kSlices, kKeys> s;
    if (works) {
      multiply_columns<kType, kSize, kSlices, kKeys>(s, left, key);
#pragma unroll
      for (int m = 0; m < kSlices; ++m) {
        if (natural) adjust_scores<false, kKeys>(p, head, i0, j0, row + 16 * m, s[m], layout);
        if (mixed) hide<kKeys>(s[m], visible[m], -kInfinity);
      }
    }

    ptx::wait_copies<0>();
    __syncthreads();  // V is here for all; nobody reads K any more
    if (more) copy(key, p.key, walk.position(), p.qk_size);
    if (!works) continue;
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
  return met_mixed;
}

// Whether the block's sums hold anything that is not finite. All threads of the block call it.
template <int kSlices, int kSize>
AE_DEVICE bool is_spoilt(const Fragments<kSlices, kSize>& output) {
  bool finite = true;
#pragma unroll
  for (int m = 0; m < kSlices; ++m) {
#pragma unroll
    for (int e = 0; e < kSize / 8; ++e) {
#pragma unroll
      for (int c = 0; c < 4; ++c) finite = finite && is_finite(output[m][e][c]);
    }
  }
  return __syncthreads_or(!finite) != 0;
}

}  // namespace attention_ext::kernels::cuda::tensor
