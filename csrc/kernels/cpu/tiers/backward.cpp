// Entry points of the backward kernels of one tier. Compiled once per tier.
#include "kernels/cpu/backward.h"

#include <cmath>

#include "kernels/cpu/bias_gradient.h"
#include "kernels/cpu/tiers/entries.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

namespace {

// sum of dO * (O + what rounding took from O): rows of a nearly one-hot softmax are differences of
// almost equal numbers, which the rounding of a 16-bit O would drown.
template <class T>
T grad_times_output(const BackwardParams& p, int64_t b, int64_t h, int64_t i) {
  constexpr int W = kLanes<T>;
  const auto piece = [&](const View& view, int64_t e) {
    const Rows row(view, b, h, i, 0);
    return load_piece<T>(row.at(0, e), row.type, row.column_stride, p.v_size - e);
  };
  const bool rounded = p.output_residual.defined();
  Vec<T> sum{};
  for (int64_t e = 0; e < p.v_size; e += W) {
    Vec<T> output = piece(p.output, e);
    if (rounded) output += piece(p.output_residual, e);
    sum = fma(piece(p.grad_output, e), output, sum);
  }
  T total{};
  for (int lane = 0; lane < W; ++lane) total += sum[lane];
  return total;
}

template <class T>
void delta(const BackwardParams& p, WorkQueue& queue) {
  for (int64_t item; (item = queue.next.fetch_add(1)) < queue.count;) {
    const BlockIndex at = block_index(p, item);
    const Problem problem = p.problem(at.problem);
    const int64_t rows = query_block(problem.q_length);
    const int64_t end = smaller(problem.q_length, (at.block + 1) * rows);
    for (int64_t i = at.block * rows; i < end; ++i) {
      const int64_t b = problem.batch, h = at.head, row = problem.q_begin + i;
      T value{};
      if (p.grad_output.defined()) value = grad_times_output<T>(p, b, h, row);
      if (p.grad_logsumexp.defined()) value -= *p.grad_logsumexp.at<T>(b, h, row, 0);
      *p.delta.at<T>(b, h, row, 0) = value;
    }
  }
}

// d sink = - sum over rows of exp(sink - lse) delta, summed in one order.
template <class T>
void sink(const BackwardParams& p, WorkQueue& queue) {
  for (int64_t h; (h = queue.next.fetch_add(1)) < queue.count;) {
    const T value = static_cast<const T*>(p.sinks)[h];
    T total{};
    for (int64_t n = 0; n < p.problems && value != -kInfinity<T>; ++n) {
      const Problem problem = p.problem(n);
      T part{};
      for (int64_t i = problem.q_begin; i < problem.q_begin + problem.q_length; ++i) {
        const T lse = *p.logsumexp.at<T>(problem.batch, h, i, 0);
        const T residual = *p.residual.at<T>(problem.batch, h, i, 0);
        const T weight = std::exp((value - lse) - residual);
        const T delta = *p.delta.at<T>(problem.batch, h, i, 0);
        // A sink of NaN or inf makes every row that sees a key NaN; a finite delta is a dead row's,
        // whose logsumexp is the sink itself.
        part -= value - value == T{0} || delta - delta != T{0} ? weight * delta : delta;
      }
      total += part;
    }
    static_cast<T*>(p.grad_sinks)[h] = total;
  }
}

template <class T, class Kernel>
int64_t measure(const BackwardParams& p) {
  Arena arena{nullptr};
  Kernel kernel(p, arena);
  return arena.used;
}

template <class T>
void keys(const BackwardParams& p, BackwardState& state, WorkQueue& queue, void* memory) {
  Arena arena{static_cast<char*>(memory)};
  Backward<T> kernel(p, arena);
  int64_t visited = 0;
  for (int64_t item; (item = queue.next.fetch_add(1)) < queue.count;) {
    kernel.item(state, queue, item, visited);
  }
  if (p.visited != nullptr) p.visited->fetch_add(visited);
}

template <class T>
void bias(const BackwardParams& p, WorkQueue& queue, void* memory) {
  Arena arena{static_cast<char*>(memory)};
  BiasGradient<T> kernel(p, arena);
  for (int64_t item; (item = queue.next.fetch_add(1)) < queue.count;) kernel.item(item);
}

}  // namespace

void backward_delta(const BackwardParams& p, WorkQueue& queue) {
  p.type == ScalarType::kFloat64 ? delta<double>(p, queue) : delta<float>(p, queue);
}

int64_t backward_items(const BackwardParams& p) {
  return p.problems * p.kv_heads * backward_ranges(p);
}
int64_t backward_scratch(const BackwardParams& p) {
  return p.type == ScalarType::kFloat64 ? measure<double, Backward<double>>(p)
                                        : measure<float, Backward<float>>(p);
}
void backward(const BackwardParams& p, BackwardState& state, WorkQueue& queue, void* memory) {
  p.type == ScalarType::kFloat64 ? keys<double>(p, state, queue, memory)
                                 : keys<float>(p, state, queue, memory);
}

int64_t bias_gradient_items(const BackwardParams& p) { return BiasPlan(p).items(p); }
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

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
