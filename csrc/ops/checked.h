// A device's functions as the dispatcher sees them: the argument checks first, then the device. For
// ops/register_*.cpp.
#pragma once

#include <torch/library.h>

#include "common/checks.h"
#include "ops/signature.h"

namespace attention_ext {

template <AttentionOp::Packed* kAttention, AttentionBackwardOp::Packed* kAttentionBackward,
          AttentionWeightsOp::Packed* kWeights,
          AttentionWeightsBackwardOp::Packed* kWeightsBackward>
struct Checked {
  static Tensor4 attention(TensorArg query, TensorArg key, TensorArg value,
                           const AttentionOptions& options) {
    return kAttention(query, key, value, check_attention(query, key, value, options));
  }

  static Tensor5 attention_backward(OptionalArg grad_output, OptionalArg grad_logsumexp,
                                    TensorArg query, TensorArg key, TensorArg value,
                                    const AttentionOptions& options, TensorArg output,
                                    TensorArg logsumexp, TensorArg logsumexp_residual,
                                    OptionalArg output_residual, std::array<bool, 5> wanted) {
    const auto checked =
        check_attention_backward(grad_output, grad_logsumexp, query, key, value, options, output,
                                 logsumexp, logsumexp_residual, output_residual, wanted);
    return kAttentionBackward(grad_output, grad_logsumexp, query, key, value, checked, output,
                              logsumexp, logsumexp_residual, output_residual, wanted);
  }

  static at::Tensor attention_weights(TensorArg query, TensorArg key,
                                      const AttentionOptions& options, TensorArg logsumexp,
                                      TensorArg logsumexp_residual, bool average_heads) {
    const auto checked =
        check_attention_weights(query, key, options, logsumexp, logsumexp_residual);
    return kWeights(query, key, checked, logsumexp, logsumexp_residual, average_heads);
  }

  static Tensor4 attention_weights_backward(TensorArg grad_weights, TensorArg query, TensorArg key,
                                            const AttentionOptions& options, TensorArg logsumexp,
                                            TensorArg logsumexp_residual,
                                            std::array<bool, 4> wanted, bool average_heads) {
    const auto checked = check_attention_weights_backward(
        grad_weights, query, key, options, logsumexp, logsumexp_residual, average_heads, wanted);
    return kWeightsBackward(grad_weights, query, key, checked, logsumexp, logsumexp_residual,
                            wanted, average_heads);
  }

  static void register_in(torch::Library& m) {
    m.impl("attention", AttentionOp::unboxed<attention>);
    m.impl("attention_backward", AttentionBackwardOp::unboxed<attention_backward>);
    m.impl("attention_weights", AttentionWeightsOp::unboxed<attention_weights>);
    m.impl("attention_weights_backward",
           AttentionWeightsBackwardOp::unboxed<attention_weights_backward>);
  }
};

}  // namespace attention_ext
