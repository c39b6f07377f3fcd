// One inline function per PTX instruction that the tensor-core kernels use; nothing above that.
// Compiled by nvcc each is that instruction; compiled as host C++ through the SIMT shim each is an
// emulation of what the PTX manual says of it (ISA 8.x, chapters 9.7.9 and 9.7.14).
#pragma once

#include "kernels/cuda/device.cuh"

#if defined(AE_CUDA_SHIM)
#include "ptx_host.h"
#else

namespace attention_ext::kernels::cuda::ptx {

AE_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// cp.async: 16 bytes from global to shared memory, or 16 zero bytes if not `take`; `from` is then
// not read. Both addresses are multiples of 16. The bytes are there after a wait for their group,
// for this thread; for others after a barrier too.
AE_DEVICE void copy_async(void* to, const void* from, bool take) {
  const int size = take ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)),
               "l"(from), "r"(size)
               : "memory");
}
// Ends the group of this thread's copies.
AE_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most kPending of this thread's newest groups are under way.
template <int kPending>
AE_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// ldmatrix: four 8x8 matrices of 16-bit numbers. Lane 8 q + r gives the address of row r of matrix
// q; lane 4 r + c receives columns 2 c and 2 c + 1 of row r of each matrix.
AE_DEVICE void load_matrices(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
// The same, each matrix transposed on the way.
AE_DEVICE void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// mma: C (16x8, float32) += A (16x16, row-major fragments) B (16x8).
template <ScalarType kType>
AE_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(kType == ScalarType::kFloat16 || kType == ScalarType::kBFloat16);
  if constexpr (kType == ScalarType::kFloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// 2^x with a relative error of 2^-22; subnormal results become 0.
AE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x with a relative error of 2^-23.
AE_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// No instruction: loads behind it are not moved before it, which would keep their addresses and
// results in registers.
AE_DEVICE void keep_order() { asm volatile("" ::: "memory"); }

// Two numbers rounded to nearest even, `low` in the lower half.
template <ScalarType kType>
AE_DEVICE uint32_t pack(float low, float high) {
  uint32_t pair;
  if constexpr (kType == ScalarType::kFloat16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// One 16-bit number, from its bits.
template <ScalarType kType>
AE_DEVICE float unpack(uint16_t bits) {
  if constexpr (kType == ScalarType::kFloat16) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  } else {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  }
}

// Warp collectives; all 32 lanes take part.
template <class T>
AE_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
AE_DEVICE bool any(bool value) { return __any_sync(0xffffffffu, value) != 0; }
AE_DEVICE uint32_t ballot(bool value) { return __ballot_sync(0xffffffffu, value); }

}  // namespace attention_ext::kernels::cuda::ptx

#endif
