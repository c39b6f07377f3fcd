// Memory of one emulated block: the stacks of its fibers and its shared memory. Of simt.cpp.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

#if defined(AE_SHIM_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#endif

namespace simt {

constexpr std::size_t kRedZone = 64;

// Fresh pages. The thread sanitizer forgets what it knew of them when they are given back, which it
// would take for a write of free()'s.
class Pages {
 public:
  explicit Pages(std::size_t bytes) : bytes_((bytes + 4095) / 4096 * 4096) {
    memory_ = static_cast<char*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory_ == MAP_FAILED) std::abort();
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { munmap(memory_, bytes_); }
  char* get() const { return memory_; }
  std::size_t size() const { return bytes_; }

 private:
  std::size_t bytes_;
  char* memory_;
};

// Shared memory of its own for every block, full of NaN, with a red zone behind it.
class SharedMemory {
 public:
  explicit SharedMemory(std::size_t bytes) : bytes_(bytes), pages_(bytes + kRedZone) {
    std::memset(pages_.get(), 0xff, bytes);
#if defined(AE_SHIM_ADDRESS_SANITIZER)
    ASAN_POISON_MEMORY_REGION(pages_.get() + bytes, pages_.size() - bytes);
#endif
  }
  ~SharedMemory() {
#if defined(AE_SHIM_ADDRESS_SANITIZER)
    ASAN_UNPOISON_MEMORY_REGION(pages_.get() + bytes_, pages_.size() - bytes_);
#endif
  }
  unsigned char* get() const { return reinterpret_cast<unsigned char*>(pages_.get()); }

 private:
  std::size_t bytes_;
  Pages pages_;
};

}  // namespace simt
