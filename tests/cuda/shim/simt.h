// Stands in for the CUDA runtime, so that the kernels' own files compile as host C++ and run on the
// CPU: a fiber for every CUDA thread, blocks one after the other. What it checks, beyond what the
// sanitizers see: all threads of a block meet at the same barrier (same source line), none returns
// while others wait, all lanes of a warp meet at the same collective, nobody waits for ever.
//
// The scheduler (simt.cpp) is compiled without -fsanitize=thread, so that only accesses of kernels
// are looked at. Under that sanitizer barriers order the accesses of their threads, shuffles don't,
// and the blocks of a grid are not ordered at all.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

namespace simt {

struct Index {
  unsigned x, y, z;
};

// What the running CUDA thread sees.
struct Thread {
  Index thread, block, block_size, grid_size;
  unsigned char* shared;
};
extern const Thread* thread;

// Runs every block of a one-dimensional grid; returns when all are done.
void launch(unsigned blocks, int threads, std::size_t shared_bytes,
            const std::function<void()>& kernel);

// All threads of the block; the result is whether any of them said true.
bool barrier(const char* file, int line, bool value);

// All lanes of the warp meet; the last one calls run(lanes, count) on what every lane brought, then
// all go on. `run` must not be instrumented by a thread sanitizer. Lanes that bring different
// `what` (a string literal's text) are an error.
void collective(const char* what, void* mine, void (*run)(void** lanes, int count),
                bool orders_memory);

// Replaces the bytes of every lane's value by those of lane ^ mask.
void shuffle_xor(void* value, std::size_t size, int mask);

[[noreturn]] void fail(const char* message);

}  // namespace simt

#define threadIdx (simt::thread->thread)
#define blockIdx (simt::thread->block)
#define blockDim (simt::thread->block_size)
#define gridDim (simt::thread->grid_size)
#define AE_DYNAMIC_SHARED(name) unsigned char* const name = simt::thread->shared

#define __syncthreads() simt::barrier(__FILE__, __LINE__, false)
#define __syncthreads_or(value) (simt::barrier(__FILE__, __LINE__, (value) != 0) ? 1 : 0)

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (mask != 0xffffffffu) simt::fail("a shuffle of a part of a warp");
  simt::shuffle_xor(&value, sizeof value, lane_mask);
  return value;
}

template <class T>
inline T atomicAdd(T* to, T value) {
  static_assert(std::is_integral_v<T>, "no atomics on floats");
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
