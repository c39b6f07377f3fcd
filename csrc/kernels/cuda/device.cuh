// All that kernels use of CUDA itself: qualifiers, dynamic shared memory, and the launch of a grid
// of any size. The tests compile the same kernels as host C++ against a header that stands in for
// the CUDA runtime (tests/cuda/shim/simt.h, when AE_CUDA_SHIM is defined).
#pragma once

#if defined(AE_CUDA_SHIM)
#include "simt.h"
#if defined(AE_CUDA_PTX)
#include "host.h"
#endif
#else
#include <cuda_runtime.h>
#define AE_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

#include "kernels/cuda/launch.h"

#define AE_DEVICE __device__ __forceinline__

namespace attention_ext::kernels::cuda {

// A kernel takes its params by value and the index of the first block of its grid: a grid larger
// than the device allows runs in pieces.
template <class Params>
using Kernel = void (*)(Params, int64_t first_block);

// Shared memory a block may have without asking for more.
constexpr int64_t kDefaultSharedMemory = 48 * 1024;

template <class Params>
const char* launch(Kernel<Params> kernel, const Params& params, int64_t blocks, int threads,
                   int64_t shared_memory, const DeviceLimits& device, void* stream) {
  if (shared_memory > device.shared_memory) {
    return "a kernel needs more shared memory than a block of this device may have";
  }
#if !defined(AE_CUDA_SHIM)
  if (shared_memory > kDefaultSharedMemory) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(shared_memory));
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
#endif
  for (int64_t first = 0; first < blocks; first += device.grid_blocks) {
    const int64_t left = blocks - first;
    const auto grid = static_cast<unsigned>(left < device.grid_blocks ? left : device.grid_blocks);
#if defined(AE_CUDA_PTX)
    // The tests' interpreter runs what nvcc made of the kernel.
    const char* const error = ptx_host::launch(reinterpret_cast<const void*>(kernel), grid, threads,
                                               shared_memory, &params, sizeof params, first);
    if (error != nullptr) return error;
#elif defined(AE_CUDA_SHIM)
    simt::launch(grid, threads, shared_memory, [&] { kernel(params, first); });
#else
    void* arguments[] = {const_cast<Params*>(&params), &first};
    const cudaError_t error = cudaLaunchKernel(
        reinterpret_cast<const void*>(kernel), dim3(grid), dim3(static_cast<unsigned>(threads)),
        arguments, static_cast<size_t>(shared_memory), static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) {
      cudaGetLastError();  // reported here, not again by the next call
      return cudaGetErrorString(error);
    }
#endif
  }
  (void)stream;
  return nullptr;
}

}  // namespace attention_ext::kernels::cuda
