// Register bits as numbers, and arithmetic with a rounding of its own.
#pragma once

#include <cfenv>
#include <cmath>
#include <cstring>

#include "machine.h"

namespace ptx {

inline float f32(uint64_t bits) {
  const uint32_t low = static_cast<uint32_t>(bits);
  float x;
  std::memcpy(&x, &low, 4);
  return x;
}
inline uint64_t bits(float x) {
  if (std::isnan(x)) return 0x7fffffff;  // PTX's canonical NaN
  uint32_t low;
  std::memcpy(&low, &x, 4);
  return low;
}
inline double f64(uint64_t raw) {
  double x;
  std::memcpy(&x, &raw, 8);
  return x;
}
inline uint64_t bits(double x) {
  uint64_t raw;
  std::memcpy(&raw, &x, 8);
  return raw;
}
inline float flushed(float x, bool flush) {
  return flush && std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

// Keeps the compiler from folding arithmetic over a change of the rounding mode.
template <class F>
auto rounded(Round round, F&& f) {
  if (round == Round::kNearest) return f();
  std::fesetround(round == Round::kDown ? FE_DOWNWARD
                  : round == Round::kUp ? FE_UPWARD
                                        : FE_TOWARDZERO);
  volatile auto result = f();
  std::fesetround(FE_TONEAREST);
  return static_cast<decltype(f())>(result);
}

inline bool is_float(Type t) { return t == Type::kF32 || t == Type::kF64; }
inline bool is_signed(Type t) {
  return t == Type::kS8 || t == Type::kS16 || t == Type::kS32 || t == Type::kS64;
}
inline int width(Type t) { return bytes_of(t) * 8; }
inline uint64_t cut(uint64_t x, Type t) {
  const int n = width(t);
  if (t == Type::kPred) return x & 1;
  return n == 64 ? x : x & ((uint64_t{1} << n) - 1);
}
inline int64_t extend(uint64_t x, Type t) {
  const int n = width(t);
  return n == 64 ? static_cast<int64_t>(x) : static_cast<int64_t>(x << (64 - n)) >> (64 - n);
}

[[noreturn]] inline void unknown(const Instruction& i) {
  throw Error("PTX line " + std::to_string(i.line) + ": not emulated: " + i.text);
}

// Of numbers between types, one instruction's.
uint64_t convert(const Instruction& i, uint64_t x);

}  // namespace ptx
