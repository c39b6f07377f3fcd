// The table of one tier's kernels, and the choice among tiers. Every kernel takes work items from a
// queue until it is empty, in scratch of its own; whoever calls it brings the threads.
#pragma once

#include "kernels/cpu/plan.h"

namespace attention_ext::kernels {

// Shared state of one backward call. Counters order the sums of dQ; `sums` holds the
// accumulation-type dQ of heads in flight where the gradient itself cannot hold the sums.
struct BackwardState {
  int64_t heads_at_once = 1;              // whose ranges take turns: as many as there are threads
  std::atomic<int32_t>* added = nullptr;  // per query block of every head: ranges added so far
  std::atomic<int32_t>* bias_added = nullptr;  // bias_turns(): (batch, head) pairs added so far
  std::atomic<void*>* sums = nullptr;          // per (problem, head)
  std::atomic<int32_t>* remaining = nullptr;   // per (problem, head): ranges not finished
};

struct CpuKernels {
  const char* name;

  // Attention forward. Items: query blocks x splits; then, if there are splits, (problem, head)
  // pairs.
  int64_t (*forward_items)(const AttentionParams&);
  int64_t (*forward_scratch)(const AttentionParams&);  // bytes
  void (*forward)(const AttentionParams&, void* partials, WorkQueue&, void* scratch);
  void (*forward_join)(const AttentionParams&, void* partials, WorkQueue&, void* scratch);

  // dQ, dK, dV, and the bias gradient if bias_with_keys(). Items: (problem, key/value head, key
  // range), in this order.
  int64_t (*backward_items)(const BackwardParams&);
  int64_t (*backward_scratch)(const BackwardParams&);
  void (*backward)(const BackwardParams&, BackwardState&, WorkQueue&, void* scratch);
  // The bias gradient, summed over the dimensions the bias broadcasts over. Items: tiles of the
  // bias.
  int64_t (*bias_gradient_items)(const BackwardParams&);
  int64_t (*bias_gradient_scratch)(const BackwardParams&);
  void (*bias_gradient)(const BackwardParams&, WorkQueue&, void* scratch);
  // Items: heads.
  void (*sink_gradient)(const BackwardParams&, WorkQueue&);

  // Attention weights. Items: (problem, head or 1, query block).
  int64_t (*weights_items)(const WeightsParams&);
  int64_t (*weights_scratch)(const WeightsParams&);
  void (*weights)(const WeightsParams&, WorkQueue&, void* scratch);

  // Multiply-adds per second of the tier, for benchmarks: runs `repeats` rounds and returns their
  // floating-point operations.
  double (*fma_loop)(bool double_precision, int64_t repeats);
};

}  // namespace attention_ext::kernels
