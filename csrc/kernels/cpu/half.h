// bfloat16 and float16 numbers to and from float: one by one, and a vector at a time. Rounding is
// to nearest even.
#pragma once

#include "kernels/cpu/simd.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

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
