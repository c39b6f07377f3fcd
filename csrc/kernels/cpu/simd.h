// The only place where instruction sets differ: vectors of the tier's width, their loads, fused
// multiply-add, maximum, exponential, hyperbolic tangent, lane masks, transposes, 32-bit multiplies
// and 16-bit conversions. Compiled once per tier (ATTENTION_EXT_TIER names the namespace); includes
// nothing of torch.
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
AE_INLINE Vec<float> round_even(Vec<float> a) { return _mm512_roundscale_ps(a, 8); }
AE_INLINE Vec<double> round_even(Vec<double> a) { return _mm512_roundscale_pd(a, 8); }
AE_INLINE Vec<float> times_power_of_two(Vec<float> a, Vec<float> n) {
  return _mm512_scalef_ps(a, n);
}
AE_INLINE Vec<double> times_power_of_two(Vec<double> a, Vec<double> n) {
  return _mm512_scalef_pd(a, n);
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
AE_INLINE Vec<float> round_even(Vec<float> a) { return _mm256_round_ps(a, 8); }
AE_INLINE Vec<double> round_even(Vec<double> a) { return _mm256_round_pd(a, 8); }
#else
AE_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return a * b + c; }
AE_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return a * b + c; }
AE_INLINE Vec<float> max(Vec<float> a, Vec<float> b) { return a > b ? a : b; }
AE_INLINE Vec<double> max(Vec<double> a, Vec<double> b) { return a > b ? a : b; }
AE_INLINE Vec<float> min(Vec<float> a, Vec<float> b) { return a < b ? a : b; }
AE_INLINE Vec<double> min(Vec<double> a, Vec<double> b) { return a < b ? a : b; }
// Adding and taking away 1.5 * 2^(mantissa bits) rounds to an integer; arguments here are below
// 2^11.
AE_INLINE Vec<float> round_even(Vec<float> a) { return (a + 12582912.f) - 12582912.f; }
AE_INLINE Vec<double> round_even(Vec<double> a) {
  return (a + 6755399441055744.0) - 6755399441055744.0;
}
#endif

#if !defined(__AVX512F__)
// a * 2^n through the exponent bits: n must leave the result normal (exp clamps for that).
AE_INLINE Vec<float> times_power_of_two(Vec<float> a, Vec<float> n) {
  const Vec<int32_t> bits = (Vec<int32_t>)(n + 12582912.f) << 23;
  return (Vec<float>)((Vec<int32_t>)a + bits);
}
AE_INLINE Vec<double> times_power_of_two(Vec<double> a, Vec<double> n) {
  const Vec<int64_t> bits = (Vec<int64_t>)(n + 6755399441055744.0) << 52;
  return (Vec<double>)((Vec<int64_t>)a + bits);
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

// ---- exponential and hyperbolic tangent
// ------------------------------------------------------------------------

// 2^r = 1 + r q(r) on |r| <= 1/2; q is the Chebyshev interpolant. Relative error 5e-9 (degree 6) in
// float, 8e-18 (degree 11) in double; 2^0 is exactly 1.
AE_INLINE Vec<float> exp2_minus_one_over(Vec<float> r) {
  Vec<float> q = broadcast(0.00015453162945120690f);
  q = fma(q, r, broadcast(0.0013390863364671234f));
  q = fma(q, r, broadcast(0.0096180825572778515f));
  q = fma(q, r, broadcast(0.055503571142190778f));
  q = fma(q, r, broadcast(0.24022650760568127f));
  return fma(q, r, broadcast(0.69314718802622878f));
}
AE_INLINE Vec<double> exp2_minus_one_over(Vec<double> r) {
  Vec<double> q = broadcast(4.4549605981865183938e-10);
  q = fma(q, r, broadcast(7.0725859492692236999e-9));
  q = fma(q, r, broadcast(1.0178062445845773521e-7));
  q = fma(q, r, broadcast(1.3215442587921689653e-6));
  q = fma(q, r, broadcast(0.000015252733829836118394));
  q = fma(q, r, broadcast(0.00015403530441736050155));
  q = fma(q, r, broadcast(0.001333355814641693531));
  q = fma(q, r, broadcast(0.0096181291076068885273));
  q = fma(q, r, broadcast(0.055504108664821594339));
  q = fma(q, r, broadcast(0.2402265069591009822));
  return fma(q, r, broadcast(0.69314718055994530942));
}

template <class T>
struct ExpRange;
template <>
struct ExpRange<float> {
  // exp of less than the smallest normal number is 0.
  static constexpr float kLowest = -87.33654f;
  static constexpr float kHighest = 88.5f;
  static constexpr float kLog2E = 1.44269502f;
  static constexpr float kLog2ELow = 1.92596300e-8f;
  static constexpr float kLn2High = 0.693145751953125f;  // 16 bits: n times this is exact
  static constexpr float kLn2Low = 1.42860682030941723212e-6f;
};
template <>
struct ExpRange<double> {
  static constexpr double kLowest = -708.3964185322641;
  static constexpr double kHighest = 709.5;
  static constexpr double kLog2E = 1.4426950408889634;
  static constexpr double kLog2ELow = 2.0355273740931033e-17;
  static constexpr double kLn2High = 0.693147180369123816490;  // 33 bits
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
};

// log2(e) x = n + r, n an integer, |r| <= 1/2. Where products are fused a two-part log2(e) keeps
// all of r; elsewhere n ln 2 is taken away exactly before the rest is scaled.
template <class T>
struct Reduced {
  Vec<T> n, r;
};
template <class T>
AE_INLINE Reduced<T> reduce_log2(Vec<T> x) {
  using R = ExpRange<T>;
  const Vec<T> n = round_even(x * R::kLog2E);
#if defined(__AVX2__)
  return {n, fma(x, broadcast(R::kLog2ELow), fma(x, broadcast(R::kLog2E), -n))};
#else
  return {n, ((x - n * R::kLn2High) - n * R::kLn2Low) * R::kLog2E};
#endif
}

// e^t for t <= ~88 (709): 0 below the smallest normal number, NaN for NaN. Error about one unit in
// the last place for every t.
template <class T>
AE_INLINE Vec<T> exp_vector(Vec<T> t) {
  using R = ExpRange<T>;
  const Vec<T> x = min(broadcast(R::kHighest), max(broadcast(R::kLowest), t));
  const auto [n, r] = reduce_log2<T>(x);
  const Vec<T> p = fma(exp2_minus_one_over(r), r, broadcast(T{1}));
  return select(less(t, broadcast(R::kLowest)), Vec<T>{}, times_power_of_two(p, n));
}

// log x for positive normal x: x = 2^n m with m in [sqrt(1/2), sqrt(2)), log m = 2 artanh(f), f =
// (m - 1) / (m + 1), by its series (|f| <= 0.172: 5 terms in float, 11 in double leave less than
// the rounding).
template <class T>
AE_INLINE Vec<T> log_vector(Vec<T> x) {
  using I = IntOf<T>;
  constexpr int mantissa = sizeof(T) == 4 ? 23 : 52;
  constexpr I half_root = sizeof(T) == 4 ? I{0x3f3504f3} : I(0x3fe6a09e667f3bcd);
  constexpr int terms = sizeof(T) == 4 ? 5 : 11;
  const Vec<I> shifted = (Vec<I>)x - half_root;
  const Vec<I> exponent = shifted >> mantissa;
  const Vec<T> m = (Vec<T>)((shifted & ((I{1} << mantissa) - 1)) + half_root);
  const Vec<T> n = __builtin_convertvector(exponent, Vec<T>);
  const Vec<T> f = (m - T{1}) / (m + T{1});
  const Vec<T> f2 = f * f;
  Vec<T> series = broadcast(T{1} / T{2 * terms + 1});
  AE_UNROLL for (int k = terms - 1; k >= 0; --k) series =
      fma(series, f2, broadcast(T{1} / T(2 * k + 1)));
  const Vec<T> rest = fma(f + f, series, n * ExpRange<T>::kLn2Low);
  return fma(n, broadcast(ExpRange<T>::kLn2High), rest);
}

// tanh x = e / (e + 2) with e = exp(2|x|) - 1 formed without cancellation; sign restored; NaN for
// NaN.
template <class T>
AE_INLINE Vec<T> tanh_vector(Vec<T> x) {
  const Vec<T> magnitude = max(-x, x);
  const Vec<T> z = min(broadcast(T{44}), magnitude + magnitude);
  const auto [n, r] = reduce_log2<T>(z);
  const Vec<T> power = times_power_of_two(broadcast(T{1}), n);
  const Vec<T> e = fma(power, exp2_minus_one_over(r) * r, power - T{1});
  const Vec<T> y = e / (e + T{2});
  return select(less(x, Vec<T>{}), -y, y);
}

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

// 16 x 16 bytes, by four perfect shuffles.
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
AE_INLINE void transpose_bytes(Bytes16 (&rows)[16]) {
  AE_UNROLL for (int stage = 0; stage < 4; ++stage) {
    Bytes16 next[16];
    AE_UNROLL for (int i = 0; i < 8; ++i) {
      next[2 * i] = __builtin_shufflevector(rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20,
                                            5, 21, 6, 22, 7, 23);
      next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27,
                                                12, 28, 13, 29, 14, 30, 15, 31);
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

// ---- 16-bit numbers
// --------------------------------------------------------------------------------------------

AE_INLINE float bfloat16_to_float(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
AE_INLINE uint16_t bfloat16_from_float(float f) {  // round to nearest even, NaN stays NaN
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
AE_INLINE float float16_to_float(uint16_t x) {
#if defined(__F16C__)
  return _cvtsh_ss(x);
#else
  const uint32_t sign = uint32_t{x & 0x8000u} << 16;
  const uint32_t magnitude = x & 0x7fffu;
  float f;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    bits = sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13);
    __builtin_memcpy(&f, &bits, 4);
    return f;
  }
  if (magnitude < 0x400u) {  // subnormal: exact product
    f = static_cast<float>(magnitude) * 0x1p-24f;
    return sign != 0 ? -f : f;
  }
  bits = sign | ((magnitude << 13) + 0x38000000u);
  __builtin_memcpy(&f, &bits, 4);
  return f;
#endif
}
AE_INLINE uint16_t float16_from_float(float f) {  // round to nearest even
#if defined(__F16C__)
  return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // below the smallest normal: adding 0.5 rounds at 2^-24
    float m;
    __builtin_memcpy(&m, &magnitude, 4);
    m += 0.5f;
    uint32_t rounded;
    __builtin_memcpy(&rounded, &m, 4);
    return static_cast<uint16_t>(sign | (rounded - 0x3f000000u));
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | (rounded >> 13));
#endif
}

// A vector of floats from or to 16-bit storage.
AE_INLINE Vec<float> load_bfloat16(const uint16_t* p) {
#if defined(__AVX512F__)
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return (Vec<float>)_mm512_slli_epi32(x, 16);
#elif defined(__AVX2__)
  const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return (Vec<float>)_mm256_slli_epi32(x, 16);
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = bfloat16_to_float(p[i]);
  return v;
#endif
}
AE_INLINE Vec<float> load_float16(const uint16_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = float16_to_float(p[i]);
  return v;
#endif
}
AE_INLINE void store_bfloat16(uint16_t* p, Vec<float> v) {
#if defined(__AVX512F__)
  const __m512i bits = (__m512i)v;
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  const __m512i rounded =
      _mm512_mask_blend_epi32(nan, _mm512_srli_epi32(sum, 16), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(rounded));
#else
  for (int i = 0; i < kLanes<float>; ++i) p[i] = bfloat16_from_float(v[i]);
#endif
}
AE_INLINE void store_float16(uint16_t* p, Vec<float> v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes<float>; ++i) p[i] = float16_from_float(v[i]);
#endif
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
