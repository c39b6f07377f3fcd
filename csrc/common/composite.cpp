// See composite.h. In the formulas below, for one row: P the probabilities, D the scaled keep mask,
// dP = D * (dO V^T), delta = sum(P * dP) - dlse, and dS = P * (dP - delta). Letters in comments: X
// the incoming gradient of dS, x its expectation under P (the sink counts as one more key whose X
// is the sink's).
#include "common/composite.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <limits>

#include "common/dense_scores.h"

namespace attention_ext::composite {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The formulas choose their dtypes themselves.
struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

struct Softmax {
  at::Tensor probabilities;        // (..., H, L, S)
  at::Tensor sink_probabilities;   // (..., H, L); undefined without sinks
  at::Tensor logsumexp, residual;  // (..., H, L)
};

// Probabilities, decided by the mask and not by looking for NaN. The maximum is a constant: it
// drops out.
Softmax softmax(const DenseScores& dense, const AttentionOptions& options) {
  Softmax result;
  const auto scores = where_visible(dense, dense.scores, -kInfinity);
  const auto rows = scores.sym_sizes().slice(0, scores.dim() - 1);
  const bool no_keys = scores.sym_size(-1) == 0;
  auto live = no_keys ? at::zeros({1}, scores.options().dtype(at::kBool)) : live_rows(dense);
  auto top =
      no_keys ? at::full_symint(rows, -kInfinity, scores.options()) : scores.detach().amax(-1);
  at::Tensor sinks;
  if (options.sinks) {
    sinks = options.sinks->to(scores.scalar_type()).unsqueeze(-1);
    top = at::maximum(top, sinks.detach());
    if (live.defined()) live = at::logical_or(live, at::ne(sinks, -kInfinity));
  }
  top = at::where(at::eq(top, -kInfinity), 0.0, top);
  const auto exponentials =
      at::exp(where_visible(dense, dense.scores - top.unsqueeze(-1), -kInfinity));
  auto total = exponentials.sum(-1);
  if (sinks.defined()) total = total + at::exp(sinks - top);
  if (live.defined()) total = at::where(live, total, 1.0);  // a dead row's quotient stays finite
  const auto log_total = at::log(total);
  result.probabilities = exponentials / total.unsqueeze(-1);
  if (sinks.defined()) result.sink_probabilities = at::exp(sinks - top) / total;
  result.logsumexp = top + log_total;
  result.residual = ((top - result.logsumexp) + log_total).detach();
  if (live.defined()) {
    result.logsumexp = at::where(live, result.logsumexp, -kInfinity);
    result.residual = at::where(live, result.residual, 0.0);
  }
  return result;
}

at::Tensor times(const at::Tensor& values, const at::Tensor& factor) {
  return factor.defined() ? values * factor : values;
}

at::Tensor plus(const at::Tensor& left, const at::Tensor& right) {
  if (!left.defined()) return right;
  return right.defined() ? left + right : left;
}

at::Tensor transposed(const at::Tensor& tensor) { return tensor.transpose(-2, -1); }

// Fresh memory laid out as (..., L, H, E), in the dtype of the input it belongs to.
at::Tensor rows_first(const at::Tensor& tensor, at::ScalarType dtype) {
  if (!tensor.defined()) return tensor;
  return tensor.to(dtype).transpose(-2, -3).clone(at::MemoryFormat::Contiguous).transpose(-2, -3);
}

at::Tensor bias_shaped(const at::Tensor& grad_scores, const at::Tensor& bias) {
  return grad_scores.sum_to_size_symint(bias.sym_sizes())
      .to(bias.scalar_type())
      .clone(at::MemoryFormat::Contiguous);
}

at::Tensor sinks_shaped(const at::Tensor& per_row, const at::Tensor& sinks) {
  return per_row.sum(-1).sum_to_size_symint(sinks.sym_sizes()).to(sinks.scalar_type());
}

// Everything the first and the second derivatives have in common.
struct ScoreGradients {
  DenseScores dense;
  Softmax soft;
  at::Tensor grad_weights;  // dP
  at::Tensor delta;         // (..., L, 1)
  at::Tensor grad_scores;   // dS
};

void find_grad_scores(ScoreGradients& g, const std::optional<at::Tensor>& grad_logsumexp) {
  const auto& p = g.soft.probabilities;
  g.delta = (p * g.grad_weights).sum(-1, /*keepdim=*/true);
  if (grad_logsumexp) g.delta = g.delta - grad_logsumexp->to(p.scalar_type()).unsqueeze(-1);
  g.grad_scores = where_visible(g.dense, p * (g.grad_weights - g.delta), 0.0);
}

struct Backward : ScoreGradients {
  at::Tensor value;        // heads repeated, hidden rows zero
  at::Tensor grad_output;  // dead rows zero; undefined: zero
};

Backward backward(const std::optional<at::Tensor>& grad_output,
                  const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query,
                  const at::Tensor& key, const at::Tensor& value, const AttentionOptions& options) {
  Backward b;
  b.dense = dense_scores(query, key, options);
  b.soft = softmax(b.dense, options);
  const auto dtype = b.dense.scores.scalar_type();
  b.value = repeat_heads(value.to(dtype), query.sym_size(-3));
  if (b.dense.visible.defined()) b.value = zero_rows(b.value, b.dense.visible.any(-2));
  if (grad_output) {
    b.grad_output = zero_rows(grad_output->to(dtype), live_rows(b.dense));
    b.grad_weights = times(at::matmul(b.grad_output, transposed(b.value)), b.dense.keep);
    b.grad_weights = where_visible(b.dense, b.grad_weights, 0.0);
  } else {
    b.grad_weights = at::zeros_like(b.soft.probabilities);
  }
  find_grad_scores(b, grad_logsumexp);
  return b;
}

// The incoming gradient spread over the heads if they were averaged, then through dropout.
ScoreGradients weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                const at::Tensor& key, const AttentionOptions& options,
                                bool average_heads) {
  ScoreGradients g;
  g.dense = dense_scores(query, key, options);
  g.soft = softmax(g.dense, options);
  auto grad = grad_weights.to(g.dense.scores.scalar_type());
  if (average_heads) {
    const auto sizes = g.dense.scores.sym_sizes();
    grad = (grad / c10::Scalar(query.sym_size(-3))).unsqueeze(-3).expand_symint(sizes);
  }
  g.grad_weights = where_visible(g.dense, times(grad, g.dense.keep), 0.0);
  find_grad_scores(g, std::nullopt);
  return g;
}

// d/dA of sum(A * dS * slope) needs these products: the gradients of query and key for given score
// gradients.
struct QueryKey {
  at::Tensor query, key;
};

// capped: gradients of the capped scores. -> gradients of query and key, heads not yet summed.
QueryKey through_product(const DenseScores& dense, const at::Tensor& uncapped) {
  return {at::matmul(uncapped, dense.key) * dense.scale,
          at::matmul(transposed(uncapped), dense.query) * dense.scale};
}

// The part that both second derivatives share. incoming: gradients of grad_query and grad_key (may
// be undefined); grad_scores: dS.
struct SecondOrder {
  at::Tensor incoming_query, incoming_key;  // in the accumulation dtype, heads repeated
  at::Tensor product;                       // A = scale (hq k^T + q hk^T); undefined: zero
  at::Tensor toward_scores;                 // X, without the bias's part
};

SecondOrder second_order(const DenseScores& dense, const at::Tensor& incoming_query,
                         const at::Tensor& incoming_key) {
  SecondOrder s;
  const auto dtype = dense.scores.scalar_type();
  if (incoming_query.defined()) {
    s.incoming_query = zero_rows(incoming_query.to(dtype), live_rows(dense));
    s.product = at::matmul(s.incoming_query, transposed(dense.key));
  }
  if (incoming_key.defined()) {
    s.incoming_key = repeat_heads(incoming_key.to(dtype), dense.query.sym_size(-3));
    if (dense.visible.defined()) s.incoming_key = zero_rows(s.incoming_key, dense.visible.any(-2));
    s.product = plus(s.product, at::matmul(dense.query, transposed(s.incoming_key)));
  }
  if (s.product.defined()) {
    s.product = s.product * dense.scale;
    s.toward_scores = times(s.product, dense.cap_slope);
  }
  return s;
}

// toward: gradients of the final scores. -> those of query and key.
QueryKey second_order_query_key(const DenseScores& dense, const SecondOrder& s, at::Tensor toward,
                                const at::Tensor& grad_scores, double softcap) {
  auto grad_product = grad_scores;
  if (dense.cap_slope.defined()) {
    // d cap_slope / d capped = -2 capped / softcap^2
    if (s.product.defined()) {
      toward = toward - s.product * grad_scores * dense.capped * (2.0 / (softcap * softcap));
    }
    toward = toward * dense.cap_slope;
    grad_product = grad_scores * dense.cap_slope;
  }
  auto result = through_product(dense, toward);
  if (s.incoming_key.defined()) {
    result.query = result.query + at::matmul(grad_product, s.incoming_key) * dense.scale;
  }
  if (s.incoming_query.defined()) {
    result.key = result.key + at::matmul(transposed(grad_product), s.incoming_query) * dense.scale;
  }
  return result;
}

// The results that attention and its weights share; undefined where not wanted.
struct InputGradients {
  at::Tensor query, key, bias, sinks;
};

struct WantedInputs {
  bool query, key, bias, sinks;
};

InputGradients first_derivatives(const ScoreGradients& g, const at::Tensor& query,
                                 const at::Tensor& key, const AttentionOptions& options,
                                 WantedInputs wanted) {
  InputGradients result;
  if (wanted.query || wanted.key) {
    const auto grads = through_product(g.dense, times(g.grad_scores, g.dense.cap_slope));
    if (wanted.query) result.query = rows_first(grads.query, query.scalar_type());
    if (wanted.key)
      result.key = rows_first(sum_groups(grads.key, key.sym_size(-3)), key.scalar_type());
  }
  if (wanted.bias) result.bias = bias_shaped(g.grad_scores, *options.attn_bias);
  if (wanted.sinks)
    result.sinks = sinks_shaped(-g.soft.sink_probabilities * g.delta.squeeze(-1), *options.sinks);
  return result;
}

struct SecondDerivatives {
  at::Tensor expected;        // x, (..., L, 1)
  at::Tensor toward_product;  // D P (X - x): the gradient of dO V^T, or of the weights' gradient
  InputGradients inputs;
};

// `incoming` are the gradients of the first derivatives; `value_part`, if defined, what reaches P
// through the gradient of the values.
SecondDerivatives second_derivatives(const ScoreGradients& g, const InputGradients& incoming,
                                     const at::Tensor& value_part, const at::Tensor& query,
                                     const at::Tensor& key, const AttentionOptions& options,
                                     WantedInputs wanted) {
  const auto& [dense, soft, grad_weights, delta, grad_scores] = g;
  const auto& p = soft.probabilities;
  const auto dtype = p.scalar_type();
  const auto s = second_order(dense, incoming.query, incoming.key);
  at::Tensor toward = s.toward_scores;  // X
  if (incoming.bias.defined())
    toward = plus(toward, incoming.bias.to(dtype).expand_symint(p.sym_sizes()));
  if (!toward.defined()) toward = at::zeros_like(p);
  toward = where_visible(dense, toward, 0.0);

  SecondDerivatives result;
  result.expected = (p * toward).sum(-1, /*keepdim=*/true);
  at::Tensor toward_sink, sink_p;
  if (options.sinks) sink_p = soft.sink_probabilities.unsqueeze(-1);
  if (options.sinks && incoming.sinks.defined()) {
    toward_sink = incoming.sinks.to(dtype).unsqueeze(-1).unsqueeze(-1);
    result.expected = result.expected + sink_p * toward_sink;
  }
  const auto& expected = result.expected;

  // d/dP, P and dP taken as independent: X (dP - delta) - x dP + D (dO hv^T).
  const auto toward_p = plus(toward * (grad_weights - delta) - expected * grad_weights, value_part);
  auto mean = (p * toward_p).sum(-1, /*keepdim=*/true);
  const auto toward_sink_p = toward_sink.defined() ? -toward_sink * delta : at::Tensor();
  if (toward_sink_p.defined()) mean = mean + sink_p * toward_sink_p;
  const auto second = where_visible(dense, p * (toward_p - mean), 0.0);  // gradient of the scores

  result.toward_product = where_visible(dense, times(p * (toward - expected), dense.keep), 0.0);
  if (wanted.query || wanted.key) {
    const auto grads = second_order_query_key(dense, s, second, grad_scores, options.softcap);
    if (wanted.query) result.inputs.query = grads.query.to(query.scalar_type());
    if (wanted.key) {
      result.inputs.key = sum_groups(grads.key, key.sym_size(-3)).to(key.scalar_type());
    }
  }
  if (wanted.bias && options.attn_bias)
    result.inputs.bias = bias_shaped(second, *options.attn_bias);
  if (wanted.sinks && options.sinks) {
    const auto per_row =
        sink_p * ((toward_sink_p.defined() ? toward_sink_p : at::zeros_like(mean)) - mean);
    result.inputs.sinks = sinks_shaped(per_row.squeeze(-1), *options.sinks);
  }
  return result;
}

at::Tensor mean_heads(const at::Tensor& weights, bool average_heads) {
  return average_heads ? weights.mean(-3) : weights;
}

}  // namespace

Tensor4 attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const AttentionOptions& options) {
  const WithoutAutocast without_autocast;
  const auto dense = dense_scores(query, key, options);
  const auto soft = softmax(dense, options);
  auto values = repeat_heads(value.to(dense.scores.scalar_type()), query.sym_size(-3));
  if (dense.visible.defined()) values = zero_rows(values, dense.visible.any(-2));
  const auto output = at::matmul(times(soft.probabilities, dense.keep), values);
  return {rows_first(output, query.scalar_type()), soft.logsumexp, soft.residual, at::Tensor()};
}

Tensor5 attention_backward(const std::optional<at::Tensor>& grad_output,
                           const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query,
                           const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options, std::array<bool, 5> wanted) {
  const WithoutAutocast without_autocast;
  const auto b = backward(grad_output, grad_logsumexp, query, key, value, options);
  auto grads =
      first_derivatives(b, query, key, options, {wanted[0], wanted[1], wanted[3], wanted[4]});
  at::Tensor grad_value;
  if (wanted[2]) {
    grad_value = at::zeros_like(value);
    if (b.grad_output.defined()) {
      const auto dropped = times(b.soft.probabilities, b.dense.keep);
      grad_value = sum_groups(at::matmul(transposed(dropped), b.grad_output), key.sym_size(-3));
    }
    grad_value = rows_first(grad_value, value.scalar_type());
  }
  return {grads.query, grads.key, grad_value, grads.bias, grads.sinks};
}

std::array<at::Tensor, 7> attention_double_backward(
    const std::array<at::Tensor, 5>& incoming, const std::optional<at::Tensor>& grad_output,
    const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const AttentionOptions& options, std::array<bool, 7> wanted) {
  const WithoutAutocast without_autocast;
  const auto b = backward(grad_output, grad_logsumexp, query, key, value, options);
  const auto& grad_out = b.grad_output;
  at::Tensor incoming_value, value_part;
  if (incoming[2].defined()) {
    incoming_value = repeat_heads(incoming[2].to(b.value.scalar_type()), query.sym_size(-3));
    if (b.dense.visible.defined()) {
      incoming_value = zero_rows(incoming_value, b.dense.visible.any(-2));
    }
    if (grad_out.defined()) {
      value_part = times(at::matmul(grad_out, transposed(incoming_value)), b.dense.keep);
    }
  }
  const auto second =
      second_derivatives(b, {incoming[0], incoming[1], incoming[3], incoming[4]}, value_part, query,
                         key, options, {wanted[2], wanted[3], wanted[5], wanted[6]});
  at::Tensor toward_grad_output, toward_grad_logsumexp, toward_value;
  if (wanted[0] && grad_output) {
    toward_grad_output = at::matmul(second.toward_product, b.value);
    if (incoming_value.defined()) {
      const auto dropped = times(b.soft.probabilities, b.dense.keep);
      toward_grad_output = toward_grad_output + at::matmul(dropped, incoming_value);
    }
    toward_grad_output = toward_grad_output.to(grad_output->scalar_type());
  }
  if (wanted[1] && grad_logsumexp) toward_grad_logsumexp = second.expected.squeeze(-1);
  if (wanted[4] && grad_out.defined()) {
    toward_value =
        sum_groups(at::matmul(transposed(second.toward_product), grad_out), key.sym_size(-3))
            .to(value.scalar_type());
  }
  const auto& inputs = second.inputs;
  return {toward_grad_output, toward_grad_logsumexp, inputs.query, inputs.key,
          toward_value,       inputs.bias,           inputs.sinks};
}

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options, bool average_heads) {
  const WithoutAutocast without_autocast;
  const auto dense = dense_scores(query, key, options);
  const auto dropped = times(softmax(dense, options).probabilities, dense.keep);
  return mean_heads(dropped, average_heads).to(query.scalar_type()).contiguous();
}

Tensor4 attention_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                   const at::Tensor& key, const AttentionOptions& options,
                                   bool average_heads, std::array<bool, 4> wanted) {
  const WithoutAutocast without_autocast;
  const auto g = weights_backward(grad_weights, query, key, options, average_heads);
  auto grads =
      first_derivatives(g, query, key, options, {wanted[0], wanted[1], wanted[2], wanted[3]});
  return {grads.query, grads.key, grads.bias, grads.sinks};
}

std::array<at::Tensor, 5> attention_weights_double_backward(
    const std::array<at::Tensor, 4>& incoming, const at::Tensor& grad_weights,
    const at::Tensor& query, const at::Tensor& key, const AttentionOptions& options,
    bool average_heads, std::array<bool, 5> wanted) {
  const WithoutAutocast without_autocast;
  const auto g = weights_backward(grad_weights, query, key, options, average_heads);
  const auto second =
      second_derivatives(g, {incoming[0], incoming[1], incoming[2], incoming[3]}, /*value_part=*/{},
                         query, key, options, {wanted[1], wanted[2], wanted[3], wanted[4]});
  at::Tensor toward_grad_weights;
  if (wanted[0]) {
    toward_grad_weights =
        mean_heads(second.toward_product, average_heads).to(grad_weights.scalar_type());
  }
  const auto& inputs = second.inputs;
  return {toward_grad_weights, inputs.query, inputs.key, inputs.bias, inputs.sinks};
}

}  // namespace attention_ext::composite
