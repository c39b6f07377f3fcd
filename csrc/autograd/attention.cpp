// Derivatives of attention. One node per call, whose backward is the attention_backward op; that op
// has a node of its own here, whose backward is an explicit formula (composite.h), so that any
// order works, under any transform. A call with tangents (forward mode) takes the dense formula at
// its own level.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "autograd/saved_arguments.h"
#include "common/checks.h"
#include "common/composite.h"

namespace attention_ext {
namespace {

using torch::autograd::collect_next_edges;
using torch::autograd::compute_requires_grad;
using torch::autograd::set_history;

struct AttentionBackward final : AttentionNode<AttentionBackward, 5> {
  static constexpr const char* kName = "AttentionBackward";

  static variable_list formula(const variable_list& grads, Arguments arguments,
                               const Wanted& wanted, bool) {
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(5);
    const auto query = arguments.tensor(), key = arguments.tensor(), value = arguments.tensor();
    const auto options = arguments.options();
    const auto output = arguments.tensor(), logsumexp = arguments.tensor();
    const auto residual = arguments.tensor();
    const auto output_residual = arguments.optional();
    auto [grad_query, grad_key, grad_value, grad_bias, grad_sinks] =
        attention_backward(given(grads[0]), given(grads[1]), query, key, value, options, output,
                           logsumexp, residual, output_residual, wanted);
    return {grad_query, grad_key, grad_value, grad_bias, grad_sinks};
  }
};

Tensor4 attention_autograd(TensorArg query, TensorArg key, TensorArg value,
                           const AttentionOptions& options) {
  const auto& bias = options.attn_bias;
  const auto& sinks = options.sinks;
  check_constants("attention", options);
  if (any_tangent(query, key, value, bias, sinks)) {
    return composite::attention(query, key, value, check_attention(query, key, value, options));
  }
  if (!compute_requires_grad(query, key, value, bias, sinks)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return attention(query, key, value, options);
  }
  auto node = c10::make_intrusive<AttentionBackward>();
  node->set_next_edges(collect_next_edges(query, key, value, bias, sinks));
  auto [output, logsumexp, residual, output_residual] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return attention(query, key, value, options);
  }();
  set_history(output, node);
  set_history(logsumexp, node);
  auto& saved = node->saved;
  saved.reserve(7 + kOptionTensors);
  saved.keep(query);
  saved.keep(key);
  saved.keep(value);
  saved.keep(options);
  saved.keep(output, /*is_output=*/true);
  saved.keep(logsumexp, /*is_output=*/true);
  saved.keep(residual);
  saved.keep(output_residual);
  return {std::move(output), std::move(logsumexp), std::move(residual), std::move(output_residual)};
}

struct AttentionDoubleBackward final : AttentionNode<AttentionDoubleBackward, 7> {
  static constexpr const char* kName = "AttentionDoubleBackward";

  static variable_list formula(const variable_list& grads, Arguments arguments,
                               const Wanted& wanted, bool) {
    const auto grad_output = arguments.optional(), grad_logsumexp = arguments.optional();
    const auto query = arguments.tensor(), key = arguments.tensor(), value = arguments.tensor();
    const auto options = arguments.options();
    const auto result = composite::attention_double_backward(
        {grads[0], grads[1], grads[2], grads[3], grads[4]}, grad_output, grad_logsumexp, query, key,
        value, options, wanted);
    return variable_list(result.begin(), result.end());
  }
};

Tensor5 attention_backward_autograd(OptionalArg grad_output, OptionalArg grad_logsumexp,
                                    TensorArg query, TensorArg key, TensorArg value,
                                    const AttentionOptions& options, TensorArg output,
                                    TensorArg logsumexp, TensorArg logsumexp_residual,
                                    OptionalArg output_residual, std::array<bool, 5> wanted) {
  const auto& bias = options.attn_bias;
  const auto& sinks = options.sinks;
  if (any_tangent(grad_output, grad_logsumexp, query, key, value, bias, sinks)) {
    const auto checked =
        check_attention_backward(grad_output, grad_logsumexp, query, key, value, options, output,
                                 logsumexp, logsumexp_residual, output_residual, wanted);
    return composite::attention_backward(grad_output, grad_logsumexp, query, key, value, checked,
                                         wanted);
  }
  const auto run = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return attention_backward(grad_output, grad_logsumexp, query, key, value, options, output,
                              logsumexp, logsumexp_residual, output_residual, wanted);
  };
  if (!compute_requires_grad(grad_output, grad_logsumexp, query, key, value, bias, sinks))
    return run();

  auto node = c10::make_intrusive<AttentionDoubleBackward>();
  node->set_next_edges(
      collect_next_edges(grad_output, grad_logsumexp, query, key, value, bias, sinks));
  auto grads = run();
  std::apply([&](auto&... grad) { (set_history(grad, node), ...); }, grads);
  auto& saved = node->saved;
  saved.reserve(5 + kOptionTensors);
  saved.keep(grad_output);
  saved.keep(grad_logsumexp);
  saved.keep(query);
  saved.keep(key);
  saved.keep(value);
  saved.keep(options);
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(attention_ext, Autograd, m) {
  m.impl("attention", AttentionOp::unboxed<attention_autograd>);
  m.impl("attention_backward", AttentionBackwardOp::unboxed<attention_backward_autograd>);
}

}  // namespace attention_ext
