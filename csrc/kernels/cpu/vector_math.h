// Exponential, logarithm and hyperbolic tangent of vectors, each to about one unit in the last
// place. For scores and row statistics.
#pragma once

#include "kernels/cpu/simd.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

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
  static constexpr float kHighest = 88.3f;  // 2^n must be finite
  static constexpr float kLog2E = 1.44269502f;
  static constexpr float kLog2ELow = 1.92596300e-8f;
  static constexpr float kLn2High = 0.693145751953125f;  // 16 bits: n times this is exact
  static constexpr float kLn2Low = 1.42860682030941723212e-6f;
};
template <>
struct ExpRange<double> {
  static constexpr double kLowest = -708.3964185322641;
  static constexpr double kHighest = 709.4;
  static constexpr double kLog2E = 1.4426950408889634;
  static constexpr double kLog2ELow = 2.0355273740931033e-17;
  static constexpr double kLn2High = 0.693147180369123816490;  // 33 bits
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
};

// log2(e) x = n + r, n an integer, |r| <= 1/2. Adding and taking away 1.5 * 2^(mantissa bits)
// rounds to an integer. Where products are fused a two-part log2(e) keeps all of r; elsewhere n ln
// 2 is taken away exactly before the rest is scaled.
template <class T>
struct Reduced {
  Vec<T> n, r;
};
template <class T>
AE_INLINE Reduced<T> reduce_log2(Vec<T> x) {
  using R = ExpRange<T>;
  const Vec<T> n = fma(x, broadcast(R::kLog2E), broadcast(kRounder<T>)) - kRounder<T>;
#if defined(__AVX2__)
  return {n, fma(x, broadcast(R::kLog2ELow), fma(x, broadcast(R::kLog2E), -n))};
#else
  return {n, ((x - n * R::kLn2High) - n * R::kLn2Low) * R::kLog2E};
#endif
}

// e^t for t <= ~88 (709), -inf included: 0 below the smallest normal number, NaN for NaN. Error
// about one unit in the last place for every t.
template <class T>
AE_INLINE Vec<T> exp_bounded(Vec<T> t) {
  const auto [n, r] = reduce_log2<T>(t);
  const Vec<T> p = fma(exp2_minus_one_over(r), r, broadcast(T{1}));
  return times_power_of_two_from(broadcast(ExpRange<T>::kLowest), t, p, n);
}

// The same for every t; what would overflow becomes a huge number.
template <class T>
AE_INLINE Vec<T> exp_vector(Vec<T> t) {
  return exp_bounded<T>(min(broadcast(ExpRange<T>::kHighest), t));
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

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
