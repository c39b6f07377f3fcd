// Attention forward for few queries and many keys on tensor cores (flash decoding): query tiles
// alone would leave most multiprocessors idle, so that several blocks share the keys of a tile.
// Each walks over its part of the keys (forward_tile.cuh) and leaves its sums in the workspace; a
// second kernel joins them, in the order of the parts. A query tile holds rows of all heads of a
// group, whose keys are loaded once for all of them.
//
// Every option is taken by the same instance: what such calls wait for is the keys.
#pragma once

#include "kernels/cuda/tensor/forward.cuh"

namespace attention_ext::kernels::cuda::tensor {

// What the kernels get: the plan (plan.h), and the workspace: sums of rows, [part][row][column],
// then their statistics, [part][row]. Rows are those of (batch, head, query).
struct SplitParams : AttentionParams {
  int splits = 1, row_tiles = 1;
  float* parts = nullptr;
};

// How a row stands after one part of its keys. Where it saw none, nothing else is written of it.
struct alignas(16) RowPart {
  float maximum, sum;  // of natural scores, and of exp(score - maximum)
  uint32_t seen, unused;
};

AE_INLINE int64_t row_count(const AttentionParams& p) { return p.problems * p.heads * p.q_length; }
AE_DEVICE float* part_sums(const SplitParams& p, int split, int64_t row) {
  return p.parts + (split * row_count(p) + row) * p.v_size;
}
AE_DEVICE RowPart* part_row(const SplitParams& p, int split, int64_t row) {
  RowPart* const all = reinterpret_cast<RowPart*>(p.parts + p.splits * row_count(p) * p.v_size);
  return all + split * row_count(p) + row;
}

// One row of one part by one warp, hidden pairs left out.
struct CarefulPart {
  float* sums;
  RowPart* statistics;

  AE_DEVICE void row(float maximum, float sum, bool seen) const {
    if ((threadIdx.x & 31) == 0) *statistics = {maximum, sum, seen ? 1u : 0u, 0};
  }
  AE_DEVICE void pair(int64_t e, float low, float high) const {
    sums[e] = low;
    sums[e + 1] = high;
  }
};
template <ScalarType kType>
__device__ __attribute__((noinline)) void careful_part(const SplitParams& p, const Head& head,
                                                       int split, int64_t row, int64_t begin,
                                                       int64_t end) {
  const int64_t h = row / p.q_length % p.heads, i = row % p.q_length;
  const KeyRange hull = window_hull(p, head.problem, i, i);
  careful_sums<kType>(p, head, h, i, {larger(hull.begin, begin), smaller(hull.end, end)},
                      CarefulPart{part_sums(p, split, row), part_row(p, split, row)});
}

// Blocks: (batch, key head) x query tiles x parts of the keys, the last fastest.
template <ScalarType kType, int kSize>
__global__ void __launch_bounds__(kThreads, 2)
    split_kernel(const __grid_constant__ SplitParams p, int64_t first_block) {
  using Shape = ForwardShape<kSize, /*kGeneral=*/true>;
  constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys;
  static_assert(kRows == kSplitTile && Shape::kSlices == 1);
  AE_DYNAMIC_SHARED(memory);
  Bits* const query = reinterpret_cast<Bits*>(memory);
  BlockState& state = *reinterpret_cast<BlockState*>(query + Shape::kTileRows * kSize);

  const int64_t block = first_block + blockIdx.x, pair = block / p.splits / p.row_tiles;
  const int split = static_cast<int>(block % p.splits);
  const int tile = static_cast<int>(block / p.splits % p.row_tiles);
  const int group = static_cast<int>(p.group());
  if (threadIdx.x == 0) {
    state.head = head_of(p, pair / p.kv_heads, pair % p.kv_heads * group);
  }
  __syncthreads();
  const Head& head = state.head;
  const int length = static_cast<int>(p.q_length);
  const GroupRows layout(tile * kRows, group * length, length, kRows);

  Fragments<1, kSize> output;
  clear<1, kSize>(output);
  RowState<1> rows;
  rows.start();
  Walk<true, kRows, kKeys, GroupRows> walk(p, head, layout.start, state.kinds, layout);
  walk.keep_part(split, p.splits);
  const int64_t begin = int64_t{walk.tile + 1} * kKeys, end = int64_t{walk.end} * kKeys;
  const bool met_mixed =
      attend<kType, Shape>(p, head, layout.start, layout, walk, query, output, rows);

  const int64_t first = (pair / p.kv_heads * p.heads + head.h) * p.q_length + layout.first;
  const int here = layout.count - layout.first;  // rows of this tile, or more
  if (met_mixed && is_spoilt<1, kSize>(output)) {
    for (int x = static_cast<int>(threadIdx.x) >> 5; x < kRows && x < here; x += kWarps) {
      careful_part<kType>(p, head, split, first + x, begin, end);
    }
    return;
  }
  const int row = 16 * (static_cast<int>(threadIdx.x) >> 5);  // of this warp
  const bool natural = natural_scores(p);
  const float scale = static_cast<float>(p.scale);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int x = row + fragment_row(0, 2 * half);
    const bool seen = rows.saw(0, half);
    const float maximum = natural ? rows.maximum[0][half] : rows.maximum[0][half] * scale;
    const float sum = quad_sum(rows.sum[0][half]);
    if (x >= here) continue;
    if ((threadIdx.x & 3) == 0) {
      *part_row(p, split, first + x) = {maximum, sum, seen ? 1u : 0u, 0};
    }
    if (!seen) continue;
    float* const to = part_sums(p, split, first + x);
#pragma unroll
    for (int e = 0; e < kSize / 8; ++e) {
      const int column = fragment_column(e, 0);
      if (column >= p.v_size) continue;
      to[column] = output[0][e][2 * half];
      to[column + 1] = output[0][e][2 * half + 1];
    }
  }
}

// A warp for 64 columns of a row, two in each lane. Blocks: rows x chunks of columns, a warp each.
constexpr int kJoinColumns = 64;

template <ScalarType kType>
__global__ void __launch_bounds__(kThreads)
    join_kernel(const __grid_constant__ SplitParams p, int64_t first_block) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t item = (first_block + blockIdx.x) * kWarps + (threadIdx.x >> 5);
  const int64_t chunks = blocks_of(p.v_size, kJoinColumns);
  if (item >= row_count(p) * chunks) return;  // whole warps leave
  const int64_t row = item / chunks, e = item % chunks * kJoinColumns + 2 * lane;
  const int64_t i = row % p.q_length, h = row / p.q_length % p.heads,
                b = row / (p.q_length * p.heads);
  auto part_of_lane = [&](int first) {
    return first + lane < p.splits ? *part_row(p, first + lane, row) : RowPart{0.0f, 0.0f, 0, 0};
  };
  float maximum = -kInfinity, sum = 0.0f;
  bool seen = false;
  for (int n = 0; n < p.splits; n += 32) {
    const RowPart part = part_of_lane(n);
    if (part.seen != 0) maximum = std::fmax(maximum, part.maximum);
    seen = seen || ptx::any(part.seen != 0);
  }
  maximum = warp_max(maximum);
  const float base = maximum == -kInfinity ? 0.0f : maximum;
  float low = 0.0f, high = 0.0f;
  for (int n = 0; n < p.splits; n += 32) {
    const RowPart part = part_of_lane(n);
    const float shrink = part.seen != 0 ? std::exp(part.maximum - base) : 0.0f;
    if (part.seen != 0) sum += part.sum * shrink;
    const uint32_t shown = ptx::ballot(part.seen != 0);
#pragma unroll 8
    for (int y = 0; y < 32; ++y) {
      const float weight = ptx::shuffle(shrink, y);
      if ((shown >> y & 1) == 0 || e >= p.v_size) continue;
      const float* const from = part_sums(p, n + y, row) + e;
      low += weight * from[0];
      high += weight * from[1];
    }
  }
  const float factor = finish_row(p, b, h, i, maximum, warp_sum(sum), seen, lane == 0 && e == 0);
  if (e >= p.v_size) return;
  OutputRow(p, b, h, i, factor, seen).write_pair<kType>(e, low, high);
}

template <ScalarType kType>
const char* launch_split_forward(const AttentionParams& params, void* workspace,
                                 const DeviceLimits& device, void* stream) {
  const SplitPlan plan(params);
  SplitParams p;
  static_cast<AttentionParams&>(p) = params;
  p.splits = static_cast<int>(plan.splits);
  p.row_tiles = static_cast<int>(plan.row_tiles);
  p.parts = static_cast<float*>(workspace);
  const char* const error = for_instance(p, [&]<int kSize, bool>() {
    return launch<SplitParams>(split_kernel<kType, kSize>, p, plan.blocks(params), kThreads,
                               ForwardShape<kSize, true>::kSharedMemory, device, stream);
  });
  if (error != nullptr) return error;
  const int64_t warps = row_count(p) * blocks_of(p.v_size, kJoinColumns);
  return launch<SplitParams>(join_kernel<kType>, p, blocks_of(warps, kWarps), kThreads, 0, device,
                             stream);
}

}  // namespace attention_ext::kernels::cuda::tensor
