// The CPU's half of the op family: allocate, fill params, hand ranges of work to the kernels. The
// arguments have been checked and the options normalised (csrc/common/checks.h) before any of these
// is called.
#pragma once

#include "ops/attention.h"

namespace attention_ext::cpu {

Tensor4 attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const AttentionOptions& options);

Tensor5 attention_backward(const std::optional<at::Tensor>& grad_output,
                           const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query,
                           const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options, const at::Tensor& output,
                           const at::Tensor& logsumexp, const at::Tensor& logsumexp_residual,
                           const std::optional<at::Tensor>& output_residual,
                           std::array<bool, 5> wanted);

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options, const at::Tensor& logsumexp,
                             const at::Tensor& logsumexp_residual, bool average_heads);

Tensor4 attention_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                   const at::Tensor& key, const AttentionOptions& options,
                                   const at::Tensor& logsumexp,
                                   const at::Tensor& logsumexp_residual, bool average_heads,
                                   std::array<bool, 4> wanted);

}  // namespace attention_ext::cpu
