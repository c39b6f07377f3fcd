// Register-blocked products: C (M x NV vectors) (+)= A (M x K) B (K x NV vectors), with A read as
// scalar broadcasts from wherever it lies (rows of K or V, or columns of a score tile) and B, C as
// whole vectors. The five products of attention are all of this form. Every sum runs over k in
// ascending order from its first term, so tile shapes never change a bit; what C holds is added to
// the finished sum, so that the rounding of long sums grows with the number of blocks only.
#pragma once

#include "kernels/cpu/ahead.h"
#include "kernels/cpu/simd.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// What a product starts from: zero, C, or C scaled lane by lane (the rescaling of online softmax).
enum class Start { kZero, kAdd, kScale };
// How A is read: A(i, k) = a[i * lda + k] (rows), or a[k * lda + i] (columns).
enum class Read { kRows, kColumns };

// A and B hold numbers of type In, which is T or, in the tier that multiplies bfloat16, pairs of
// such numbers. Pairs are inputs as they are, so the factor of the product multiplies its result:
// *scale, the same in all lanes.

// One tile of MR rows and NV vectors. Few base pointers and constant multiples of one stride: gcc
// otherwise keeps a pointer per row and spills (the file is compiled with -fno-ivopts for the same
// reason).
template <class T, int MR, int NV, Start kStart, Read kRead, class In = T>
AE_INLINE void multiply_tile(const In* a, int64_t lda, const In* b, int64_t ldb, T* c, int64_t ldc,
                             int64_t depth, const Vec<T>* scale) {
  constexpr int W = kLanes<T>;
  Vec<T> acc[MR][NV] = {};
  for (int64_t k = 0; k < depth; ++k) {
    if constexpr (NV <= MR) {
      Vec<In> right[NV];
      AE_UNROLL for (int v = 0; v < NV; ++v) right[v] = load(b + v * W);
      AE_UNROLL for (int i = 0; i < MR; ++i) {
        const Vec<In> left = broadcast(kRead == Read::kRows ? a[i * lda] : a[i]);
        AE_UNROLL for (int v = 0; v < NV; ++v) acc[i][v] = fma(left, right[v], acc[i][v]);
      }
    } else {
      Vec<In> left[MR];
      AE_UNROLL for (int i = 0; i < MR; ++i) {
        left[i] = broadcast(kRead == Read::kRows ? a[i * lda] : a[i]);
      }
      AE_UNROLL for (int v = 0; v < NV; ++v) {
        const Vec<In> right = load(b + v * W);
        AE_UNROLL for (int i = 0; i < MR; ++i) acc[i][v] = fma(left[i], right, acc[i][v]);
      }
    }
    a += kRead == Read::kRows ? 1 : lda;
    b += ldb;
  }
  if constexpr (!std::is_same_v<In, T>) {
    AE_UNROLL for (int i = 0; i < MR; ++i) {
      AE_UNROLL for (int v = 0; v < NV; ++v) acc[i][v] *= *scale;
    }
  }
  AE_UNROLL for (int i = 0; i < MR; ++i) {
    AE_UNROLL for (int v = 0; v < NV; ++v) {
      T* const at = c + i * ldc + v * W;
      if constexpr (kStart == Start::kAdd) acc[i][v] += load(at);
      if constexpr (kStart == Start::kScale) acc[i][v] = fma(load(at), scale[v], acc[i][v]);
      store(at, acc[i][v]);
    }
  }
}

// Rows of a full tile for NV vectors: 24 accumulators of 32 registers, 12 of 16.
template <int NV>
constexpr int kTileRows = kRegisters == 32 ? (NV == 1 ? 12 : 24 / NV) : (NV == 1 ? 8 : 12 / NV);

// The part of the depth that a row tile needs, in a block that a window cuts: rows [i, i + n) use
// depths [clamp(i + low), clamp(i + n - 1 + high)]. Outside windows low and high reach over
// everything.
struct Band {
  int64_t low = -kUnbounded;
  int64_t high = kUnbounded;
};

// C rows [0, rows) of NV vectors. `ahead` is asked for between tiles.
template <class T, int NV, Start kStart, Read kRead, class In = T>
__attribute__((noinline)) void multiply_panel(const In* a, int64_t lda, const In* b, int64_t ldb,
                                              T* c, int64_t ldc, int64_t rows, int64_t depth,
                                              const Vec<T>* scale, Band band,
                                              Ahead* ahead = nullptr) {
  constexpr int MR = kTileRows<NV>;
  int64_t i = 0;
  auto go = [&]<int R>() __attribute__((always_inline)) {
    int64_t first = i + band.low, end = i + R + band.high;
    first = first < 0 ? 0 : first;
    end = end > depth ? depth : end;
    if (first < end || kStart != Start::kAdd) {
      const int64_t count = end > first ? end - first : 0;
      multiply_tile<T, R, NV, kStart, kRead>(
          kRead == Read::kRows ? a + i * lda + first : a + first * lda + i, lda, b + first * ldb,
          ldb, c + i * ldc, ldc, count, scale);
    }
    if (ahead != nullptr) ahead->some();
    i += R;
  };
  while (rows - i >= MR) go.template operator()<MR>();
  if constexpr (MR > 8) {
    if (rows - i >= 8) go.template operator()<8>();
  }
  if constexpr (MR > 4) {
    if (rows - i >= 4) go.template operator()<4>();
  }
  if constexpr (MR > 2) {
    if (rows - i >= 2) go.template operator()<2>();
  }
  if (rows - i >= 1) go.template operator()<1>();
}

// Calls f<NV>(first vector) for every strip of `vectors` vectors, strips of at most kMost and as
// even as they come.
template <int kMost, class F>
AE_INLINE void for_strips(int vectors, F&& f) {
  int v = 0;
  while (v < vectors) {
    const int left = vectors - v;
    // 4 = 2 + 2 rather than 3 + 1 for strips of three; 5 = 3 + 2 for strips of four.
    int n = left < kMost ? left : kMost;
    if (left > kMost && left < 2 * kMost) n = (left + 1) / 2;
    if constexpr (kMost >= 4) {
      if (n == 4) f.template operator()<4>(v);
    }
    if (n == 3) f.template operator()<3>(v);
    if (n == 2) f.template operator()<2>(v);
    if (n == 1) f.template operator()<1>(v);
    v += n;
  }
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
