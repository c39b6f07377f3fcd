// The typed C++ entry points: straight to the dispatcher.
#include "ops/attention.h"

#include <torch/library.h>

#include "ops/signature.h"

namespace attention_ext {

Tensor4 attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const AttentionOptions& options) {
  return AttentionOp::call(query, key, value, options);
}

Tensor5 attention_backward(const std::optional<at::Tensor>& grad_output,
                           const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query,
                           const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options, const at::Tensor& output,
                           const at::Tensor& logsumexp, const at::Tensor& logsumexp_residual,
                           const std::optional<at::Tensor>& output_residual,
                           std::array<bool, 5> wanted) {
  return AttentionBackwardOp::call(grad_output, grad_logsumexp, query, key, value, options, output,
                                   logsumexp, logsumexp_residual, output_residual, wanted);
}

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options, const at::Tensor& logsumexp,
                             const at::Tensor& logsumexp_residual, bool average_heads) {
  return AttentionWeightsOp::call(query, key, options, logsumexp, logsumexp_residual,
                                  average_heads);
}

Tensor4 attention_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                   const at::Tensor& key, const AttentionOptions& options,
                                   const at::Tensor& logsumexp,
                                   const at::Tensor& logsumexp_residual, bool average_heads,
                                   std::array<bool, 4> wanted) {
  return AttentionWeightsBackwardOp::call(grad_weights, query, key, options, logsumexp,
                                          logsumexp_residual, wanted, average_heads);
}

namespace {

using Tensor3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

struct WithoutOutputResidual : Signature<WithoutOutputResidual, Tensor3,
                                         Types<TensorArg, TensorArg, TensorArg>, Types<>, Types<>> {
  static Tensor3 attention(TensorArg query, TensorArg key, TensorArg value,
                           const AttentionOptions& options) {
    auto [output, logsumexp, residual, _] = AttentionOp::call(query, key, value, options);
    return {std::move(output), std::move(logsumexp), std::move(residual)};
  }
};

constexpr const char* kName = "_attention_without_output_residual";

}  // namespace

// On every device this one calls attention, and autograd sees that call: a kernel of its own above
// would hide it from tracing.
TORCH_LIBRARY_IMPL(attention_ext, CompositeExplicitAutograd, m) {
  m.impl(kName, WithoutOutputResidual::unboxed<WithoutOutputResidual::attention>);
}

TORCH_LIBRARY_IMPL(attention_ext, Autograd, m) {
  m.impl(kName, torch::CppFunction::makeFallthrough());
}

}  // namespace attention_ext
