// Derivatives of attention_weights: of query, key, attn_bias and sinks, those through logsumexp
// included, which is a statistic here and no input. Were it one, two parts that nearly cancel would
// meet behind the rounding to 16 bits.
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

struct AttentionWeightsBackward final : AttentionNode<AttentionWeightsBackward, 4> {
  static constexpr const char* kName = "AttentionWeightsBackward";

  static variable_list formula(const variable_list& grads, Arguments arguments,
                               const Wanted& wanted, bool average_heads) {
    if (!grads[0].defined()) return variable_list(4);
    const auto query = arguments.tensor(), key = arguments.tensor();
    const auto options = arguments.options();
    const auto logsumexp = arguments.tensor(), residual = arguments.tensor();
    auto [grad_query, grad_key, grad_bias, grad_sinks] = attention_weights_backward(
        grads[0], query, key, options, logsumexp, residual, average_heads, wanted);
    return {grad_query, grad_key, grad_bias, grad_sinks};
  }
};

at::Tensor attention_weights_autograd(TensorArg query, TensorArg key,
                                      const AttentionOptions& options, TensorArg logsumexp,
                                      TensorArg logsumexp_residual, bool average_heads) {
  const auto& bias = options.attn_bias;
  const auto& sinks = options.sinks;
  check_constants("attention_weights", options);
  if (any_tangent(query, key, bias, sinks)) {
    const auto checked =
        check_attention_weights(query, key, options, logsumexp, logsumexp_residual);
    return composite::attention_weights(query, key, checked, average_heads);
  }
  const auto run = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return attention_weights(query, key, options, logsumexp, logsumexp_residual, average_heads);
  };
  if (!compute_requires_grad(query, key, bias, sinks)) return run();

  auto node = c10::make_intrusive<AttentionWeightsBackward>();
  node->set_next_edges(collect_next_edges(query, key, bias, sinks));
  node->average_heads = average_heads;
  auto weights = run();
  set_history(weights, node);
  auto& saved = node->saved;
  saved.reserve(4 + kOptionTensors);
  saved.keep(query);
  saved.keep(key);
  saved.keep(options);
  saved.keep(logsumexp);
  saved.keep(logsumexp_residual);
  return weights;
}

struct AttentionWeightsDoubleBackward final : AttentionNode<AttentionWeightsDoubleBackward, 5> {
  static constexpr const char* kName = "AttentionWeightsDoubleBackward";

  static variable_list formula(const variable_list& grads, Arguments arguments,
                               const Wanted& wanted, bool average_heads) {
    const auto grad_weights = arguments.tensor();
    const auto query = arguments.tensor(), key = arguments.tensor();
    const auto options = arguments.options();
    const auto result = composite::attention_weights_double_backward(
        {grads[0], grads[1], grads[2], grads[3]}, grad_weights, query, key, options, average_heads,
        wanted);
    return variable_list(result.begin(), result.end());
  }
};

Tensor4 attention_weights_backward_autograd(TensorArg grad_weights, TensorArg query, TensorArg key,
                                            const AttentionOptions& options, TensorArg logsumexp,
                                            TensorArg logsumexp_residual,
                                            std::array<bool, 4> wanted, bool average_heads) {
  const auto& bias = options.attn_bias;
  const auto& sinks = options.sinks;
  if (any_tangent(grad_weights, query, key, bias, sinks)) {
    const auto checked = check_attention_weights_backward(
        grad_weights, query, key, options, logsumexp, logsumexp_residual, average_heads, wanted);
    return composite::attention_weights_backward(grad_weights, query, key, checked, average_heads,
                                                 wanted);
  }
  const auto run = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return attention_weights_backward(grad_weights, query, key, options, logsumexp,
                                      logsumexp_residual, average_heads, wanted);
  };
  if (!compute_requires_grad(grad_weights, query, key, bias, sinks)) return run();

  auto node = c10::make_intrusive<AttentionWeightsDoubleBackward>();
  node->set_next_edges(collect_next_edges(grad_weights, query, key, bias, sinks));
  node->average_heads = average_heads;
  auto grads = run();
  std::apply([&](auto&... grad) { (set_history(grad, node), ...); }, grads);
  auto& saved = node->saved;
  saved.reserve(3 + kOptionTensors);
  saved.keep(grad_weights);
  saved.keep(query);
  saved.keep(key);
  saved.keep(options);
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(attention_ext, Autograd, m) {
  m.impl("attention_weights", AttentionWeightsOp::unboxed<attention_weights_autograd>);
  m.impl("attention_weights_backward",
         AttentionWeightsBackwardOp::unboxed<attention_weights_backward_autograd>);
}

}  // namespace attention_ext
