// How the CPU glue runs a kernel: the chosen tier, threads, scratch.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include "kernels/cpu/kernels.h"

namespace attention_ext::cpu {

// The tier of this process; raises if ATTENTION_EXT_CPU_CAPABILITY names one that cannot run here.
const kernels::CpuKernels& active_kernels();

// Whether this process was forked off one that may have run parallel regions: the OpenMP pool
// stayed with the parent, and a parallel region would wait for it forever.
bool in_forked_child();

// (query block, key block) pairs computed by attention and its backward so far.
std::atomic<int64_t>& visited_block_pairs();

// Work below this many floating-point operations is not worth waking threads for (about 20 us on
// one core).
constexpr double kSerialWork = 1e6;

// Floating-point operations of `products` matrix products over all pairs.
inline double work_of(const kernels::AttentionParams& p, int products) {
  const double pairs = static_cast<double>(p.problems) * static_cast<double>(p.heads) *
                       static_cast<double>(p.q_length) * static_cast<double>(p.k_length);
  return pairs * products * static_cast<double>(p.qk_size + p.v_size + 16);
}

// Runs kernel(queue, scratch) on as many threads as there is work for, until all `items` are taken.
// Threads share one ordered queue, so it does not matter how many of them really arrive. An
// exception in one stops the others and comes out here.
template <class F>
void run_items(int64_t items, int64_t scratch_bytes, double work, F&& kernel) {
  if (items == 0) return;
  kernels::WorkQueue queue;
  queue.count = items;
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), items);
  queue.takers = threads;
  auto body = [&] {
    try {
      const at::DataPtr scratch =
          c10::GetCPUAllocator()->allocate(static_cast<size_t>(scratch_bytes));
      kernel(queue, scratch.get());
    } catch (...) {
      queue.failed = true;
      throw;
    }
  };
  if (threads == 1 || work < kSerialWork || at::in_parallel_region() || in_forked_child()) {
    return body();
  }
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { body(); });
}

}  // namespace attention_ext::cpu
