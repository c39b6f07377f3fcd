// Memory as the threads of a block see it, every access checked: see machine.h.
#include <cstring>

#include "machine.h"

namespace ptx {

thread_local Writers* writers = nullptr;

uint8_t* Block::shared(uint32_t warp, uint64_t address, uint32_t size, bool writes,
                       const Instruction& i) {
  if (address < kSharedBase || address + size > kSharedBase + shared_.size()) {
    fail(i, "shared memory access out of bounds");
  }
  if (address % size != 0) fail(i, "misaligned shared memory access");
  const uint64_t at = address - kSharedBase;
  for (uint64_t byte = at; byte < at + size; ++byte) {
    Shadow& s = shadow_[byte];
    if (s.pending != 0) {
      fail(i, "shared memory is used while an asynchronous copy into it has not been waited for");
    }
    if (s.write_epoch == epoch_ && s.writer != warp) {
      fail(i, "race in shared memory: written by warp " + std::to_string(s.writer) +
                  " and used by warp " + std::to_string(warp) + " without a barrier between");
    }
    if (writes) {
      if (s.read_epoch == epoch_ && (s.readers & ~(1u << warp)) != 0) {
        fail(i, "race in shared memory: read by another warp and written by warp " +
                    std::to_string(warp) + " without a barrier between");
      }
      s.write_epoch = epoch_;
      s.writer = static_cast<uint16_t>(warp);
    } else {
      if (s.read_epoch != epoch_) s.readers = 0;
      s.read_epoch = epoch_;
      s.readers |= 1u << warp;
    }
  }
  return shared_.data() + at;
}

void Block::mark_pending(uint64_t address, uint32_t size, int change) {
  for (uint64_t byte = address - kSharedBase; byte < address - kSharedBase + size; ++byte) {
    shadow_[byte].pending = static_cast<uint16_t>(shadow_[byte].pending + change);
  }
}

uint8_t* Block::global(uint64_t address, uint32_t size, bool writes, const Instruction& i) {
  if (address % size != 0) fail(i, "misaligned global memory access");
  for (size_t r = 0; r < launch_.ranges.size(); ++r) {
    const Range& range = launch_.ranges[r];
    if (address < range.begin || address + size > range.end) continue;
    if (writes && !range.writable) fail(i, "write into an input");
    if (range.writable) {
      for (uint64_t pair = (address - range.begin) / 2;
           pair <= (address - range.begin + size - 1) / 2; ++pair) {
        uint32_t& writer = writers->of_range[r][pair];
        if (writer != 0 && writer != index_ + 1) {
          fail(i, "race between blocks " + std::to_string(writer - 1) + " and " +
                      std::to_string(index_));
        }
        if (writes) writer = index_ + 1;
      }
    }
    return reinterpret_cast<uint8_t*>(address);
  }
  fail(i, "global memory access out of bounds");
}

uint8_t* Block::memory(uint32_t t, Space space, uint64_t address, uint32_t size, bool writes,
                       const Instruction& i) {
  Thread& thread = threads_[t];
  auto inside = [&](std::vector<uint8_t>& bytes, uint64_t at) {
    if (at + size > bytes.size()) fail(i, "access out of bounds of parameters or local memory");
    return bytes.data() + at;
  };
  const uint64_t window = address & kWindowMask;
  switch (space) {
    case Space::kGlobal:
      return global(address, size, writes, i);
    case Space::kShared:
      return shared(t / 32, address, size, writes, i);
    case Space::kLocal:
      return inside(thread.stack.back().local, address & ~kWindowMask);
    case Space::kParam:
      if (window == kOutgoingWindow)
        return inside(thread.stack.back().outgoing, address & ~kWindowMask);
      return inside(thread.stack.back().params, address & ~kWindowMask);
    case Space::kGeneric:
      break;
  }
  if (window == kSharedWindow) return shared(t / 32, address & ~kWindowMask, size, writes, i);
  // Parameters that a function got a pointer to belong to the entry.
  if (window == kParamWindow) return inside(thread.stack.front().params, address & ~kWindowMask);
  if (window == kLocalWindow) fail(i, "a generic pointer into local memory is not emulated");
  return global(address, size, writes, i);
}

void Block::finish_group(uint32_t t, const std::vector<Copy>& group, const Instruction& i) {
  for (const Copy& copy : group) {
    mark_pending(copy.to, 16, -1);
    uint8_t* const to = shared(t / 32, copy.to, 16, /*writes=*/true, i);
    if (copy.size == 0) {
      std::memset(to, 0, 16);
    } else {
      std::memcpy(to, global(copy.from, 16, /*writes=*/false, i), 16);
    }
  }
}

}  // namespace ptx
