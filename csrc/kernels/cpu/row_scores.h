// Scores of very few query rows, with head sizes in lanes. The decoding forward kernel, and
// whatever rebuilds its probabilities, use this one function: the rebuilt scores must have the
// forward's bits, since exp(s - logsumexp) shows every difference of theirs.
#pragma once

#include "kernels/cpu/tile.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// Rows that whole vectors can be loaded from.
template <class T>
AE_INLINE bool in_lanes(const View& view, int64_t size) {
  return readable_in_place<T>(view) && size % kLanes<T> == 0;
}

// The same for a block that products read again and again as vectors: rows far apart (heads beside
// each other in memory) would share few sets of the first-level cache, and are copied.
template <class T>
AE_INLINE bool in_near_lanes(const View& view, int64_t size) {
  constexpr int64_t kFar = 1024;  // bytes
  return in_lanes<T>(view, size) &&
         (view.stride[2] == size || view.stride[2] * static_cast<int64_t>(sizeof(T)) < kFar);
}

// out[i][j] = factor * rows[i][j], columns padded with zeros up to ldo.
template <class T>
AE_INLINE void copy_scaled(const Rows& rows, int64_t n, int64_t columns, T factor, T* out,
                           int64_t ldo) {
  copy_in<T>(rows, n, columns, out, ldo);
  for (int64_t k = 0; k < n * ldo; k += kLanes<T>) store(out + k, load(out + k) * factor);
}

// to[r * kBlock + y] = row r of q . key y: a few keys and NR rows in flight, W sums turned into
// scores together. `key` rows are whole vectors, padded with zeros; every sum runs over them in
// order.
template <class T, int NR>
AE_INLINE void row_scores(const T* q, int64_t e_padded, const Operand<T>& key, int64_t nk, T* to) {
  constexpr int W = kLanes<T>;
  constexpr int kKeys = NR == 1 ? 4 : 2;
  for (int64_t y0 = 0; y0 < nk; y0 += W) {
    Vec<T> sums[NR][W] = {};
    for (int y = 0; y < W && y0 + y < nk; y += kKeys) {
      const T* at[kKeys];  // keys behind the last one repeat it
      AE_UNROLL for (int n = 0; n < kKeys; ++n) {
        at[n] = key.data + smaller(y0 + y + n, nk - 1) * key.stride;
      }
      Vec<T> sum[kKeys][NR] = {};
      for (int64_t e = 0; e < e_padded; e += W) {
        Vec<T> left[NR];
        AE_UNROLL for (int r = 0; r < NR; ++r) left[r] = load(q + r * e_padded + e);
        AE_UNROLL for (int n = 0; n < kKeys; ++n) {
          const Vec<T> right = load(at[n] + e);
          AE_UNROLL for (int r = 0; r < NR; ++r) sum[n][r] = fma(left[r], right, sum[n][r]);
        }
      }
      AE_UNROLL for (int n = 0; n < kKeys; ++n) {
        if (y + n < W) {
          AE_UNROLL for (int r = 0; r < NR; ++r) sums[r][y + n] = sum[n][r];
        }
      }
    }
    for (int r = 0; r < NR; ++r) store(to + r * kBlock + y0, sum_each<T>(sums[r]));
  }
}

// The same into a tile [key][query lane]; idle lanes hold zeros.
template <class T>
void score_tile(const T* q, int64_t e_padded, const Operand<T>& key, const Tile<T>& tile,
                T* scores) {
  T line[kBlock];
  for (int64_t y = 0; y < tile.nk; ++y) {
    for (int64_t x = 0; x < tile.lanes; ++x) scores[y * kBlock + x] = T{0};
  }
  for (int64_t x = 0; x < tile.nq; ++x) {
    row_scores<T, 1>(q + x * e_padded, e_padded, key, tile.nk, line);
    for (int64_t y = 0; y < tile.nk; ++y) scores[y * kBlock + x] = line[y];
  }
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
