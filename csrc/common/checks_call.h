// What the argument checks share: the call they measure against, and small predicates. For
// checks.cpp and checks_options.cpp only.
#pragma once

#include <sstream>

#include "common/checks.h"

namespace attention_ext::checks {

using Sizes = c10::SymIntArrayRef;

// A size that broadcasts: 1, or the full size. Decided without a guard where the size is 1 for
// certain.
inline bool fits(const c10::SymInt& size, const c10::SymInt& full) {
  return TORCH_GUARD_OR_FALSE(size.sym_eq(1)) || holds(size.sym_eq(full));
}

inline bool same(Sizes left, Sizes right) {
  if (left.size() != right.size()) return false;
  for (size_t d = 0; d < left.size(); ++d) {
    if (!holds(left[d].sym_eq(right[d]))) return false;
  }
  return true;
}

inline bool is_dense(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized();
}

inline std::string layout_of(const at::Tensor& tensor) {
  if (tensor.is_nested()) return "nested";
  if (tensor.is_quantized()) return "quantized";
  std::ostringstream text;
  text << tensor.layout();
  return text.str();
}

// What the arguments of one call are measured against.
struct Call {
  const char* op;
  const at::Tensor& query;
  Sizes batch;  // the query's leading dimensions
  c10::SymInt heads, queries, keys;
  at::ScalarType dtype, accumulation;
  at::Device device;
};

inline bool is_own_or_float(const Call& call, const at::Tensor& tensor) {
  return tensor.scalar_type() == call.dtype || tensor.scalar_type() == call.accumulation;
}
inline std::string own_or_float(const Call& call) {
  if (call.dtype == call.accumulation) return c10::str(call.dtype);
  return c10::str(call.dtype, " or ", call.accumulation);
}

inline c10::SymDimVector join(Sizes left, std::initializer_list<c10::SymInt> right) {
  c10::SymDimVector sizes(left.begin(), left.end());
  sizes.append(right.begin(), right.end());
  return sizes;
}

inline c10::SymDimVector scores_shape(const Call& call) {
  return join(call.batch, {call.heads, call.queries, call.keys});
}

// The checks of everything but query, key and value; returns the options normalised.
AttentionOptions check_options(const Call& call, const AttentionOptions& options);

}  // namespace attention_ext::checks
