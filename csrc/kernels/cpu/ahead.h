// Rows of memory that are soon to be read or written, asked for a few lines at a time while
// products run: they lie far apart, which the hardware does not foresee, and only 10 to 16 lines
// can be on their way to a processor at once.
#pragma once

#include "kernels/params.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// Whether reading some kilobytes in a row and then others elsewhere is slow unless they are asked
// for: the heads of short sequences, and keys and values in turn when decoding.
// Asked for against not, on Zen 3 in a virtual machine, one thread: heads of 32 keys (B1 H512 D64)
// take 0.65 of the time forward and 0.77 backward; decoding with 4,096 keys to eight query heads
// 0.7 (D128; two threads on an idle machine 0.92 to 0.97). On Emerald Rapids short heads took 1.01
// to 1.06 forward and the same backward; decoding was not measured. Heads of several key blocks are
// asked for everywhere: with 128 keys 0.90 and 0.96 on Zen 3, the same on Emerald Rapids.
inline bool short_streams_are_slow() {
#if defined(__x86_64__)
  static const bool amd = __builtin_cpu_is("amd");
  return amd;
#else
  return false;
#endif
}

class Ahead {
 public:
  // Rows of some bytes, `stride` bytes apart. It is a hint: what finds no place is left out.
  AE_INLINE void add(const char* row, int64_t stride, int64_t rows, int64_t bytes, bool write) {
    if (rows <= 0 || bytes <= 0 || count_ == kAreas) return;
    if (stride == bytes) {
      bytes *= rows;
      rows = 1;
    }
    areas_[(first_ + count_++) % kAreas] = {row, stride, rows, bytes, write};
  }
  // Asks for the next lines; called between the tiles of a product.
  AE_INLINE void some() {
    if (count_ != 0) ask();
  }
  // What has not been asked for by now would come too late.
  AE_INLINE void forget() { count_ = at_ = 0; }

 private:
  struct Area {
    const char* row;
    int64_t stride, rows, bytes;
    bool write;
  };
  // 12 lines a tile: 1.5 to 3 % of the backward pass at S1024 D64 against all at once; 4 and 24
  // gain half of that.
  static constexpr int64_t kAreas = 16, kLine = 64, kLines = 12;

  __attribute__((noinline)) void ask() {
    for (int64_t n = 0; n < kLines && count_ != 0; ++n) {
      Area& area = areas_[first_];
      const char* const line = area.row + at_;
      area.write ? __builtin_prefetch(line, 1, 2) : __builtin_prefetch(line, 0, 2);
      at_ += kLine;
      if (at_ < area.bytes) continue;
      at_ = 0;
      area.row += area.stride;
      if (--area.rows != 0) continue;
      first_ = (first_ + 1) % kAreas;
      --count_;
    }
  }

  Area areas_[kAreas];
  int64_t first_ = 0, count_ = 0;
  int64_t at_ = 0;  // bytes of the first area's first row that have been asked for
};

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
