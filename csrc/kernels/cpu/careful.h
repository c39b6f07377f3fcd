// Products of the backward pass that leave hidden pairs out of the sums, for factors that are not
// finite: 0 times those is not 0.
#pragma once

#include "kernels/cpu/tile.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// Where a gradient is summed: scratch, or the tensor itself.
template <class T>
struct Target {
  T* data;
  int64_t stride;
};

// C (+)= sum over visible pairs only, for factors that are not finite. rows x depth pairs,
// visibility of (row, k) by `sees`.
template <class T, class A, class Sees>
void careful_accumulate(A&& left, const Operand<T>& b, const Target<T>& c, int64_t width,
                        int64_t rows, int64_t depth, Sees&& sees) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < depth; ++k) {
      if (!sees(i, k)) continue;
      const Vec<T> factor = broadcast(left(i, k));
      for (int64_t e = 0; e < width; e += kLanes<T>) {
        T* const at = c.data + i * c.stride + e;
        store(at, fma(factor, load(b.data + k * b.stride + e), load(at)));
      }
    }
  }
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
