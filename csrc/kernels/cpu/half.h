// bfloat16 and float16 numbers to and from float, a vector at a time; kernels/half.h has them one
// by one. Rounding is to nearest even.
#pragma once

#include "kernels/cpu/simd.h"
#include "kernels/half.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// Numbers of 16 bits, as tensors hold them.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
typedef uint16_t HalfWords __attribute__((vector_size(kVectorBytes / 2)));
typedef Vec<uint32_t> Words;

// A vector of numbers of a tensor, in the accumulation type.
AE_INLINE Vec<double> load_numbers(const double* p) { return load(p); }
AE_INLINE Vec<float> load_numbers(const float* p) { return load(p); }
AE_INLINE Vec<float> load_numbers(const BFloat16* p) {
#if defined(__AVX512F__)
  return (Vec<float>)((Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
#elif defined(__AVX2__)
  return (Vec<float>)((Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
#else
  HalfWords bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return (Vec<float>)(__builtin_convertvector(bits, Words) << 16);
#endif
}
AE_INLINE Vec<float> load_numbers(const Float16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = float16_to_float(p[i].bits);
  return v;
#endif
}

AE_INLINE void store_numbers(double* p, Vec<double> v) { store(p, v); }
AE_INLINE void store_numbers(float* p, Vec<float> v) { store(p, v); }
AE_INLINE void store_numbers(BFloat16* p, Vec<float> v) {
  const Words bits = (Words)v;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words word =
      (Words)select(equal(v, v), (Vec<float>)rounded, (Vec<float>)(Words{} + 0x7fc0));
  const HalfWords half = __builtin_convertvector(word, HalfWords);
  __builtin_memcpy(p, &half, sizeof(half));
}
AE_INLINE void store_numbers(Float16* p, Vec<float> v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes<float>; ++i) p[i].bits = float16_from_float(v[i]);
#endif
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
