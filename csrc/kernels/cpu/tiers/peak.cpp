// The multiply-add peak of one tier, what benchmarks measure kernels against. Compiled once per
// tier.
#include "kernels/cpu/simd.h"
#include "kernels/cpu/tiers/entries.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

namespace {

// Sixteen independent chains of fused multiply-adds, enough to hide their latency; the operations
// they performed.
template <class T>
double fma_chains(int64_t repeats) {
  constexpr int kChains = kRegisters == 32 ? 16 : 12;
  Vec<T> chain[kChains];
  AE_UNROLL for (int i = 0; i < kChains; ++i) chain[i] = broadcast(static_cast<T>(i));
  const Vec<T> a = broadcast(T(0.999)), b = broadcast(T(0.001));
  for (int64_t n = 0; n < repeats; ++n) {
    AE_UNROLL for (int i = 0; i < kChains; ++i) chain[i] = fma(chain[i], a, b);
    asm volatile("" ::: "memory");
  }
  Vec<T> sum = chain[0];
  AE_UNROLL for (int i = 1; i < kChains; ++i) sum += chain[i];
  volatile T keep = sum[0];
  (void)keep;
  return static_cast<double>(repeats) * kChains * kLanes<T> * 2;
}

}  // namespace

double fma_loop(bool double_precision, int64_t repeats) {
  return double_precision ? fma_chains<double>(repeats) : fma_chains<float>(repeats);
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
