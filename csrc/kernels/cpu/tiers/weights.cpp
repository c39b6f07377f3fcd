// Entry points of the weights kernel of one tier, and the tier's FMA loop for benchmarks. Compiled
// once per tier.
#include "kernels/cpu/weights.h"

#include "kernels/cpu/tiers/entries.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

namespace {

template <class T>
int64_t measure(const WeightsParams& p) {
  Arena arena{nullptr};
  Weights<T> kernel(p, arena);
  return arena.used;
}

template <class T>
void run(const WeightsParams& p, WorkQueue& queue, void* memory) {
  Arena arena{static_cast<char*>(memory)};
  Weights<T> kernel(p, arena);
  const int64_t rows = query_block(p.q_length), blocks = blocks_of(p.q_length, rows);
  const int64_t heads = p.average ? 1 : p.heads;
  for (int64_t item; (item = queue.next.fetch_add(1)) < queue.count;) {
    const int64_t i0 = item % blocks * rows;
    kernel.item(p.problem(item / (blocks * heads)), item / blocks % heads, i0,
                smaller(rows, p.q_length - i0));
  }
}

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

int64_t weights_items(const WeightsParams& p) {
  return p.problems * (p.average ? 1 : p.heads) * blocks_of(p.q_length, query_block(p.q_length));
}
int64_t weights_scratch(const WeightsParams& p) {
  return p.type == ScalarType::kFloat64 ? measure<double>(p) : measure<float>(p);
}
void weights(const WeightsParams& p, WorkQueue& queue, void* memory) {
  p.type == ScalarType::kFloat64 ? run<double>(p, queue, memory) : run<float>(p, queue, memory);
}

double fma_loop(bool double_precision, int64_t repeats) {
  return double_precision ? fma_chains<double>(repeats) : fma_chains<float>(repeats);
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
