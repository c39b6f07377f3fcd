// The multiply-add peak of one tier, what benchmarks measure kernels against. Compiled once per
// tier.
#include "kernels/cpu/simd.h"
#include "kernels/cpu/tiers/entries.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

namespace {

// Sixteen independent chains of `step`, each step one instruction, enough to hide its latency; the
// lanes they worked on.
template <class T, class Step>
double chains(int64_t repeats, Step&& step) {
  constexpr int kChains = kRegisters == 32 ? 16 : 12;
  Vec<T> chain[kChains];
  AE_UNROLL for (int i = 0; i < kChains; ++i) chain[i] = broadcast(static_cast<T>(i));
  for (int64_t n = 0; n < repeats; ++n) {
    AE_UNROLL for (int i = 0; i < kChains; ++i) chain[i] = step(chain[i]);
    asm volatile("" ::: "memory");
  }
  Vec<T> sum = chain[0];
  AE_UNROLL for (int i = 1; i < kChains; ++i) sum += chain[i];
  volatile T keep = sum[0];
  (void)keep;
  return static_cast<double>(repeats) * kChains * kLanes<T>;
}

template <class T>
double fma_chains(int64_t repeats) {
  const Vec<T> a = broadcast(T(0.999)), b = broadcast(T(0.001));
  return 2 * chains<T>(repeats, [&](Vec<T> x) { return fma(x, a, b); });
}

}  // namespace

double fma_loop(bool double_precision, int64_t repeats) {
  return double_precision ? fma_chains<double>(repeats) : fma_chains<float>(repeats);
}

#if defined(__AVX512BF16__)
double pair_loop(int64_t repeats) {
  const Vec<BFloat16Pair> a = broadcast(BFloat16Pair{0x3f80, 0x3f80});  // ones
  return 4 * chains<float>(repeats, [&](Vec<float> x) { return fma(a, a, x); });
}
#endif

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
