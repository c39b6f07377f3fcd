// Entry points of the weights kernel of one tier. Compiled once per tier.
#include "kernels/cpu/weights.h"

#include "kernels/cpu/tiers/entries.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

namespace {

template <class T, class In = T>
int64_t measure(const WeightsParams& p) {
  Arena arena{nullptr};
  Weights<T, In> kernel(p, arena);
  return arena.used;
}

template <class T, class In = T>
void run(const WeightsParams& p, WorkQueue& queue, void* memory) {
  Arena arena{static_cast<char*>(memory)};
  Weights<T, In> kernel(p, arena);
  const int64_t rows = query_block(p.q_length), blocks = blocks_of(p.q_length, rows);
  const int64_t heads = p.average ? 1 : p.heads;
  queue.for_each([&](int64_t item) {
    const int64_t i0 = item % blocks * rows;
    kernel.item(p.problem(item / (blocks * heads)), item / blocks % heads, i0,
                smaller(rows, p.q_length - i0));
  });
}

}  // namespace

int64_t weights_items(const WeightsParams& p) {
  return p.problems * (p.average ? 1 : p.heads) * blocks_of(p.q_length, query_block(p.q_length));
}

#if defined(__AVX512BF16__)

int64_t weights_scratch(const WeightsParams& p) {
  return has_kernels_for(p) ? measure<float, BFloat16Pair>(p) : avx512::kKernels.weights_scratch(p);
}
void weights(const WeightsParams& p, WorkQueue& queue, void* memory) {
  const auto kernel = has_kernels_for(p) ? run<float, BFloat16Pair> : avx512::kKernels.weights;
  kernel(p, queue, memory);
}

#else

int64_t weights_scratch(const WeightsParams& p) {
  return p.type == ScalarType::kFloat64 ? measure<double>(p) : measure<float>(p);
}
void weights(const WeightsParams& p, WorkQueue& queue, void* memory) {
  p.type == ScalarType::kFloat64 ? run<double>(p, queue, memory) : run<float>(p, queue, memory);
}

#endif

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
