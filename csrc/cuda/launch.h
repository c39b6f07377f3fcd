// Where a call's kernels go: the device of its tensors, made current, torch's current stream there,
// the device's limits; and errors of launches as exceptions. c10/cuda and the runtime's attributes
// only: ATen/cuda/CUDAContext.h would need headers of libraries that we do not use.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>

#include "kernels/cuda/launch.h"

namespace attention_ext::cuda {

// Asked of the runtime once for each device.
const kernels::cuda::DeviceLimits& device_limits(c10::DeviceIndex device);

// Made before anything else of a call: allocations and small kernels of torch's go there, too.
class Target {
 public:
  Target(const char* op, const at::Tensor& query);

  const kernels::cuda::DeviceLimits& limits() const { return limits_; }
  void* stream() const { return stream_.stream(); }
  // Scratch on the device; its memory serves later work of this stream only, so that it may be
  // dropped as soon as the kernels are enqueued.
  at::Tensor workspace(int64_t bytes) const;
  // The counter of computed tile pairs that tests set, if it lies on this device; else null.
  std::atomic<int64_t>* visited() const;
  // Raises RuntimeError with what a function of kernels/cuda/launch.h returned.
  void check(const char* error) const;

 private:
  const char* op_;
  at::TensorOptions options_;
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
  const kernels::cuda::DeviceLimits& limits_;
};

// Of a tensor that may be undefined.
inline void* address(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr() : nullptr;
}

}  // namespace attention_ext::cuda
