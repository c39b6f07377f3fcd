// The op family as plain dense ATen formulas, with the contract's full semantics. Used where
// derivatives of derivatives are wanted (forward mode, double backward), never for ordinary calls:
// it materialises the scores. Every function is differentiable by autograd itself, to any order,
// and safe under transforms; none returns an output_residual. In these, a hidden key's NaN cannot
// be felt if every row hides that key.
#pragma once

#include "ops/attention.h"

namespace attention_ext::composite {

Tensor4 attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const AttentionOptions& options);

Tensor5 attention_backward(const std::optional<at::Tensor>& grad_output,
                           const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query,
                           const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options, std::array<bool, 5> wanted);

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options, bool average_heads);

Tensor4 attention_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                   const at::Tensor& key, const AttentionOptions& options,
                                   bool average_heads, std::array<bool, 4> wanted);

// Second derivatives. `incoming` are the gradients of attention_backward's five results, undefined
// where there is none; the results are those of grad_output, grad_logsumexp, query, key, value,
// attn_bias, sinks.
std::array<at::Tensor, 7> attention_double_backward(
    const std::array<at::Tensor, 5>& incoming, const std::optional<at::Tensor>& grad_output,
    const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const AttentionOptions& options, std::array<bool, 7> wanted);

// The same for attention_weights_backward's four: of grad_weights, query, key, attn_bias, sinks.
std::array<at::Tensor, 5> attention_weights_double_backward(
    const std::array<at::Tensor, 4>& incoming, const at::Tensor& grad_weights,
    const at::Tensor& query, const at::Tensor& key, const AttentionOptions& options,
    bool average_heads, std::array<bool, 5> wanted);

}  // namespace attention_ext::composite
