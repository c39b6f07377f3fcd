// The gradient of a bias that broadcasts. A block owns a tile of the bias (plan.h) and adds dS over
// the (batch, head, row tile, key tile) that share it, in order, so that nothing of size B H L S
// exists; where tiles are few, several blocks form parts of the sum, and a second kernel adds these
// in order. S and dP are computed once more for it.
#pragma once

#include "kernels/cuda/simt/scores.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

struct OwnedTile {
  int64_t key_tile, row_tile, head, batch;  // of the bias
  AE_DEVICE OwnedTile(const BackwardParams& p, const BiasPlan& plan, int64_t index) {
    key_tile = index % plan.owned_keys;
    row_tile = index / plan.owned_keys % plan.owned_rows;
    head = index / (plan.owned_keys * plan.owned_rows) % p.bias_size[1];
    batch = index / (plan.owned_keys * plan.owned_rows * p.bias_size[1]);
  }
};

// Offset of the bias's batch slice k inside grad_bias, which is contiguous.
AE_DEVICE int64_t bias_slice(const BackwardParams& p, int64_t k) {
  return k * p.bias_size[1] * p.bias_size[2] * p.bias_size[3];
}

// The finished tile to grad_bias, summed to one row or one key where the bias has only one.
template <class A>
AE_DEVICE void write_bias_tile(const BackwardParams& p, const OwnedTile& owned,
                               const A (&sums)[kPer][kPer], Shared<A>& shared) {
  const bool one_row = p.bias_size[2] == 1, one_key = p.bias_size[3] == 1;
  const int64_t i0 = one_row ? 0 : owned.row_tile * kTile;
  const int64_t j0 = one_key ? 0 : owned.key_tile * kTile;
  int rows = static_cast<int>(smaller(kTile, p.q_length - i0));
  int keys = static_cast<int>(smaller(kTile, p.k_length - j0));
  __syncthreads();
  store_pairs(sums, shared);
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (one_row) {
    if (thread < keys) {
      A total{0};
      for (int row = 0; row < rows; ++row) total += shared.pairs[row][thread];
      shared.pairs[0][thread] = total;
    }
    rows = 1;
    __syncthreads();
  }
  if (one_key) {
    if (thread < rows) {
      A total{0};
      for (int key = 0; key < keys; ++key) total += shared.pairs[thread][key];
      shared.pairs[thread][0] = total;
    }
    keys = 1;
    __syncthreads();
  }
  const int64_t base = bias_slice(p, owned.batch) + owned.head * p.grad_bias.stride[1];
  for (int k = thread; k < rows * keys; k += kThreads) {
    const int row = k / keys, key = k % keys;
    reinterpret_cast<A*>(p.grad_bias.data)[base + (i0 + row) * p.grad_bias.stride[2] +
                                           (j0 + key) * p.grad_bias.stride[3]] =
        shared.pairs[row][key];
  }
}

// What a kernel of the bias gradient gets: `parts` is the workspace, [split][owned tile][pair of a
// thread][thread], unused with one split.
struct BiasGradientParams : BackwardParams {
  void* parts = nullptr;
};

template <class A>
AE_DEVICE A* bias_part(const BiasGradientParams& p, const BiasPlan& plan, int64_t split,
                       int64_t owned) {
  return static_cast<A*>(p.parts) + (split * plan.owned + owned) * (kTile * kTile) + threadIdx.x;
}

// Blocks: owned tiles x splits, the split fastest.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<Accumulation<T>>)
    bias_gradient_kernel(const __grid_constant__ BiasGradientParams p, int64_t first_block) {
  using A = Accumulation<T>;
  AE_DYNAMIC_SHARED(memory);
  Shared<A>& shared = *reinterpret_cast<Shared<A>*>(memory);
  const BiasPlan plan(p, kTile);
  const int64_t block = first_block + blockIdx.x, split = block % plan.splits;
  const OwnedTile owned(p, plan, block / plan.splits);
  const int64_t size = blocks_of(plan.terms, plan.splits);
  const int64_t end = smaller(plan.terms, (split + 1) * size);
  const int64_t heads = p.bias_size[1] == 1 ? p.heads : 1;
  const int64_t row_tiles = p.bias_size[2] == 1 ? plan.row_tiles : 1;
  const int64_t key_tiles = p.bias_size[3] == 1 ? plan.key_tiles : 1;

  A sums[kPer][kPer] = {};
  for (int64_t term = split * size; term < end; ++term) {
    const int64_t y = term % key_tiles, x = term / key_tiles % row_tiles;
    const int64_t h = heads > 1 ? term / (key_tiles * row_tiles) % heads : owned.head;
    int64_t b = term / (key_tiles * row_tiles * heads);
    if (BiasPlan::of_one_batch(p)) {
      b = owned.batch;
    } else if (p.grad_bias.offset(b, 0, 0, 0) != bias_slice(p, owned.batch)) {
      continue;  // several batch dimensions may broadcast one by one
    }
    __syncthreads();  // the last tile's readers are done with the problem
    const Problem& problem = share_problem(p.problem(b), shared);
    const TileAt at(problem, (p.bias_size[2] == 1 ? x : owned.row_tile) * kTile,
                    (p.bias_size[3] == 1 ? y : owned.key_tile) * kTile);
    const uint32_t visible = visible_pairs<A>(p, problem, h, at);
    if (__syncthreads_or(visible != 0) == 0) continue;
    GradientPairs<A> pairs;
    gradient_pairs<T>(p, problem, h, at, visible, /*want_scores=*/true, shared, pairs);
#pragma unroll
    for (int r = 0; r < kPer; ++r) {
#pragma unroll
      for (int n = 0; n < kPer; ++n) sums[r][n] += pairs.scores[r][n];
    }
  }
  if (plan.splits == 1) {
    write_bias_tile(p, owned, sums, shared);
    return;
  }
  A* const part = bias_part<A>(p, plan, split, block / plan.splits);
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
#pragma unroll
    for (int n = 0; n < kPer; ++n) part[(r * kPer + n) * kThreads] = sums[r][n];
  }
}

// Blocks: owned tiles.
template <class A>
__global__ void __launch_bounds__(kThreads, kBlocks<A>)
    bias_join_kernel(const __grid_constant__ BiasGradientParams p, int64_t first_block) {
  AE_DYNAMIC_SHARED(memory);
  Shared<A>& shared = *reinterpret_cast<Shared<A>*>(memory);
  const BiasPlan plan(p, kTile);
  const int64_t block = first_block + blockIdx.x;
  A sums[kPer][kPer] = {};
  for (int64_t split = 0; split < plan.splits; ++split) {
    const A* const part = bias_part<A>(p, plan, split, block);
#pragma unroll
    for (int r = 0; r < kPer; ++r) {
#pragma unroll
      for (int n = 0; n < kPer; ++n) sums[r][n] += part[(r * kPer + n) * kThreads];
    }
  }
  write_bias_tile(p, OwnedTile(p, plan, block), sums, shared);
}

template <class T>
const char* launch_bias_gradient(const BackwardParams& params, void* workspace,
                                 const DeviceLimits& device, void* stream) {
  using A = Accumulation<T>;
  BiasGradientParams p;
  static_cast<BackwardParams&>(p) = params;
  p.parts = workspace;
  const BiasPlan plan(p, kTile);
  const char* const error = launch(bias_gradient_kernel<T>, p, plan.owned * plan.splits, kThreads,
                                   sizeof(Shared<A>), device, stream);
  if (error != nullptr || plan.splits == 1) return error;
  return launch(bias_join_kernel<A>, p, plan.owned, kThreads, sizeof(Shared<A>), device, stream);
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
