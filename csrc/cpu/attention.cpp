// A stand-in over the dense formulas, until the kernels are here.
#include "cpu/attention.h"

#include "common/composite.h"

namespace attention_ext::cpu {

Tensor3 attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const AttentionOptions& options) {
  return composite::attention(query, key, value, options);
}

Tensor5 attention_backward(const std::optional<at::Tensor>& grad_output,
                           const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query,
                           const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, std::array<bool, 5> wanted) {
  return composite::attention_backward(grad_output, grad_logsumexp, query, key, value, options,
                                       wanted);
}

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options, const at::Tensor& logsumexp,
                             const at::Tensor& logsumexp_residual, bool average_heads) {
  return composite::attention_weights(query, key, options, logsumexp, logsumexp_residual,
                                      average_heads);
}

Tensor4 attention_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                   const at::Tensor& key, const AttentionOptions& options,
                                   const at::Tensor& logsumexp,
                                   const at::Tensor& logsumexp_residual, bool average_heads,
                                   std::array<bool, 4> wanted) {
  return composite::attention_weights_backward(grad_weights, query, key, options, logsumexp,
                                               logsumexp_residual, average_heads, wanted);
}

}  // namespace attention_ext::cpu
