// Rows of memory that are soon to be read or written, asked for a few lines at a time while
// products run: they lie far apart, which the hardware does not foresee, and only 10 to 16 lines
// can be on their way to a processor at once.
#pragma once

#include "kernels/params.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

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
