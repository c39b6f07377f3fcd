// Scalar arithmetic of PTX instructions on raw register bits.
#include <cmath>
#include <limits>

#include "bits.h"

namespace ptx {
namespace {

template <class T>
bool compare(Compare c, T a, T b) {
  const bool unordered = a != a || b != b;
  switch (c) {
    case Compare::kEq:
      return a == b;
    case Compare::kNe:
      return !unordered && a != b;
    case Compare::kLt:
      return a < b;
    case Compare::kLe:
      return a <= b;
    case Compare::kGt:
      return a > b;
    case Compare::kGe:
      return a >= b;
    case Compare::kEqu:
      return unordered || a == b;
    case Compare::kNeu:
      return unordered || a != b;
    case Compare::kLtu:
      return unordered || a < b;
    case Compare::kLeu:
      return unordered || a <= b;
    case Compare::kGtu:
      return unordered || a > b;
    case Compare::kGeu:
      return unordered || a >= b;
    case Compare::kNan:
      return unordered;
    case Compare::kNum:
      return !unordered;
  }
  return false;
}

template <class T>
uint64_t float_operation(const Instruction& i, T a, T b, T c) {
  T r;
  switch (i.op) {
    case Op::kAdd:
      r = rounded(i.round, [=] {
        volatile T x = a;
        return static_cast<T>(x + b);
      });
      break;
    case Op::kSub:
      r = rounded(i.round, [=] {
        volatile T x = a;
        return static_cast<T>(x - b);
      });
      break;
    case Op::kMul:
      r = rounded(i.round, [=] {
        volatile T x = a;
        return static_cast<T>(x * b);
      });
      break;
    case Op::kFma:
    case Op::kMad:
      r = rounded(i.round, [=] {
        volatile T x = a;
        return std::fma(static_cast<T>(x), b, c);
      });
      break;
    case Op::kDiv:
      r = a / b;
      break;
    case Op::kRcp:
      r = T{1} / a;
      break;
    case Op::kSqrt:
      r = std::sqrt(a);
      break;
    case Op::kRsqrt:
      r = T{1} / std::sqrt(a);
      break;
    case Op::kMin:
      r = std::fmin(a, b);
      break;
    case Op::kMax:
      r = std::fmax(a, b);
      break;
    case Op::kAbs:
      r = std::fabs(a);
      break;
    case Op::kNeg:
      r = -a;
      break;
    case Op::kCopysign:
      r = std::copysign(b, a);
      break;  // copysign d, a, b: sign of a
    case Op::kEx2:
      r = static_cast<T>(std::exp2(static_cast<double>(a)));
      break;
    case Op::kLg2:
      r = static_cast<T>(std::log2(static_cast<double>(a)));
      break;
    case Op::kTanh:
      r = static_cast<T>(std::tanh(static_cast<double>(a)));
      break;
    default:
      unknown(i);
  }
  if (i.saturate) r = r > T{1} ? T{1} : r > T{0} ? r : T{0};  // NaN becomes 0
  if constexpr (sizeof(T) == 4) r = flushed(r, i.flush);
  return bits(r);
}

uint64_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = a | static_cast<uint64_t>(b) << 32;
  uint32_t r = 0;
  for (int n = 0; n < 4; ++n) {
    const uint32_t s = selector >> (4 * n) & 0xf;
    uint32_t byte = static_cast<uint32_t>(both >> (8 * (s & 7))) & 0xff;
    if (s & 8) byte = byte & 0x80 ? 0xff : 0;
    r |= byte << (8 * n);
  }
  return r;
}

}  // namespace

uint64_t evaluate(const Instruction& i, const uint64_t* x, int count) {
  const Type t = i.type;
  auto at = [&](int n) { return n < count ? x[n] : 0; };
  switch (i.op) {
    case Op::kMov:
      return cut(x[0], t);
    case Op::kCvt:
      return convert(i, i.from == Type::kF32 && i.flush ? bits(flushed(f32(x[0]), true)) : x[0]);
    case Op::kCvtPair: {
      uint16_t high, low;
      round_half(f32(x[0]), t, high);
      round_half(f32(x[1]), t, low);
      return static_cast<uint64_t>(high) << 16 | low;
    }
    case Op::kSelp:
      return cut(x[2] & 1 ? x[0] : x[1], t);
    case Op::kSetp:
      if (t == Type::kF32)
        return compare(i.compare, flushed(f32(x[0]), i.flush), flushed(f32(x[1]), i.flush));
      if (t == Type::kF64) return compare(i.compare, f64(x[0]), f64(x[1]));
      if (is_signed(t)) return compare(i.compare, extend(x[0], t), extend(x[1], t));
      return compare(i.compare, cut(x[0], t), cut(x[1], t));
    case Op::kAnd:
      return cut(x[0] & x[1], t);
    case Op::kOr:
      return cut(x[0] | x[1], t);
    case Op::kXor:
      return cut(x[0] ^ x[1], t);
    case Op::kNot:
      return cut(~x[0], t);
    case Op::kShl: {
      const uint32_t n = static_cast<uint32_t>(x[1]);
      return n >= static_cast<uint32_t>(width(t)) ? 0 : cut(x[0] << n, t);
    }
    case Op::kShr: {
      const uint32_t n = static_cast<uint32_t>(x[1]), most = static_cast<uint32_t>(width(t));
      if (is_signed(t))
        return cut(static_cast<uint64_t>(extend(x[0], t) >> (n >= most ? most - 1 : n)), t);
      return n >= most ? 0 : cut(x[0], t) >> n;
    }
    case Op::kPopc:
      return static_cast<uint64_t>(__builtin_popcountll(cut(x[0], t)));
    case Op::kClz:
      return cut(x[0], t) == 0 ? width(t) : __builtin_clzll(cut(x[0], t)) - (64 - width(t));
    case Op::kBrev: {
      uint64_t r = 0;
      for (int n = 0; n < width(t); ++n) r |= (x[0] >> n & 1) << (width(t) - 1 - n);
      return r;
    }
    case Op::kBfi: {
      const uint32_t begin = x[2] & 0xff, length = x[3] & 0xff;
      const uint64_t mask = length == 0 || begin >= 64
                                ? 0
                                : (length >= 64 ? ~uint64_t{0} : (uint64_t{1} << length) - 1)
                                      << begin;
      return cut((x[1] & ~mask) | (begin < 64 ? x[0] << begin & mask : 0), t);
    }
    case Op::kBfe: {
      if (is_signed(t)) unknown(i);
      const uint32_t begin = x[1] & 0xff, length = x[2] & 0xff;
      if (begin >= 64) return 0;
      const uint64_t value = cut(x[0], t) >> begin;
      return length >= 64 ? value : value & ((uint64_t{1} << length) - 1);
    }
    case Op::kPrmt:
      return permute(static_cast<uint32_t>(x[0]), static_cast<uint32_t>(x[1]),
                     static_cast<uint32_t>(x[2]));
    case Op::kLop3: {
      uint32_t r = 0;
      for (int n = 0; n < 32; ++n) {
        const int index =
            static_cast<int>((x[0] >> n & 1) << 2 | (x[1] >> n & 1) << 1 | (x[2] >> n & 1));
        r |= static_cast<uint32_t>(x[3] >> index & 1) << n;
      }
      return r;
    }
    case Op::kShf: {
      const uint64_t both = cut(x[0], Type::kB32) | x[1] << 32;
      uint32_t n = static_cast<uint32_t>(x[2]);
      n = i.mode & 2 ? (n > 32 ? 32 : n) : n & 31;
      return i.mode & 1 ? cut(n == 64 ? 0 : both >> n, Type::kB32)
                        : cut(both << n >> 32, Type::kB32);
    }
    default:
      break;
  }
  if (t == Type::kF32) {
    auto value = [&](int n) { return flushed(f32(at(n)), i.flush); };
    return float_operation<float>(i, value(0), value(1), value(2));
  }
  if (t == Type::kF64) return float_operation<double>(i, f64(at(0)), f64(at(1)), f64(at(2)));
  const int64_t a = is_signed(t) ? extend(at(0), t) : static_cast<int64_t>(cut(at(0), t));
  const int64_t b = is_signed(t) ? extend(at(1), t) : static_cast<int64_t>(cut(at(1), t));
  const uint64_t ua = static_cast<uint64_t>(a), ub = static_cast<uint64_t>(b);
  if (i.saturate) unknown(i);
  switch (i.op) {
    case Op::kAdd:
      return cut(ua + ub, t);
    case Op::kSub:
      return cut(ua - ub, t);
    case Op::kMul:
      return cut(ua * ub, t);
    case Op::kMad:
      return cut(ua * ub + at(2), t);
    case Op::kMulWide:
      return width(t) == 16 ? cut(ua * ub, Type::kB32) : ua * ub;
    case Op::kMadWide:
      return width(t) == 16 ? cut(ua * ub + at(2), Type::kB32) : ua * ub + at(2);
    case Op::kMulHigh:
      if (is_signed(t))
        return cut(static_cast<uint64_t>((static_cast<__int128>(a) * b) >> width(t)), t);
      return cut(static_cast<uint64_t>((static_cast<unsigned __int128>(ua) * ub) >> width(t)), t);
    case Op::kDiv:
    case Op::kRem: {
      if (b == 0) throw Error("PTX line " + std::to_string(i.line) + ": division by zero");
      if (is_signed(t))
        return cut(static_cast<uint64_t>(i.op == Op::kDiv ? (b == -1 ? -a : a / b)
                                                          : (b == -1 ? 0 : a % b)),
                   t);
      return i.op == Op::kDiv ? ua / ub : ua % ub;
    }
    case Op::kMin:
      return cut(static_cast<uint64_t>(is_signed(t) ? std::min(a, b)
                                                    : static_cast<int64_t>(std::min(ua, ub))),
                 t);
    case Op::kMax:
      return cut(static_cast<uint64_t>(is_signed(t) ? std::max(a, b)
                                                    : static_cast<int64_t>(std::max(ua, ub))),
                 t);
    case Op::kAbs:
      return cut(static_cast<uint64_t>(a < 0 ? -a : a), t);
    case Op::kNeg:
      return cut(0 - ua, t);
    default:
      unknown(i);
  }
}

}  // namespace ptx
