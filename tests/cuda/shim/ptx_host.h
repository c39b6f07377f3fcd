// The wrappers of kernels/cuda/ptx.cuh as host C++, by the words of the PTX manual. Included by
// ptx.cuh only. Collectives compute for all lanes when the last one arrives; copies are as late as
// they may be: their bytes arrive when the thread waits for their group, so that a wait too weak
// leaves the NaN that shared memory starts with.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/half.h"
#include "simt.h"

#if defined(AE_SHIM_THREAD_SANITIZER)
extern "C" void __tsan_read_range(void* address, unsigned long size);
#define AE_UNSEEN __attribute__((no_sanitize("thread"), noinline))
#else
#define AE_UNSEEN __attribute__((noinline))
#endif

namespace attention_ext::kernels::cuda::ptx {

// ---- Copies ----------------------------------------------------------------------------------

struct PendingCopy {
  void* to;
  const void* from;
  bool take;
  uint32_t group;
};
struct ThreadCopies {
  static constexpr int kMost = 512;
  PendingCopy list[kMost];
  int count;
  uint32_t groups;  // committed so far
  unsigned block;
  const void* shared;
};
// The records of copies are the emulation's, not the kernel's: blocks take turns with them, which
// is no race of theirs. What arrives is.
AE_UNSEEN inline ThreadCopies& copies_of_thread() {
  static ThreadCopies all[1024];
  ThreadCopies& mine = all[simt::thread->thread.x];
  if (mine.block != simt::thread->block.x || mine.shared != simt::thread->shared) {
    if (mine.count != 0) simt::fail("a thread ended before its asynchronous copies");
    mine.block = simt::thread->block.x;
    mine.shared = simt::thread->shared;
    mine.groups = 0;
  }
  return mine;
}

AE_UNSEEN inline void note_copy(void* to, const void* from, bool take) {
  ThreadCopies& mine = copies_of_thread();
  if (mine.count == ThreadCopies::kMost) simt::fail("too many asynchronous copies at once");
  mine.list[mine.count++] = {to, from, take, mine.groups};
}
__attribute__((noinline)) inline void arrive(void* to, const void* from, bool take) {
  if (take) {
    std::memcpy(to, from, 16);
  } else {
    std::memset(to, 0, 16);
  }
}

inline void copy_async(void* to, const void* from, bool take) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) simt::fail("cp.async to a misaligned address");
  if (take && reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    simt::fail("cp.async from a misaligned address");
  }
  note_copy(to, from, take);
}
AE_UNSEEN inline void commit_copies() { ++copies_of_thread().groups; }
template <int kPending>
AE_UNSEEN inline void wait_copies() {
  ThreadCopies& mine = copies_of_thread();
  int left = 0;
  for (int n = 0; n < mine.count; ++n) {
    const PendingCopy copy = mine.list[n];
    if (copy.group + kPending >= mine.groups) {
      mine.list[left++] = copy;
    } else {
      arrive(copy.to, copy.from, copy.take);
    }
  }
  mine.count = left;
}

// ---- Warps -----------------------------------------------------------------------------------

template <class T>
struct Exchanged {
  T value;
  int lane;
  T result;
};
template <class T>
AE_UNSEEN inline void run_shuffle(void** lanes, int count) {
  if (count != 32) simt::fail("a shuffle in an incomplete warp");
  for (int l = 0; l < 32; ++l) {
    auto* const mine = static_cast<Exchanged<T>*>(lanes[l]);
    mine->result = static_cast<Exchanged<T>*>(lanes[mine->lane & 31])->value;
  }
}
template <class T>
inline T shuffle(T value, int lane) {
  Exchanged<T> mine{value, lane, value};
  simt::collective("shuffle", &mine, run_shuffle<T>, false);
  return mine.result;
}

struct Vote {
  bool value;
  uint32_t ballot;
};
AE_UNSEEN inline void run_vote(void** lanes, int count) {
  if (count != 32) simt::fail("a vote in an incomplete warp");
  uint32_t ballot = 0;
  for (int l = 0; l < 32; ++l) {
    ballot |= static_cast<uint32_t>(static_cast<Vote*>(lanes[l])->value) << l;
  }
  for (int l = 0; l < 32; ++l) static_cast<Vote*>(lanes[l])->ballot = ballot;
}
inline uint32_t ballot(bool value) {
  Vote mine{value, 0};
  simt::collective("vote", &mine, run_vote, false);
  return mine.ballot;
}
inline bool any(bool value) { return ballot(value) != 0; }

// ---- Matrices --------------------------------------------------------------------------------

struct MatrixLoad {
  const uint16_t* row;
  uint32_t* to;
};
template <bool kTransposed>
AE_UNSEEN inline void run_load(void** lanes, int count) {
  if (count != 32) simt::fail("ldmatrix in an incomplete warp");
  const uint16_t* rows[32];
  for (int l = 0; l < 32; ++l) rows[l] = static_cast<MatrixLoad*>(lanes[l])->row;
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, c = l % 4 * 2;
    for (int q = 0; q < 4; ++q) {
      const uint16_t* const* const m = rows + 8 * q;
      const uint32_t low = kTransposed ? m[c][g] : m[g][c];
      const uint32_t high = kTransposed ? m[c + 1][g] : m[g][c + 1];
      static_cast<MatrixLoad*>(lanes[l])->to[q] = low | high << 16;
    }
  }
}
template <bool kTransposed>
inline void load_any_matrices(uint32_t (&to)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) simt::fail("ldmatrix of a misaligned row");
#if defined(AE_SHIM_THREAD_SANITIZER)
  __tsan_read_range(const_cast<void*>(row), 16);
#endif
  MatrixLoad mine{static_cast<const uint16_t*>(row), to};
  simt::collective(kTransposed ? "ldmatrix.trans" : "ldmatrix", &mine, run_load<kTransposed>,
                   false);
}
inline void load_matrices(uint32_t (&to)[4], const void* row) { load_any_matrices<false>(to, row); }
inline void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
  load_any_matrices<true>(to, row);
}

template <ScalarType kType>
inline float unpack(uint16_t bits) {
  return kType == ScalarType::kFloat16 ? float16_to_float(bits) : bfloat16_to_float(bits);
}
template <ScalarType kType>
inline uint32_t pack(float low, float high) {
  const uint32_t l =
      kType == ScalarType::kFloat16 ? float16_from_float(low) : bfloat16_from_float(low);
  const uint32_t h =
      kType == ScalarType::kFloat16 ? float16_from_float(high) : bfloat16_from_float(high);
  return l | h << 16;
}

struct Multiplication {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};
template <ScalarType kType>
AE_UNSEEN inline void run_multiply(void** lanes, int count) {
  if (count != 32) simt::fail("mma in an incomplete warp");
  float a[16][16], b[8][16];  // b[n][k]
  for (int l = 0; l < 32; ++l) {
    const auto* const lane = static_cast<Multiplication*>(lanes[l]);
    const int g = l / 4, t = l % 4 * 2;
    for (int q = 0; q < 4; ++q) {
      float* const to = &a[g + (q & 1) * 8][t + (q >> 1) * 8];
      to[0] = unpack<kType>(static_cast<uint16_t>(lane->a[q]));
      to[1] = unpack<kType>(static_cast<uint16_t>(lane->a[q] >> 16));
    }
    for (int q = 0; q < 2; ++q) {
      b[g][t + q * 8] = unpack<kType>(static_cast<uint16_t>(lane->b[q]));
      b[g][t + q * 8 + 1] = unpack<kType>(static_cast<uint16_t>(lane->b[q] >> 16));
    }
  }
  for (int l = 0; l < 32; ++l) {
    float* const c = static_cast<Multiplication*>(lanes[l])->c;
    for (int q = 0; q < 4; ++q) {
      const float* const left = a[l / 4 + q / 2 * 8];
      const float* const right = b[l % 4 * 2 + q % 2];
      double sum = c[q];  // products of 16-bit numbers are exact here, their sum nearly so
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(left[k]) * right[k];
      c[q] = static_cast<float>(sum);
    }
  }
}
template <ScalarType kType>
inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Multiplication mine{c, a, {b0, b1}};
  simt::collective("mma", &mine, run_multiply<kType>, false);
}

// ---- Numbers ---------------------------------------------------------------------------------

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? y * 0.0f : y;  // NaN stays
}
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline void keep_order() {}

}  // namespace attention_ext::kernels::cuda::ptx
