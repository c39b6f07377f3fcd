// Every argument check of the op family, with its own sentence: the op, the argument, what was
// expected, what came. Called by each registered kernel (CPU, CUDA, Meta) and composite before it
// does anything else. The checks run on symbolic sizes as well, and read values only where that is
// free: on the CPU.
#pragma once

#include <c10/core/SymBool.h>
#include <c10/util/Exception.h>

#include "ops/attention.h"

namespace attention_ext {

inline bool holds(bool condition) { return condition; }
inline bool holds(const c10::SymBool& condition) {
  return condition.expect_true(__FILE__, __LINE__);
}

// RuntimeError "op: sentence". The sentence begins with the argument's name and is the first string
// after the condition; no two are alike. tests/test_errors.py finds them in the sources and asks
// each of them of a wrong call, so a new check needs a case there.
#define CHECK_ARGUMENT(op, condition, ...) \
  TORCH_CHECK(attention_ext::holds(condition), op, ": ", __VA_ARGS__)

// Each returns the options normalised: window_right is 0 under is_causal, windows lie within 2^61,
// integer tensors are int64.
AttentionOptions check_attention(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value, const AttentionOptions& options);

AttentionOptions check_attention_backward(const std::optional<at::Tensor>& grad_output,
                                          const std::optional<at::Tensor>& grad_logsumexp,
                                          const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const AttentionOptions& options,
                                          const at::Tensor& output, const at::Tensor& logsumexp,
                                          const at::Tensor& logsumexp_residual,
                                          const std::optional<at::Tensor>& output_residual,
                                          std::array<bool, 5> wanted);

AttentionOptions check_attention_weights(const at::Tensor& query, const at::Tensor& key,
                                         const AttentionOptions& options,
                                         const at::Tensor& logsumexp,
                                         const at::Tensor& logsumexp_residual);

AttentionOptions check_attention_weights_backward(const at::Tensor& grad_weights,
                                                  const at::Tensor& query, const at::Tensor& key,
                                                  const AttentionOptions& options,
                                                  const at::Tensor& logsumexp,
                                                  const at::Tensor& logsumexp_residual,
                                                  bool average_heads, std::array<bool, 4> wanted);

// ALiBi slopes and a float key_mask are constants: autograd refuses those that want a gradient or
// carry a tangent.
void check_constants(const char* op, const AttentionOptions& options);

}  // namespace attention_ext
