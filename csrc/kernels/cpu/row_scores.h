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

// Calls f<NR>(first row) for every group of rows that are taken together: 8, 4, 2 or 1, as many as
// registers and lanes allow. Scores of a group lie as [key][row], so that a vector of them holds
// some keys of every row.
template <class T, class F>
AE_INLINE void for_row_groups(int64_t rows, F&& f) {
  int64_t r = 0;
  if constexpr (kRegisters == 32) {
    for (; r + 8 <= rows; r += 8) f.template operator()<8>(r);
  }
  if constexpr (kLanes<T> >= 4) {
    for (; r + 4 <= rows; r += 4) f.template operator()<4>(r);
  }
  for (; r + 2 <= rows; r += 2) f.template operator()<2>(r);
  for (; r < rows; ++r) f.template operator()<1>(r);
}

// Keys that NR rows meet at once: their sums fill whole vectors, and hide a multiply-add's latency.
template <class T, int NR>
constexpr int kKeysAtOnce = (kLanes<T> > 8 ? kLanes<T> : 8) / NR;

// Scores of NR rows of q with NK keys, the first half of them at `a`, the others at `b`; to `to_a`
// and `to_b`.
template <class T, int NR, int NK>
AE_INLINE void score_keys(const T* q, int64_t e_padded, const T* a, const T* b, int64_t ldk,
                          T* to_a, T* to_b) {
  constexpr int W = kLanes<T>, kFirst = (NK + 1) / 2, kSums = (NR * NK + W - 1) / W * W;
  Vec<T> sums[kSums] = {};
  for (int64_t e = 0; e < e_padded; e += W) {
    Vec<T> left[NR];
    AE_UNROLL for (int r = 0; r < NR; ++r) left[r] = load(q + r * e_padded);
    AE_UNROLL for (int n = 0; n < NK; ++n) {
      const Vec<T> right = load(n < kFirst ? a + n * ldk : b + (n - kFirst) * ldk);
      AE_UNROLL for (int r = 0; r < NR; ++r) {
        sums[n * NR + r] = fma(left[r], right, sums[n * NR + r]);
      }
    }
    q += W;
    a += W;
    b += W;
  }
  T scores[kSums];
  AE_UNROLL for (int i = 0; i < kSums; i += W) {
    Vec<T> some[W];
    AE_UNROLL for (int lane = 0; lane < W; ++lane) some[lane] = sums[i + lane];
    store(scores + i, sum_each<T>(some));
  }
  __builtin_memcpy(to_a, scores, kFirst * NR * sizeof(T));
  __builtin_memcpy(to_b, scores + kFirst * NR, (NK - kFirst) * NR * sizeof(T));
}

// to[y * NR + r] = row r of q . key y. `key` rows are whole vectors, padded with zeros; every sum
// runs over them in order. The keys are read at two places in turn, since the hardware fetches some
// lines ahead of each: two places have twice as much of memory on its way. `ahead` is asked for
// between keys.
template <class T, int NR>
__attribute__((noinline)) void row_scores(const T* q, int64_t e_padded, const Operand<T>& key,
                                          int64_t nk, T* to, Ahead* ahead = nullptr) {
  constexpr int NK = kKeysAtOnce<T, NR>;
  const T* const a = key.data;
  const int64_t ldk = key.stride, half = nk / NK * (NK / 2);
  for (int64_t y = 0; y < half; y += NK / 2) {
    const int64_t z = half + y;
    score_keys<T, NR, NK>(q, e_padded, a + y * ldk, a + z * ldk, ldk, to + y * NR, to + z * NR);
    if (ahead != nullptr) ahead->some();
  }
  for (int64_t y = 2 * half; y < nk; ++y) {
    score_keys<T, NR, 1>(q, e_padded, a + y * ldk, a, ldk, to + y * NR, to + y * NR);
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
