// bfloat16 and float16 numbers to and from float, a vector at a time; kernels/half.h has them one
// by one. Rounding is to nearest even.
#pragma once

#include "kernels/cpu/simd.h"
#include "kernels/half.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

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
