// Stands in for torch's header of this name: the device is the CPU, or missing if the environment
// says so.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdlib>

namespace c10::cuda {

class CUDAGuard {
 public:
  explicit CUDAGuard(c10::Device) {
    TORCH_CHECK(std::getenv("STAND_IN_MISSING") == nullptr, "the CUDA stand-in has no device");
  }
  CUDAGuard(const CUDAGuard&) = delete;
  CUDAGuard& operator=(const CUDAGuard&) = delete;
  c10::Device current_device() const { return c10::Device(c10::kCPU, 0); }
};

}  // namespace c10::cuda
