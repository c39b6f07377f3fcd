// Stands in for the CUDA runtime as csrc/cuda uses it: a device whose memory is the host's, with
// the limits of an H200 or those in the environment.
#pragma once

#include <cstdlib>

enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxGridDimX,
};
using cudaError_t = int;

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
  const auto limit = [](const char* variable, int usual) {
    const char* const text = std::getenv(variable);
    return text != nullptr ? std::atoi(text) : usual;
  };
  switch (name) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = limit("STAND_IN_MAJOR", 9);
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = limit("STAND_IN_SHARED_MEMORY", 232448);
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = limit("STAND_IN_GRID", 2147483647);
      break;
  }
  return 0;
}
