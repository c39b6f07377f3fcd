// Attention forward on tensor cores, float16 and bfloat16: a block for each query tile of each head
// walks over the key tiles (forward_tile.cuh), ends its rows and writes them.
#pragma once

#include "kernels/cuda/choose.h"
#include "kernels/cuda/simt/forward.cuh"
#include "kernels/cuda/tensor/entries.h"
#include "kernels/cuda/tensor/forward_tile.cuh"

namespace attention_ext::kernels::cuda::tensor {

// Writes logsumexp and its residual of row i, returns what normalises its output. Sequences are not
// packed here: i is the row of the tensors, too.
AE_DEVICE float finish_row(const AttentionParams& p, int64_t b, int64_t h, int64_t i, float maximum,
                           float sum, bool seen, bool writes) {
  const float sink = p.sinks != nullptr ? static_cast<const float*>(p.sinks)[h] : 0.0f;
  const simt_kernels::RowEnd<float> end(maximum, sum, seen, p.sinks != nullptr, sink,
                                        static_cast<float>(p.dropout.rescale));
  if (writes) {
    *p.logsumexp.at<float>(b, h, i, 0) = end.lse;
    *p.residual.at<float>(b, h, i, 0) = end.residual;
  }
  return end.factor;
}

// Where a row's output goes, two neighbouring numbers at a time, and what rounding took from them.
struct OutputRow {
  const AttentionParams& p;
  int64_t output, residual;  // offsets of the row
  float factor;              // what normalises it
  bool seen;                 // a dead row is 0, whatever its sums are

  AE_DEVICE OutputRow(const AttentionParams& params, int64_t b, int64_t h, int64_t i,
                      float normalizer, bool saw_a_key)
      : p(params),
        output(p.output.offset(b, h, i, 0)),
        residual(p.output_residual.defined() ? p.output_residual.offset(b, h, i, 0) : 0),
        factor(normalizer),
        seen(saw_a_key) {}

  template <ScalarType kType>
  AE_DEVICE void write_pair(int64_t column, float low, float high) const {
    low = seen ? low * factor : 0.0f;
    high = seen ? high * factor : 0.0f;
    const uint32_t pair = ptx::pack<kType>(low, high);
    *reinterpret_cast<uint32_t*>(reinterpret_cast<Bits*>(p.output.data) + output + column) = pair;
    if (p.output_residual.defined()) {
      const float rest_low = low - ptx::unpack<kType>(static_cast<Bits>(pair));
      const float rest_high = high - ptx::unpack<kType>(static_cast<Bits>(pair >> 16));
      *reinterpret_cast<uint32_t*>(reinterpret_cast<Bits*>(p.output_residual.data) + residual +
                                   column) = ptx::pack<kType>(rest_low, rest_high);
    }
  }
};

// Row i by one warp, hidden pairs left out.
template <ScalarType kType>
struct CarefulRow {
  const AttentionParams& p;
  int64_t b, h, i;
  float factor;
  bool seen;

  AE_DEVICE void row(float maximum, float sum, bool saw_a_key) {
    seen = saw_a_key;
    factor = finish_row(p, b, h, i, maximum, sum, seen, (threadIdx.x & 31) == 0);
  }
  AE_DEVICE void pair(int64_t e, float low, float high) const {
    OutputRow(p, b, h, i, factor, seen).write_pair<kType>(e, low, high);
  }
};
template <ScalarType kType>
__device__ __attribute__((noinline)) void careful_row(const AttentionParams& p, const Head& head,
                                                      int64_t i) {
  careful_sums<kType>(p, head, head.h, i, window_hull(p, head.problem, i, i),
                      CarefulRow<kType>{p, head.problem.batch, head.h, i, 0.0f, false});
}

template <ScalarType kType, int kSize, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ AttentionParams p, int64_t first_block) {
  using Shape = ForwardShape<kSize, kGeneral>;
  constexpr int kSlices = Shape::kSlices, kRows = Shape::kRows;
  AE_DYNAMIC_SHARED(memory);
  Bits* const query = reinterpret_cast<Bits*>(memory);
  BlockState& state = *reinterpret_cast<BlockState*>(query + Shape::kTileRows * kSize);

  const int64_t block = first_block + blockIdx.x;
  const int64_t row_tiles = (p.q_length + kRows - 1) / kRows;
  // Long rows of a causal mask first, so that the last blocks are short ones.
  const int64_t i0 = (row_tiles - 1 - block % row_tiles) * kRows;
  if (threadIdx.x == 0) {
    state.head = head_of(p, block / row_tiles / p.heads, block / row_tiles % p.heads);
  }
  __syncthreads();
  const Head& head = state.head;
  const Problem& problem = head.problem;
  if (i0 >= problem.q_length) return;

  Fragments<kSlices, kSize> output;
  clear<kSlices, kSize>(output);
  RowState<kSlices> rows;
  rows.start();
  const HeadRows layout;
  Walk<true, kRows, Shape::kKeys> walk(p, head, i0, state.kinds);
  const bool met_mixed = attend<kType, Shape>(p, head, i0, layout, walk, query, output, rows);
  if (met_mixed && is_spoilt<kSlices, kSize>(output)) {
    for (int x = static_cast<int>(threadIdx.x) >> 5; x < kRows; x += kWarps) {
      if (i0 + x < problem.q_length) careful_row<kType>(p, head, i0 + x);
    }
    return;
  }
  const int row = 16 * kSlices * (static_cast<int>(threadIdx.x) >> 5);  // of this warp
  const bool natural = kGeneral && natural_scores(p);
  const float scale = static_cast<float>(p.scale);
#pragma unroll
  for (int m = 0; m < kSlices; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = i0 + row + fragment_row(m, 2 * half);
      const bool inside = i < problem.q_length, seen = rows.saw(m, half);
      const float maximum = natural ? rows.maximum[m][half] : rows.maximum[m][half] * scale;
      const float factor =
          finish_row(p, problem.batch, head.h, i, maximum, quad_sum(rows.sum[m][half]), seen,
                     inside && (threadIdx.x & 3) == 0);
      if (!inside) continue;
      const OutputRow to(p, problem.batch, head.h, i, factor, seen);
#pragma unroll
      for (int e = 0; e < kSize / 8; ++e) {
        const int column = fragment_column(e, 0);
        if (column >= p.v_size) continue;
        to.template write_pair<kType>(column, output[m][e][2 * half], output[m][e][2 * half + 1]);
      }
    }
  }
}

template <ScalarType kType>
const char* launch_forward(const AttentionParams& p, const DeviceLimits& device, void* stream) {
  return for_instance(p, [&]<int kSize, bool kGeneral>() {
    using Shape = ForwardShape<kSize, kGeneral>;
    const int64_t blocks = p.problems * p.heads * blocks_of(p.q_length, Shape::kRows);
    return launch<AttentionParams>(forward_kernel<kType, kSize, kGeneral>, p, blocks, kThreads,
                                   Shape::kSharedMemory, device, stream);
  });
}

}  // namespace attention_ext::kernels::cuda::tensor
