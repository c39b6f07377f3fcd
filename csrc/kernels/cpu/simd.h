// The only place, with half.h, where instruction sets differ: vectors of the tier's width, their
// loads, fused multiply-add, maximum, powers of two, lane masks, transposes and 32-bit multiplies.
// Compiled once per tier (ATTENTION_EXT_TIER names the namespace); includes nothing of torch.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "kernels/params.h"

#define AE_UNROLL _Pragma("GCC unroll 32")

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
#else
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;
#endif

template <class T>
constexpr int kLanes = kVectorBytes / int{sizeof(T)};

// GCC vector types; the intrinsic types are the same types, so values pass between both freely.
template <class T>
struct VecOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename VecOf<T>::type;
template <class T>
using IntOf = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

template <class T>
AE_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
template <class T>
AE_INLINE void store(T* p, Vec<T> v) {
  __builtin_memcpy(p, &v, sizeof(v));
}
template <class T>
AE_INLINE Vec<T> broadcast(T x) {
  return Vec<T>{} + x;
}

#if defined(__AVX512F__)
AE_INLINE Vec<float> broadcast(float x) { return _mm512_set1_ps(x); }
AE_INLINE Vec<double> broadcast(double x) { return _mm512_set1_pd(x); }
AE_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return _mm512_fmadd_ps(a, b, c);
}
AE_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return _mm512_fmadd_pd(a, b, c);
}
// max and min return the second operand where either is NaN.
AE_INLINE Vec<float> max(Vec<float> a, Vec<float> b) { return _mm512_max_ps(a, b); }
AE_INLINE Vec<double> max(Vec<double> a, Vec<double> b) { return _mm512_max_pd(a, b); }
AE_INLINE Vec<float> min(Vec<float> a, Vec<float> b) { return _mm512_min_ps(a, b); }
AE_INLINE Vec<double> min(Vec<double> a, Vec<double> b) { return _mm512_min_pd(a, b); }
AE_INLINE Vec<float> times_power_of_two(Vec<float> a, Vec<float> n) {
  return _mm512_scalef_ps(a, n);
}
AE_INLINE Vec<double> times_power_of_two(Vec<double> a, Vec<double> n) {
  return _mm512_scalef_pd(a, n);
}
// The same, 0 in lanes where x < least.
AE_INLINE Vec<float> times_power_of_two_from(Vec<float> least, Vec<float> x, Vec<float> a,
                                             Vec<float> n) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), a, n);
}
AE_INLINE Vec<double> times_power_of_two_from(Vec<double> least, Vec<double> x, Vec<double> a,
                                              Vec<double> n) {
  return _mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(x, least, _CMP_NLT_UQ), a, n);
}
#elif defined(__AVX2__)
AE_INLINE Vec<float> broadcast(float x) { return _mm256_set1_ps(x); }
AE_INLINE Vec<double> broadcast(double x) { return _mm256_set1_pd(x); }
AE_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return _mm256_fmadd_ps(a, b, c);
}
AE_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return _mm256_fmadd_pd(a, b, c);
}
AE_INLINE Vec<float> max(Vec<float> a, Vec<float> b) { return _mm256_max_ps(a, b); }
AE_INLINE Vec<double> max(Vec<double> a, Vec<double> b) { return _mm256_max_pd(a, b); }
AE_INLINE Vec<float> min(Vec<float> a, Vec<float> b) { return _mm256_min_ps(a, b); }
AE_INLINE Vec<double> min(Vec<double> a, Vec<double> b) { return _mm256_min_pd(a, b); }
#else
AE_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return a * b + c; }
AE_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return a * b + c; }
AE_INLINE Vec<float> max(Vec<float> a, Vec<float> b) { return a > b ? a : b; }
AE_INLINE Vec<double> max(Vec<double> a, Vec<double> b) { return a > b ? a : b; }
AE_INLINE Vec<float> min(Vec<float> a, Vec<float> b) { return a < b ? a : b; }
AE_INLINE Vec<double> min(Vec<double> a, Vec<double> b) { return a < b ? a : b; }
#endif

// 1.5 * 2^(mantissa bits): added to a number of less than a quarter of it, it leaves the nearest
// integer in the low bits.
template <class T>
constexpr T kRounder = sizeof(T) == 4 ? T(12582912) : T(6755399441055744);

#if !defined(__AVX512F__)
// a * 2^n with 2^n from its exponent bits: n must leave it normal. A product, so that NaN stays
// NaN.
AE_INLINE Vec<float> times_power_of_two(Vec<float> a, Vec<float> n) {
  const Vec<int32_t> bits = (Vec<int32_t>)(n + (kRounder<float> + 127)) << 23;
  return a * (Vec<float>)bits;
}
AE_INLINE Vec<double> times_power_of_two(Vec<double> a, Vec<double> n) {
  const Vec<int64_t> bits = (Vec<int64_t>)(n + (kRounder<double> + 1023)) << 52;
  return a * (Vec<double>)bits;
}
#endif

// ---- lane masks
// ------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
template <class T>
using Mask = std::conditional_t<sizeof(T) == 4, __mmask16, __mmask8>;
AE_INLINE Vec<float> select(__mmask16 m, Vec<float> a, Vec<float> b) {
  return _mm512_mask_blend_ps(m, b, a);
}
AE_INLINE Vec<double> select(__mmask8 m, Vec<double> a, Vec<double> b) {
  return _mm512_mask_blend_pd(m, b, a);
}
AE_INLINE __mmask16 less(Vec<float> a, Vec<float> b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
AE_INLINE __mmask8 less(Vec<double> a, Vec<double> b) {
  return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ);
}
AE_INLINE __mmask16 equal(Vec<float> a, Vec<float> b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
AE_INLINE __mmask8 equal(Vec<double> a, Vec<double> b) {
  return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ);
}
AE_INLINE __mmask16 at_least(Vec<int32_t> a, Vec<int32_t> b) {
  return _mm512_cmpge_epi32_mask((__m512i)a, (__m512i)b);
}
AE_INLINE __mmask8 at_least(Vec<int64_t> a, Vec<int64_t> b) {
  return _mm512_cmpge_epi64_mask((__m512i)a, (__m512i)b);
}
template <class T>
AE_INLINE bool any(Mask<T> m) {
  return m != 0;
}
template <class T>
AE_INLINE Mask<T> mask_from_bytes(const uint8_t* p) {
  if constexpr (sizeof(T) == 4) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return _mm_test_epi8_mask(x, x);
  } else {
    const __m128i x = _mm_loadl_epi64((const __m128i*)p);
    return (__mmask8)_mm_test_epi8_mask(x, x);
  }
}
template <class T>
AE_INLINE void mask_to_bytes(uint8_t* p, Mask<T> m) {
  if constexpr (sizeof(T) == 4) {
    _mm_storeu_si128((__m128i*)p, _mm_movm_epi8(m));
  } else {
    _mm_storel_epi64((__m128i*)p, _mm_movm_epi8(m));
  }
}
#else
template <class T>
using Mask = Vec<IntOf<T>>;
AE_INLINE Vec<float> select(Vec<int32_t> m, Vec<float> a, Vec<float> b) {
#if defined(__AVX2__)
  return _mm256_blendv_ps(b, a, (__m256)m);
#else
  return m ? a : b;
#endif
}
AE_INLINE Vec<double> select(Vec<int64_t> m, Vec<double> a, Vec<double> b) {
#if defined(__AVX2__)
  return _mm256_blendv_pd(b, a, (__m256d)m);
#else
  return m ? a : b;
#endif
}
AE_INLINE Vec<int32_t> less(Vec<float> a, Vec<float> b) { return a < b; }
AE_INLINE Vec<int64_t> less(Vec<double> a, Vec<double> b) { return a < b; }
AE_INLINE Vec<int32_t> equal(Vec<float> a, Vec<float> b) { return a == b; }
AE_INLINE Vec<int64_t> equal(Vec<double> a, Vec<double> b) { return a == b; }
AE_INLINE Vec<int32_t> at_least(Vec<int32_t> a, Vec<int32_t> b) { return a >= b; }
AE_INLINE Vec<int64_t> at_least(Vec<int64_t> a, Vec<int64_t> b) { return a >= b; }
template <class V>
AE_INLINE V times_power_of_two_from(V least, V x, V a, V n) {
  return select(less(x, least), V{}, times_power_of_two(a, n));
}
template <class T>
AE_INLINE bool any(Mask<T> m) {
  Mask<T> r = m;
  bool found = false;
  for (int i = 0; i < kLanes<T>; ++i) found |= r[i] != 0;
  return found;
}
template <class T>
AE_INLINE Mask<T> mask_from_bytes(const uint8_t* p) {
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    return (Vec<int32_t>)_mm256_cmpgt_epi32(x, _mm256_setzero_si256());
  } else {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    const __m256i x = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(word));
    return (Vec<int64_t>)_mm256_cmpgt_epi64(x, _mm256_setzero_si256());
  }
#else
  Mask<T> m;
  for (int i = 0; i < kLanes<T>; ++i) m[i] = p[i] != 0 ? -1 : 0;
  return m;
#endif
}
template <class T>
AE_INLINE void mask_to_bytes(uint8_t* p, Mask<T> m) {
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    const __m128i lo = _mm256_castsi256_si128((__m256i)m);
    const __m128i hi = _mm256_extracti128_si256((__m256i)m, 1);
    const __m128i words = _mm_packs_epi32(lo, hi);
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
    return;
  }
#endif
  for (int i = 0; i < kLanes<T>; ++i) p[i] = m[i] != 0 ? 255 : 0;
}
#endif

// ---- transposes
// ------------------------------------------------------------------------------------------------

template <int D, bool kSecond, class V, size_t... I>
AE_INLINE V exchange(V a, V b, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I);
  if constexpr (!kSecond) {
    return __builtin_shufflevector(a, b, ((int{I} & D) == 0 ? int{I} : n + int{I} - D)...);
  } else {
    return __builtin_shufflevector(a, b, ((int{I} & D) == 0 ? int{I} + D : n + int{I})...);
  }
}

// A vector of 16-byte pieces, `stride` elements apart.
template <class T>
AE_INLINE Vec<T> load_pieces(const T* at, [[maybe_unused]] int64_t stride) {
#if defined(__AVX2__)
  const auto piece = [&](int n) { return _mm_loadu_ps((const float*)(at + n * stride)); };
#endif
#if defined(__AVX512F__)
  __m512 all = _mm512_castps128_ps512(piece(0));
  all = _mm512_insertf32x4(all, piece(1), 1);
  all = _mm512_insertf32x4(all, piece(2), 2);
  return (Vec<T>)_mm512_insertf32x4(all, piece(3), 3);
#elif defined(__AVX2__)
  return (Vec<T>)_mm256_insertf128_ps(_mm256_castps128_ps256(piece(0)), piece(1), 1);
#else
  return load(at);
#endif
}

// Transposes a square of vectors by exchanging blocks of D x D off the diagonal, D = lanes/2 ... 1.
template <class T, int D = kLanes<T> / 2>
AE_INLINE void transpose_square(Vec<T> (&rows)[kLanes<T>]) {
  constexpr auto lanes = std::make_index_sequence<kLanes<T>>{};
  AE_UNROLL for (int i = 0; i < kLanes<T>; ++i) {
    if ((i & D) == 0) {
      const Vec<T> a = rows[i], b = rows[i + D];
      rows[i] = exchange<D, false>(a, b, lanes);
      rows[i + D] = exchange<D, true>(a, b, lanes);
    }
  }
  if constexpr (D > 1) transpose_square<T, D / 2>(rows);
}

// The transpose of a square in memory, rows `stride` apart. Blocks of 16 bytes are exchanged by
// where they are loaded to, which takes half the shuffles of exchanging them in registers.
template <class T>
AE_INLINE void load_transposed(const T* at, int64_t stride, Vec<T> (&rows)[kLanes<T>]) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  AE_UNROLL for (int i = 0; i < kPiece; ++i) {
    AE_UNROLL for (int j = 0; j < kLanes<T>; j += kPiece) {
      rows[i + j] = load_pieces(at + i * stride + j, kPiece * stride);
    }
  }
  transpose_square<T, kPiece / 2>(rows);
}

// The sum of each of a vector's worth of vectors, sum i in lane i: a transpose that adds as it
// goes, with half the shuffles.
template <class T, int D = kLanes<T> / 2>
AE_INLINE Vec<T> sum_each(Vec<T> (&rows)[kLanes<T>]) {
  constexpr auto lanes = std::make_index_sequence<kLanes<T>>{};
  AE_UNROLL for (int i = 0; i < D; ++i) {
    rows[i] = exchange<D, false>(rows[i], rows[i + D], lanes) +
              exchange<D, true>(rows[i], rows[i + D], lanes);
  }
  if constexpr (D > 1) {
    return sum_each<T, D / 2>(rows);
  } else {
    return rows[0];
  }
}

// Lanes that are a multiple of N apart joined by f(a, b), halves first: lane i holds what all lanes
// i, i + N, ... give.
template <class T, int N, int D = kLanes<T> / 2, class F>
AE_INLINE Vec<T> fold_lanes(Vec<T> x, F&& f) {
  constexpr auto lanes = std::make_index_sequence<kLanes<T>>{};
  if constexpr (D >= N) {
    x = f(exchange<D, false>(x, x, lanes), exchange<D, true>(x, x, lanes));
    return fold_lanes<T, N, D / 2>(x, f);
  } else {
    return x;
  }
}
// The first N lanes again and again.
template <class T, int N, size_t... I>
AE_INLINE Vec<T> repeat_lanes(Vec<T> x, std::index_sequence<I...>) {
  return __builtin_shufflevector(x, x, (int{I} % N)...);
}
template <class T, int N>
AE_INLINE Vec<T> repeat_lanes(Vec<T> x) {
  return repeat_lanes<T, N>(x, std::make_index_sequence<kLanes<T>>{});
}
// The first N lanes.
template <class T, int N>
AE_INLINE void store_lanes(T* p, Vec<T> x) {
  __builtin_memcpy(p, &x, N * sizeof(T));
}
template <class T>
AE_INLINE T sum_lanes(Vec<T> x) {
  return fold_lanes<T, 1>(x, [](Vec<T> a, Vec<T> b) { return a + b; })[0];
}

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
// Squares of 16 x 16 bytes side by side, as many as are fastest: two even where vectors are wider.
constexpr int kSquaresOfBytes = kVectorBytes == 16 ? 1 : 2;
typedef uint8_t Bytes __attribute__((vector_size(16 * kSquaresOfBytes)));

// Lane i of the low or high halves of every 16 bytes of a and b, in turn.
template <int kHalf, size_t... I>
AE_INLINE Bytes interleave(Bytes a, Bytes b, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I);
  return __builtin_shufflevector(
      a, b, (int{I} / 16 * 16 + int{I} % 16 / 2 + 8 * kHalf + (int{I} % 2 == 0 ? 0 : n))...);
}
// Transposes each square, by four perfect shuffles.
AE_INLINE void transpose_bytes(Bytes (&rows)[16]) {
  constexpr auto lanes = std::make_index_sequence<sizeof(Bytes)>{};
  AE_UNROLL for (int stage = 0; stage < 4; ++stage) {
    Bytes next[16];
    AE_UNROLL for (int i = 0; i < 8; ++i) {
      next[2 * i] = interleave<0>(rows[i], rows[i + 8], lanes);
      next[2 * i + 1] = interleave<1>(rows[i], rows[i + 8], lanes);
    }
    AE_UNROLL for (int i = 0; i < 16; ++i) rows[i] = next[i];
  }
}

// ---- 64-bit products of 32-bit halves (Philox)
// -------------------------------------------------------------------

// The product of the low 32 bits of every 64-bit lane; the high halves are ignored.
AE_INLINE Vec<uint64_t> multiply_low_halves(Vec<uint64_t> a, Vec<uint64_t> b) {
#if defined(__AVX512F__)
  return (Vec<uint64_t>)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Vec<uint64_t>)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Vec<uint64_t>)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// ---- pairs of bfloat16
// ------------------------------------------------------------------------------------------------

#if defined(__AVX512BF16__)
// Two adjacent bfloat16 numbers of a tensor: one 32-bit lane, at any even address.
struct BFloat16Pair {
  uint16_t first, second;
};
template <>
struct VecOf<BFloat16Pair> {
  typedef uint32_t type __attribute__((vector_size(kVectorBytes)));
};
AE_INLINE Vec<BFloat16Pair> broadcast(const BFloat16Pair& pair) {
  int32_t bits;
  __builtin_memcpy(&bits, &pair, 4);
  return (Vec<BFloat16Pair>)_mm512_set1_epi32(bits);
}
// c + a.first b.first + a.second b.second: exact products, sums rounded to float. Numbers below
// the smallest normal one count as zero, in a, b and the sums.
AE_INLINE Vec<float> fma(Vec<BFloat16Pair> a, Vec<BFloat16Pair> b, Vec<float> c) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
#endif

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
