// Passes over rows: delta, which the backward kernels read, and the gradient of the sinks.
#pragma once

#include "kernels/cuda/simt/tile.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

constexpr int kWarp = 32;
constexpr int kRowsPerBlock = kThreads / kWarp;

AE_INLINE int64_t row_count(const AttentionParams& p) {
  return (p.packed() ? 1 : p.problems) * p.heads * p.q_length;
}

// A warp for each row: delta = rowsum(dO * (O + what rounding took from O)) - d logsumexp.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<Accumulation<T>>)
    delta_kernel(const __grid_constant__ BackwardParams p, int64_t first_block) {
  using A = Accumulation<T>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t row = (first_block + blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= row_count(p)) return;  // whole warps leave
  const int64_t i = row % p.q_length, h = row / p.q_length % p.heads,
                b = row / (p.q_length * p.heads);
  A sum{0};
  if (p.grad_output.defined()) {
    for (int64_t e = lane; e < p.v_size; e += kWarp) {
      A out = widen(*p.output.at<const T>(b, h, i, e));
      if (p.output_residual.defined()) out += widen(*p.output_residual.at<const T>(b, h, i, e));
      sum = std::fma(widen(*p.grad_output.at<const T>(b, h, i, e)), out, sum);
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, step);
  }
  if (lane != 0) return;
  if (p.grad_logsumexp.defined()) sum -= *p.grad_logsumexp.at<const A>(b, h, i, 0);
  *p.delta.at<A>(b, h, i, 0) = sum;
}

// A block for each head: d sink = - sum over rows of exp(sink - lse) delta.
template <class A>
__global__ void __launch_bounds__(kThreads, kBlocks<A>)
    sink_kernel(const __grid_constant__ BackwardParams p, int64_t first_block) {
  AE_DYNAMIC_SHARED(memory);
  A* const sums = reinterpret_cast<A*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t h = first_block + blockIdx.x, rows = p.heads > 0 ? row_count(p) / p.heads : 0;
  const A sink = static_cast<const A*>(p.sinks)[h];
  A sum{0};
  for (int64_t row = thread; row < rows && sink != -kInfinity<A>; row += kThreads) {
    const int64_t i = row % p.q_length, b = row / p.q_length;
    const A lse = *p.logsumexp.at<const A>(b, h, i, 0);
    const A residual = *p.residual.at<const A>(b, h, i, 0);
    A delta = *p.delta.at<const A>(b, h, i, 0);
    // A dead row's output takes part in nothing, whatever arrives for it.
    if (!is_finite(delta) && lse == sink && residual == A{0}) {
      delta = p.grad_logsumexp.defined() ? -*p.grad_logsumexp.at<const A>(b, h, i, 0) : A{0};
    }
    const A weight = std::exp((sink - lse) - residual);
    // A sink of NaN or inf makes every row that sees a key NaN; a finite delta is a dead row's,
    // whose logsumexp is the sink itself.
    sum -= is_finite(sink) || !is_finite(delta) ? weight * delta : delta;
  }
  sums[thread] = sum;
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (thread < step) sums[thread] += sums[thread + step];
  }
  if (thread == 0) static_cast<A*>(p.grad_sinks)[h] = sums[0];
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
