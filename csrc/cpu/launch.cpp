#include "cpu/launch.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>

#include "kernels/cpu/dispatch.h"

namespace attention_ext::cpu {

const kernels::CpuKernels& active_kernels() {
  static const kernels::CpuKernels* const chosen = [] {
    const char* const forced = std::getenv("ATTENTION_EXT_CPU_CAPABILITY");
    const char* why = nullptr;
    const auto* kernels = kernels::select_kernels(forced, std::getenv("ATEN_CPU_CAPABILITY"), &why);
    TORCH_CHECK(kernels != nullptr, "attention_ext: ATTENTION_EXT_CPU_CAPABILITY=", forced,
                " cannot be used: ", why);
    return kernels;
  }();
  return *chosen;
}

namespace {

std::atomic<bool> forked{false};

const bool fork_handler_installed = [] {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  return true;
}();

}  // namespace

bool in_forked_child() { return forked.load(std::memory_order_relaxed); }

std::atomic<int64_t>& visited_block_pairs() {
  static std::atomic<int64_t> count{0};
  return count;
}

namespace {

// Block pairs computed since the last call of this function.
int64_t take_visited_block_pairs() { return visited_block_pairs().exchange(0); }

// Rows of a query block and keys of a key block for these lengths.
std::tuple<int64_t, int64_t> block_sizes(int64_t q_length, int64_t k_length) {
  return {kernels::query_block(q_length), kernels::key_block(k_length)};
}

std::string cpu_capability() { return active_kernels().name; }

// GFLOP/s of fused multiply-adds that the tier reaches on `threads` threads, for benchmarks.
double fma_peak(int64_t threads, bool double_precision) {
  TORCH_CHECK(threads > 0, "attention_ext::_fma_peak: threads must be positive, got ", threads);
  constexpr int64_t kRepeats = 2'000'000;
  std::atomic<int64_t> operations{0};
  const auto start = std::chrono::steady_clock::now();
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      operations += static_cast<int64_t>(active_kernels().fma_loop(double_precision, kRepeats));
    }
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return static_cast<double>(operations) / seconds.count() * 1e-9;
}

TORCH_LIBRARY_FRAGMENT(attention_ext, m) {
  m.def("_visited_block_pairs() -> int", take_visited_block_pairs);
  m.def("_block_sizes(int q_length, int k_length) -> (int, int)", block_sizes);
  m.def("_cpu_capability() -> str", cpu_capability);
  m.def("_fma_peak(int threads, bool double_precision) -> float", fma_peak);
}

}  // namespace
}  // namespace attention_ext::cpu
