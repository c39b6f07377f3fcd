// bfloat16 and float16 numbers to and from float, one by one, for every device. Rounding is to
// nearest even. Kept as their bits, since not every compiler has the types.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "kernels/params.h"

namespace attention_ext::kernels {

AE_INLINE float bfloat16_to_float(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
AE_INLINE uint16_t bfloat16_from_float(float f) {  // NaN stays NaN
#if defined(__CUDA_ARCH__)
  uint16_t x;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x) : "f"(f));
  return x;
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
#endif
}
AE_INLINE float float16_to_float(uint16_t x) {
#if defined(__CUDA_ARCH__)
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
  return f;
#elif defined(__F16C__)
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
AE_INLINE uint16_t float16_from_float(float f) {
#if defined(__CUDA_ARCH__)
  uint16_t x;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(f));
  return x;
#elif defined(__F16C__)
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

}  // namespace attention_ext::kernels
