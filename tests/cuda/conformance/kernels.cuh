// One tiny kernel for each wrapper of kernels/cuda/ptx.cuh, from numbers to numbers, so that the
// emulations can be held against a device: record.cu writes what a device answers, the tests hold
// the interpreter and the SIMT shim against each other and against what has been recorded.
#pragma once

#include "kernels/cuda/ptx.cuh"

namespace conformance {

using attention_ext::kernels::ScalarType;
namespace ptx = attention_ext::kernels::cuda::ptx;

constexpr int kLanes = 32;

// Lane l copies 16 bytes; every third lane takes nothing, and finds zeros.
__global__ void copy_async(const uint8_t* in, uint8_t* out) {
  AE_DYNAMIC_SHARED(memory);
  const int lane = static_cast<int>(threadIdx.x);
  ptx::copy_async(memory + 16 * lane, in + 16 * lane, lane % 3 != 0);
  ptx::commit_copies();
  ptx::wait_copies<0>();
  __syncthreads();
  for (int b = 0; b < 16; ++b) out[16 * lane + b] = memory[16 * (lane ^ 1) + b];
}

// Two groups; the first is used while the second may be under way.
__global__ void copy_groups(const uint8_t* in, uint8_t* out) {
  AE_DYNAMIC_SHARED(memory);
  const int lane = static_cast<int>(threadIdx.x);
  for (int group = 0; group < 2; ++group) {
    const int at = 512 * group + 16 * lane;
    ptx::copy_async(memory + at, in + at, true);
    ptx::commit_copies();
  }
  ptx::wait_copies<1>();
  __syncthreads();
  for (int b = 0; b < 16; ++b) out[16 * lane + b] = memory[16 * (31 - lane) + b];
  ptx::wait_copies<0>();
  __syncthreads();
  for (int b = 0; b < 16; ++b) out[512 + 16 * lane + b] = memory[512 + 16 * (31 - lane) + b];
}

template <bool kTransposed>
AE_DEVICE void load(const uint8_t* in, uint8_t* out) {
  AE_DYNAMIC_SHARED(memory);
  const int lane = static_cast<int>(threadIdx.x);
  for (int b = 0; b < 16; ++b) memory[16 * lane + b] = in[16 * lane + b];
  __syncthreads();
  uint32_t to[4];
  const unsigned char* const row = memory + 16 * (lane ^ 5);
  if constexpr (kTransposed) {
    ptx::load_matrices_transposed(to, row);
  } else {
    ptx::load_matrices(to, row);
  }
  for (int q = 0; q < 4; ++q) reinterpret_cast<uint32_t*>(out)[4 * lane + q] = to[q];
}
__global__ void load_matrices(const uint8_t* in, uint8_t* out) { load<false>(in, out); }
__global__ void load_matrices_transposed(const uint8_t* in, uint8_t* out) { load<true>(in, out); }

// In: 6 words of A and B, 4 floats of C for each lane.
template <ScalarType kType>
AE_DEVICE void product(const uint8_t* in, uint8_t* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(in) + 6 * lane;
  const float* const sums = reinterpret_cast<const float*>(in) + 6 * kLanes + 4 * lane;
  const uint32_t a[4] = {words[0], words[1], words[2], words[3]};
  float c[4] = {sums[0], sums[1], sums[2], sums[3]};
  ptx::multiply<kType>(c, a, words[4], words[5]);
  for (int q = 0; q < 4; ++q) reinterpret_cast<float*>(out)[4 * lane + q] = c[q];
}
__global__ void multiply_float16(const uint8_t* in, uint8_t* out) {
  product<ScalarType::kFloat16>(in, out);
}
__global__ void multiply_bfloat16(const uint8_t* in, uint8_t* out) {
  product<ScalarType::kBFloat16>(in, out);
}

__global__ void exp2_approx(const uint8_t* in, uint8_t* out) {
  for (int n = static_cast<int>(threadIdx.x); n < 256; n += kLanes) {
    reinterpret_cast<float*>(out)[n] = ptx::exp2_approx(reinterpret_cast<const float*>(in)[n]);
  }
}

__global__ void reciprocal_approx(const uint8_t* in, uint8_t* out) {
  for (int n = static_cast<int>(threadIdx.x); n < 256; n += kLanes) {
    const float x = reinterpret_cast<const float*>(in)[n];
    reinterpret_cast<float*>(out)[n] = ptx::reciprocal_approx(x);
  }
}

template <ScalarType kType>
AE_DEVICE void pack_pairs(const uint8_t* in, uint8_t* out) {
  for (int n = static_cast<int>(threadIdx.x); n < 256; n += kLanes) {
    const float* const x = reinterpret_cast<const float*>(in) + 2 * n;
    reinterpret_cast<uint32_t*>(out)[n] = ptx::pack<kType>(x[0], x[1]);
  }
}
__global__ void pack_float16(const uint8_t* in, uint8_t* out) {
  pack_pairs<ScalarType::kFloat16>(in, out);
}
__global__ void pack_bfloat16(const uint8_t* in, uint8_t* out) {
  pack_pairs<ScalarType::kBFloat16>(in, out);
}

template <ScalarType kType>
AE_DEVICE void unpack_all(const uint8_t* in, uint8_t* out) {
  for (int n = static_cast<int>(threadIdx.x); n < 65536; n += kLanes) {
    const uint16_t bits = reinterpret_cast<const uint16_t*>(in)[n];
    reinterpret_cast<float*>(out)[n] = ptx::unpack<kType>(bits);
  }
}
__global__ void unpack_float16(const uint8_t* in, uint8_t* out) {
  unpack_all<ScalarType::kFloat16>(in, out);
}
__global__ void unpack_bfloat16(const uint8_t* in, uint8_t* out) {
  unpack_all<ScalarType::kBFloat16>(in, out);
}

// Words: a shuffle, a vote of all lanes' bit 0, and whether any lane's bits 0 to 4 are all set.
__global__ void warp_votes(const uint8_t* in, uint8_t* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const uint32_t word = reinterpret_cast<const uint32_t*>(in)[lane];
  uint32_t* const to = reinterpret_cast<uint32_t*>(out) + 3 * lane;
  to[0] = ptx::shuffle(word, static_cast<int>(word >> 8) & 31);
  to[1] = ptx::ballot((word & 1) != 0);
  to[2] = ptx::any((word & 31) == 31) ? 1 : 0;
}

// ---- The table -------------------------------------------------------------------------------

enum class Input { kBytes, kHalves, kBFloats, kExponents, kFloats, kAllHalves };

struct Entry {
  const char* name;
  void (*kernel)(const uint8_t*, uint8_t*);
  Input input;
  int in_bytes, out_bytes, shared_bytes;
};
constexpr Entry kEntries[] = {
    {"copy_async", copy_async, Input::kBytes, 512, 512, 512},
    {"copy_groups", copy_groups, Input::kBytes, 1024, 1024, 1024},
    {"load_matrices", load_matrices, Input::kBytes, 512, 512, 512},
    {"load_matrices_transposed", load_matrices_transposed, Input::kBytes, 512, 512, 512},
    {"multiply_float16", multiply_float16, Input::kHalves, 1280, 512, 0},
    {"multiply_bfloat16", multiply_bfloat16, Input::kBFloats, 1280, 512, 0},
    {"exp2_approx", exp2_approx, Input::kExponents, 1024, 1024, 0},
    {"reciprocal_approx", reciprocal_approx, Input::kFloats, 1024, 1024, 0},
    {"pack_float16", pack_float16, Input::kFloats, 2048, 1024, 0},
    {"pack_bfloat16", pack_bfloat16, Input::kFloats, 2048, 1024, 0},
    {"unpack_float16", unpack_float16, Input::kAllHalves, 131072, 262144, 0},
    {"unpack_bfloat16", unpack_bfloat16, Input::kAllHalves, 131072, 262144, 0},
    {"warp_votes", warp_votes, Input::kBytes, 128, 384, 0},
};
constexpr int kEntryCount = sizeof kEntries / sizeof kEntries[0];

}  // namespace conformance
