// Entry points of the weights kernel of one tier. Compiled once per tier.
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
int64_t weights_scratch(const WeightsParams& p) {
  return p.type == ScalarType::kFloat64 ? measure<double>(p) : measure<float>(p);
}
void weights(const WeightsParams& p, WorkQueue& queue, void* memory) {
  p.type == ScalarType::kFloat64 ? run<double>(p, queue, memory) : run<float>(p, queue, memory);
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
