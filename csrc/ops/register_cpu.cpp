// The CPU kernels as the dispatcher sees them: checks first, then csrc/cpu. Layouts that have no
// kernels get the same checks, whose sentence says what is wrong, in place of the dispatcher's list
// of keys.
#include <torch/library.h>

#include "common/checks.h"
#include "cpu/attention.h"
#include "ops/signature.h"

namespace attention_ext {
namespace {

Tensor4 attention_cpu(TensorArg query, TensorArg key, TensorArg value,
                      const AttentionOptions& options) {
  return cpu::attention(query, key, value, check_attention(query, key, value, options));
}

Tensor5 attention_backward_cpu(OptionalArg grad_output, OptionalArg grad_logsumexp, TensorArg query,
                               TensorArg key, TensorArg value, const AttentionOptions& options,
                               TensorArg output, TensorArg logsumexp, TensorArg logsumexp_residual,
                               OptionalArg output_residual, std::array<bool, 5> wanted) {
  const auto checked =
      check_attention_backward(grad_output, grad_logsumexp, query, key, value, options, output,
                               logsumexp, logsumexp_residual, output_residual, wanted);
  return cpu::attention_backward(grad_output, grad_logsumexp, query, key, value, checked, output,
                                 logsumexp, logsumexp_residual, output_residual, wanted);
}

at::Tensor attention_weights_cpu(TensorArg query, TensorArg key, const AttentionOptions& options,
                                 TensorArg logsumexp, TensorArg logsumexp_residual,
                                 bool average_heads) {
  const auto checked = check_attention_weights(query, key, options, logsumexp, logsumexp_residual);
  return cpu::attention_weights(query, key, checked, logsumexp, logsumexp_residual, average_heads);
}

Tensor4 attention_weights_backward_cpu(TensorArg grad_weights, TensorArg query, TensorArg key,
                                       const AttentionOptions& options, TensorArg logsumexp,
                                       TensorArg logsumexp_residual, std::array<bool, 4> wanted,
                                       bool average_heads) {
  const auto checked = check_attention_weights_backward(
      grad_weights, query, key, options, logsumexp, logsumexp_residual, average_heads, wanted);
  return cpu::attention_weights_backward(grad_weights, query, key, checked, logsumexp,
                                         logsumexp_residual, average_heads, wanted);
}

}  // namespace

TORCH_LIBRARY_IMPL(attention_ext, CPU, m) {
  m.impl("attention", AttentionOp::unboxed<attention_cpu>);
  m.impl("attention_backward", AttentionBackwardOp::unboxed<attention_backward_cpu>);
  m.impl("attention_weights", AttentionWeightsOp::unboxed<attention_weights_cpu>);
  m.impl("attention_weights_backward",
         AttentionWeightsBackwardOp::unboxed<attention_weights_backward_cpu>);
}

}  // namespace attention_ext
