// For csrc/api: the C++ API's two halves, functions and module, over the typed operators.
#pragma once

#include "attention_ext/attention.h"
#include "ops/attention.h"

namespace attention_ext {

// The C++ API says "not given" by an undefined tensor, the operators by nullopt.
inline std::optional<at::Tensor> given(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace attention_ext
