// The SIMT kernels of one element type, as launch.cpp calls them: each function plans its grid and
// enqueues it. One file of instances/ per pass and type defines them.
#pragma once

#include "kernels/cuda/launch.h"

namespace attention_ext::kernels::cuda::simt_kernels {

struct BFloat16;
struct Float16;

template <class T>
struct Simt {
  static const char* forward(const AttentionParams&, const DeviceLimits&, void* stream);
  static const char* delta(const BackwardParams&, const DeviceLimits&, void* stream);
  static const char* keys(const BackwardParams&, const DeviceLimits&, void* stream);
  static const char* queries(const BackwardParams&, const DeviceLimits&, void* stream);
  static const char* bias(const BackwardParams&, void* workspace, const DeviceLimits&,
                          void* stream);
  static const char* sinks(const BackwardParams&, const DeviceLimits&, void* stream);
  static const char* weights(const WeightsParams&, const DeviceLimits&, void* stream);
};

// Bytes of shared memory of a block, sizeof(Shared) of tile.cuh (checked there). Two blocks of
// float's kernels fit on every multiprocessor with 100 KiB.
constexpr int64_t shared_bytes(int64_t accumulation_bytes) {
  return accumulation_bytes == 8 ? 79936 : 45120;
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
