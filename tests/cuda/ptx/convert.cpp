// Conversions between the number types of PTX.
#include <cmath>
#include <limits>

#include "bits.h"

namespace ptx {

uint64_t convert(const Instruction& i, uint64_t x) {
  const Type to = i.type, from = i.from;
  if (from == Type::kF16 || from == Type::kBF16) {
    if (to != Type::kF32) unknown(i);
    return bits(widen(static_cast<uint16_t>(x), from));
  }
  if (to == Type::kF16 || to == Type::kBF16) {
    if (from != Type::kF32 || i.round != Round::kNearest) unknown(i);
    uint16_t half;
    round_half(f32(x), to, half);
    return half;
  }
  if (is_float(from) && is_float(to)) {
    const double value = from == Type::kF32 ? f32(x) : f64(x);
    double r = value;
    if (i.round == Round::kNearestInt) r = std::nearbyint(value);
    if (i.round == Round::kZeroInt) r = std::trunc(value);
    if (i.round == Round::kDownInt) r = std::floor(value);
    if (i.round == Round::kUpInt) r = std::ceil(value);
    if (i.round == Round::kZero || i.round == Round::kDown || i.round == Round::kUp) unknown(i);
    if (i.saturate) r = r > 1 ? 1 : r > 0 ? r : 0;
    return to == Type::kF64 ? bits(r) : bits(flushed(static_cast<float>(r), i.flush));
  }
  if (is_float(from)) {
    double value = from == Type::kF32 ? f32(x) : f64(x);
    if (i.round == Round::kNearestInt)
      value = std::nearbyint(value);
    else if (i.round == Round::kZeroInt)
      value = std::trunc(value);
    else if (i.round == Round::kDownInt)
      value = std::floor(value);
    else if (i.round == Round::kUpInt)
      value = std::ceil(value);
    else
      unknown(i);
    const int n = width(to);
    const double low = is_signed(to) ? -std::ldexp(1.0, n - 1) : 0.0;
    const double high = std::ldexp(1.0, is_signed(to) ? n - 1 : n);
    if (std::isnan(value)) return 0;
    if (value < low) value = low;
    if (value >= high) return cut(is_signed(to) ? (uint64_t{1} << (n - 1)) - 1 : ~uint64_t{0}, to);
    return cut(is_signed(to) ? static_cast<uint64_t>(static_cast<int64_t>(value))
                             : static_cast<uint64_t>(value),
               to);
  }
  if (is_float(to)) {
    if (i.round != Round::kNearest) unknown(i);
    if (to == Type::kF32) {
      return bits(is_signed(from) ? static_cast<float>(extend(x, from))
                                  : static_cast<float>(cut(x, from)));
    }
    return bits(is_signed(from) ? static_cast<double>(extend(x, from))
                                : static_cast<double>(cut(x, from)));
  }
  if (i.saturate) unknown(i);
  return cut(is_signed(from) ? static_cast<uint64_t>(extend(x, from)) : cut(x, from), to);
}

float widen(uint16_t raw, Type type) {
  if (type == Type::kBF16) return f32(static_cast<uint64_t>(raw) << 16);
  const int exponent = raw >> 10 & 0x1f, fraction = raw & 0x3ff;
  float x = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
            : exponent == 31 ? (fraction != 0 ? std::numeric_limits<float>::quiet_NaN()
                                              : std::numeric_limits<float>::infinity())
                             : std::ldexp(static_cast<float>(fraction | 0x400), exponent - 25);
  return raw & 0x8000 ? -x : x;
}

float round_half(float x, Type type, uint16_t& half) {
  const uint32_t u = static_cast<uint32_t>(bits(x));
  if (std::isnan(x)) {
    half = 0x7fff;
  } else if (type == Type::kBF16) {
    half = static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
  } else {
    const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000);
    const float size = std::fabs(x);
    if (size == 0.0f) {
      half = sign;
    } else if (size >= 65520.0f) {
      half = static_cast<uint16_t>(sign | 0x7c00);
    } else {
      int exponent;
      std::frexp(size, &exponent);  // size < 2^exponent
      const int step = std::max(exponent - 11, -24);
      const float scaled = std::nearbyint(std::ldexp(size, -step));  // nearest even
      const int n = static_cast<int>(scaled);
      if (step == -24) {
        half = static_cast<uint16_t>(sign | n);  // subnormal, or carried into the smallest normal
      } else {
        const int carried = n == 2048 ? 1 : 0;
        half =
            static_cast<uint16_t>(sign | ((step + 25 + carried) << 10) | (carried ? 0 : n - 1024));
      }
    }
  }
  return widen(half, type);
}

}  // namespace ptx
