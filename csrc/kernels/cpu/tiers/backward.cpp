// Entry points of the backward kernels of one tier. Compiled once per tier.
#include "kernels/cpu/backward.h"

#include <cmath>

#include "kernels/cpu/bias_gradient.h"
#include "kernels/cpu/tiers/entries.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

namespace {

// d sink = - sum over rows of exp(sink - lse) delta, summed in one order.
template <class T>
void sink(const BackwardParams& p, WorkQueue& queue) {
  queue.for_each([&](int64_t h) {
    const T value = static_cast<const T*>(p.sinks)[h];
    T total{};
    for (int64_t n = 0; n < p.problems && value != -kInfinity<T>; ++n) {
      const Problem problem = p.problem(n);
      T part{};
      T deltas[kLanes<T>];
      for (int64_t x = 0; x < problem.q_length; ++x) {
        const int64_t i = problem.q_begin + x, lane = x % kLanes<T>;
        if (lane == 0) {
          row_deltas<T>(p, problem.batch, h, i, smaller(kLanes<T>, problem.q_length - x), deltas);
        }
        const T lse = *p.logsumexp.at<T>(problem.batch, h, i, 0);
        const T residual = *p.residual.at<T>(problem.batch, h, i, 0);
        const T weight = std::exp((value - lse) - residual);
        T delta = deltas[lane];
        // A dead row's output takes part in nothing, whatever arrives for it.
        if (delta - delta != T{0} && lse == value && residual == T{0}) {
          delta = p.grad_logsumexp.defined() ? -*p.grad_logsumexp.at<T>(problem.batch, h, i, 0) : 0;
        }
        // A sink of NaN or inf makes every row that sees a key NaN; a finite delta is a dead row's,
        // whose logsumexp is the sink itself.
        part -= value - value == T{0} || delta - delta != T{0} ? weight * delta : delta;
      }
      total += part;
    }
    static_cast<T*>(p.grad_sinks)[h] = total;
  });
}

template <class T, class Kernel>
int64_t measure(const BackwardParams& p) {
  Arena arena{nullptr};
  Kernel kernel(p, arena);
  return arena.used;
}

template <class T, class In = T>
void keys(const BackwardParams& p, BackwardState& state, WorkQueue& queue, void* memory) {
  Arena arena{static_cast<char*>(memory)};
  Backward<T, In> kernel(p, arena);
  kernel.turns.state = &state;
  kernel.turns.queue = &queue;
  int64_t visited = 0;
  const bool waits = backward_ranges(p) > 1 || bias_with_keys(p);
  const int64_t step = waits ? queue.takers : 1;
  const auto item = [&](int64_t index) { kernel.item(index, index + step, visited); };
  waits ? queue.for_each_in_turn(item) : queue.for_each(item);
  if (p.visited != nullptr) p.visited->fetch_add(visited);
}

template <class T, class In = T>
void bias(const BackwardParams& p, WorkQueue& queue, void* memory) {
  Arena arena{static_cast<char*>(memory)};
  BiasGradient<T, In> kernel(p, arena);
  queue.for_each([&](int64_t item) { kernel.item(item); });
}

}  // namespace

int64_t backward_items(const BackwardParams& p) {
  return p.problems * p.kv_heads * backward_ranges(p);
}
int64_t bias_gradient_items(const BackwardParams& p) { return BiasPlan(p).items(p); }

#if defined(__AVX512BF16__)

int64_t backward_scratch(const BackwardParams& p) {
  return has_kernels_for(p) ? measure<float, Backward<float, BFloat16Pair>>(p)
                            : avx512::kKernels.backward_scratch(p);
}
void backward(const BackwardParams& p, BackwardState& state, WorkQueue& queue, void* memory) {
  const auto kernel = has_kernels_for(p) ? keys<float, BFloat16Pair> : avx512::kKernels.backward;
  kernel(p, state, queue, memory);
}
int64_t bias_gradient_scratch(const BackwardParams& p) {
  return has_kernels_for(p) ? measure<float, BiasGradient<float, BFloat16Pair>>(p)
                            : avx512::kKernels.bias_gradient_scratch(p);
}
void bias_gradient(const BackwardParams& p, WorkQueue& queue, void* memory) {
  const auto kernel =
      has_kernels_for(p) ? bias<float, BFloat16Pair> : avx512::kKernels.bias_gradient;
  kernel(p, queue, memory);
}
void sink_gradient(const BackwardParams& p, WorkQueue& queue) {
  avx512::kKernels.sink_gradient(p, queue);
}

#else

int64_t backward_scratch(const BackwardParams& p) {
  return p.type == ScalarType::kFloat64 ? measure<double, Backward<double>>(p)
                                        : measure<float, Backward<float>>(p);
}
void backward(const BackwardParams& p, BackwardState& state, WorkQueue& queue, void* memory) {
  p.type == ScalarType::kFloat64 ? keys<double>(p, state, queue, memory)
                                 : keys<float>(p, state, queue, memory);
}

int64_t bias_gradient_scratch(const BackwardParams& p) {
  return p.type == ScalarType::kFloat64 ? measure<double, BiasGradient<double>>(p)
                                        : measure<float, BiasGradient<float>>(p);
}
void bias_gradient(const BackwardParams& p, WorkQueue& queue, void* memory) {
  p.type == ScalarType::kFloat64 ? bias<double>(p, queue, memory) : bias<float>(p, queue, memory);
}

void sink_gradient(const BackwardParams& p, WorkQueue& queue) {
  p.type == ScalarType::kFloat64 ? sink<double>(p, queue) : sink<float>(p, queue);
}

#endif

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
