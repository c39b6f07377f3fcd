// Sums of values over the keys of a tile for very few query rows, with head sizes in lanes.
#pragma once

#include "kernels/cpu/row_scores.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// Values are read at four places of a tile in turn, a quarter of its keys apart: more of memory is
// on its way than with one (row_scores.h).
AE_INLINE int64_t quarter_of(int64_t nk) { return (nk + 3) / 4; }

// Vectors of a row that NR rows take at once: sums in up to half of the registers.
template <int NR>
constexpr int kMostVectors = kRegisters / 2 / NR < 8 ? kRegisters / 2 / NR : 8;

// N vectors of every row, from `value`'s first column on.
template <class T, int NR, int N, class Visible>
AE_INLINE void value_vectors(const Operand<T>& value, int64_t nk, KeyRange keys, const T* prob,
                             const T* shrink, T* output, int64_t ldo, Visible&& visible) {
  constexpr int W = kLanes<T>;
  Vec<T> sum[NR][N];
  AE_UNROLL for (int r = 0; r < NR; ++r) {
    const Vec<T> factor = broadcast(keys.begin == 0 ? shrink[r] : T{1});
    AE_UNROLL for (int v = 0; v < N; ++v) sum[r][v] = load(output + r * ldo + v * W) * factor;
  }
  const auto add = [&](int64_t y) __attribute__((always_inline)) {
    if (!visible(y)) return;
    const T* const row = value.data + y * value.stride;
    Vec<T> left[NR];
    AE_UNROLL for (int r = 0; r < NR; ++r) left[r] = broadcast(prob[y * NR + r]);
    AE_UNROLL for (int v = 0; v < N; ++v) {
      const Vec<T> right = load(row + v * W);
      AE_UNROLL for (int r = 0; r < NR; ++r) sum[r][v] = fma(left[r], right, sum[r][v]);
    }
  };
  const int64_t quarter = quarter_of(nk);
  int64_t y = keys.begin;
  for (; y < smaller(keys.end, nk - 3 * quarter); ++y) {
    add(y);
    add(quarter + y);
    add(2 * quarter + y);
    add(3 * quarter + y);
  }
  for (; y < keys.end; ++y) {
    for (int64_t at = y; at < nk; at += quarter) add(at);
  }
  AE_UNROLL for (int r = 0; r < NR; ++r) {
    AE_UNROLL for (int v = 0; v < N; ++v) store(output + r * ldo + v * W, sum[r][v]);
  }
}

// Row r of output = shrink[r] * row r + sum of prob[y * NR + r] * value y, for NR rows of `columns`
// numbers (whole vectors) and the keys of the four quarters that `keys` says of the first one;
// `shrink` is applied with the first of them. Hidden keys are left out, so what they hold is never
// felt.
template <class T, int NR, class Visible>
__attribute__((noinline)) void row_values(const Operand<T>& value, int64_t nk, KeyRange keys,
                                          int64_t columns, const T* prob, const T* shrink,
                                          T* output, Visible&& visible) {
  constexpr int W = kLanes<T>, kMost = kMostVectors<NR>;
  int64_t e = 0;
  KeyRange some = keys;
  const auto take = [&]<int N>() __attribute__((always_inline)) {
    const Operand<T> columns_from_e{value.data + e, value.stride};
    value_vectors<T, NR, N>(columns_from_e, nk, some, prob, shrink, output + e, columns, visible);
    e += N * W;
  };
  const auto all_columns = [&]() __attribute__((always_inline)) {
    e = 0;
    while (e + kMost * W <= columns) take.template operator()<kMost>();
    if constexpr (kMost > 4) {
      if (e + 4 * W <= columns) take.template operator()<4>();
    }
    while (e < columns) take.template operator()<1>();
  };
  // A single row reads values as they come from memory: all columns of a few keys before the next
  // ones, or the hardware fetches what is not wanted yet. Zen 3, D128, one thread: 0.82 of the
  // time.
  const int64_t step = NR == 1 && columns > kMost * W ? 2 : larger(1, keys.end - keys.begin);
  for (; some.begin < keys.end; some.begin += step) {
    some.end = smaller(keys.end, some.begin + step);
    all_columns();
  }
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
