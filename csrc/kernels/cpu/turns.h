// Sums that several work items add to, one after the other, so that every bit is the same for any
// number of threads: a tile of the bias gradient, and the dQ of a query block.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif
#include <sched.h>

#include "kernels/cpu/kernels.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// A query block that a range meets, and the range's place among those that add to its dQ.
struct Visit {
  const Problem& problem;
  int64_t h, block, i0, nq;
  KeyRange hull;  // keys inside the window of one of its rows
  int64_t place, places;
};

template <class T>
struct Turns {
  const BackwardParams& p;
  const int64_t e_padded;  // elements of a row of dQ in a buffer
  BackwardState* state = nullptr;
  WorkQueue* queue = nullptr;

  AE_INLINE Turns(const BackwardParams& params, int64_t row) : p(params), e_padded(row) {}

  // False if another thread has failed, so that the turn may never come.
  bool wait_for(const std::atomic<int32_t>& turn, int64_t place) const {
    for (int spins = 0; turn.load(std::memory_order_acquire) < place;) {
      if (queue->failed.load(std::memory_order_relaxed)) return false;
      if (++spins < 2000) {
#if defined(__SSE2__)
        _mm_pause();
#endif
      } else {
        sched_yield();
      }
    }
    return true;
  }
  AE_INLINE static void pass_on(std::atomic<int32_t>& turn, int64_t place) {
    turn.store(static_cast<int32_t>(place + 1), std::memory_order_release);
  }

  // The bias gradient: batch elements and heads that share a tile of it add in their order.
  AE_INLINE std::atomic<int32_t>& of_bias(const Visit& at) const {
    const int64_t b_bias = p.bias_size[0] == 1 ? 0 : at.problem.index;
    const int64_t h_bias = p.bias_size[1] == 1 ? 0 : at.h;
    const int64_t blocks = blocks_of(at.problem.q_length, query_block(at.problem.q_length));
    const int64_t tile = (b_bias * p.bias_size[1] + h_bias) * blocks + at.block;
    return state->bias_added[tile * backward_ranges(p) + at.place];
  }
  AE_INLINE int64_t bias_place(const Visit& at) const {
    const int64_t before = p.bias_size[0] == 1 ? at.problem.index : 0;
    return p.bias_size[1] == 1 ? before * p.heads + at.h : before;
  }

  // dQ and delta: the ranges of a head add in their order.
  AE_INLINE std::atomic<int32_t>& of_ranges(const Visit& at) const {
    const Problem& problem = at.problem;
    int64_t before = 0;  // query blocks of the heads before
    if (p.packed()) {
      const int64_t* const starts = p.q_block_starts + problem.index;
      before = starts[0] * p.heads + at.h * (starts[1] - starts[0]);
    } else {
      before = (problem.index * p.heads + at.h) *
               blocks_of(problem.q_length, query_block(problem.q_length));
    }
    return state->added[before + at.block];
  }

  // dQ rows (L, e_padded) of one head in the accumulation type, made by whoever comes first.
  T* sums_of(const Problem& problem, int64_t h) const {
    std::atomic<void*>& slot = state->sums[problem.index * p.heads + h];
    void* found = slot.load(std::memory_order_acquire);
    if (found == nullptr) {
      T* const fresh = new T[problem.q_length * e_padded];
      if (slot.compare_exchange_strong(found, fresh)) return fresh;
      delete[] fresh;
    }
    return static_cast<T*>(found);
  }

  void release_sums(const Problem& problem, int64_t g) const {
    if (state->sums == nullptr) return;
    std::atomic<int32_t>& left = state->remaining[problem.index * p.kv_heads + g];
    if (left.fetch_add(1) + 1 < backward_ranges(p)) return;
    for (int64_t h = g * p.group(); h < (g + 1) * p.group(); ++h) {
      delete[] static_cast<T*>(state->sums[problem.index * p.heads + h].exchange(nullptr));
    }
  }
};

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
