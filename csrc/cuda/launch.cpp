#include "cuda/launch.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime.h>
#include <torch/library.h>

#include <array>
#include <mutex>

namespace attention_ext::cuda {

namespace {

// More than a machine holds; torch's own limit is the same.
constexpr size_t kDevices = 128;

int64_t attribute(cudaDeviceAttr name, c10::DeviceIndex device) {
  int value = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
  return value;
}

struct CachedLimits {
  std::once_flag once;
  kernels::cuda::DeviceLimits limits;
};

// Set by tests; kernels add to it.
std::mutex counter_mutex;
at::Tensor counter;

}  // namespace

const kernels::cuda::DeviceLimits& device_limits(c10::DeviceIndex device) {
  static std::array<CachedLimits, kDevices> cache;
  TORCH_INTERNAL_ASSERT(device >= 0 && static_cast<size_t>(device) < kDevices);
  CachedLimits& entry = cache[static_cast<size_t>(device)];
  // An exception leaves the flag unset: the next call asks again.
  std::call_once(entry.once, [&] {
    kernels::cuda::DeviceLimits limits;
    limits.major = static_cast<int>(attribute(cudaDevAttrComputeCapabilityMajor, device));
    limits.minor = static_cast<int>(attribute(cudaDevAttrComputeCapabilityMinor, device));
    limits.shared_memory = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    limits.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device);
    limits.grid_blocks = attribute(cudaDevAttrMaxGridDimX, device);
    entry.limits = limits;
  });
  return entry.limits;
}

Target::Target(const char* op, const at::Tensor& query)
    : op_(op),
      options_(query.options()),
      guard_(query.device()),
      stream_(c10::cuda::getCurrentCUDAStream(guard_.current_device().index())),
      limits_(device_limits(guard_.current_device().index())) {
  TORCH_CHECK(limits_.major >= 8, op_,
              ": the kernels need compute capability 8.0 (Ampere) or newer, and device ",
              static_cast<int>(guard_.current_device().index()), " has ", limits_.major, ".",
              limits_.minor);
}

at::Tensor Target::workspace(int64_t bytes) const {
  if (bytes == 0) return {};
  return at::empty({bytes}, options_.dtype(at::kByte));
}

std::atomic<int64_t>* Target::visited() const {
  const std::lock_guard lock(counter_mutex);
  if (!counter.defined() || counter.device() != options_.device()) return nullptr;
  return reinterpret_cast<std::atomic<int64_t>*>(counter.data_ptr<int64_t>());
}

void Target::check(const char* error) const {
  TORCH_CHECK(error == nullptr, op_, ": CUDA could not run the kernels: ", error);
}

namespace {

// Kernels of attention and its backward on this tensor's device add the tile pairs they compute to
// it from now on; None ends that.
void count_visited_tiles(const std::optional<at::Tensor>& into) {
  TORCH_CHECK(
      !into || (into->scalar_type() == at::kLong && into->numel() == 1 && into->is_contiguous()),
      "_count_visited_tiles: counter must be one int64, got ", into->scalar_type(), " of ",
      into->sizes());
  const std::lock_guard lock(counter_mutex);
  counter = into ? *into : at::Tensor();
}

TORCH_LIBRARY_FRAGMENT(attention_ext, m) {
  m.def("_count_visited_tiles(Tensor? counter) -> ()", count_visited_tiles);
}

}  // namespace
}  // namespace attention_ext::cuda
