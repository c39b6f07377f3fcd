// Allocation rules shared by the CPU ops, and an estimate of their work.
#pragma once

#include <ATen/ops/empty.h>

#include "common/make_params.h"

namespace attention_ext::cpu {

// (..., heads, rows, size), in memory (..., rows, heads, size), so that merging the heads is a
// view. `like` gives the leading dimensions.
inline at::Tensor empty_heads(const at::Tensor& like, int64_t heads, int64_t rows, int64_t size) {
  c10::SmallVector<int64_t, 6> sizes(like.sizes().begin(), like.sizes().end() - 3);
  sizes.insert(sizes.end(), {rows, heads, size});
  return at::empty(sizes, like.options()).transpose(-3, -2);
}

// Floating-point operations of `products` matrix products over all pairs.
inline double work_of(const kernels::AttentionParams& p, const CallShape& s, int products) {
  const double pairs = static_cast<double>(p.problems) * static_cast<double>(s.heads) *
                       static_cast<double>(p.q_length) * static_cast<double>(p.k_length);
  return pairs * products * static_cast<double>(s.qk_size + s.v_size + 16);
}

}  // namespace attention_ext::cpu
