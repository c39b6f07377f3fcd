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

at::Tensor minus(const at::Tensor& left, const at::Tensor& right) {
  return plus(left, right.defined() ? -right : right);
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

// Everything the first and the second derivative of attention have in common.
struct Backward {
  DenseScores dense;
  Softmax soft;
  at::Tensor value;         // heads repeated, hidden rows zero
  at::Tensor grad_output;   // dead rows zero; undefined: zero
  at::Tensor dropped;       // P * D
  at::Tensor grad_weights;  // dP
  at::Tensor delta;         // (..., L, 1)
  at::Tensor grad_scores;   // dS
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
  const auto& p = b.soft.probabilities;
  b.dropped = times(p, b.dense.keep);
  if (grad_output) {
    b.grad_output = zero_rows(grad_output->to(dtype), live_rows(b.dense));
    b.grad_weights = times(at::matmul(b.grad_output, transposed(b.value)), b.dense.keep);
    b.grad_weights = where_visible(b.dense, b.grad_weights, 0.0);
  } else {
    b.grad_weights = at::zeros_like(p);
  }
  b.delta = (p * b.grad_weights).sum(-1, /*keepdim=*/true);
  if (grad_logsumexp) b.delta = b.delta - grad_logsumexp->to(dtype).unsqueeze(-1);
  b.grad_scores = where_visible(b.dense, p * (b.grad_weights - b.delta), 0.0);
  return b;
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
  const auto key_heads = key.sym_size(-3);
  at::Tensor grad_query, grad_key, grad_value, grad_bias, grad_sinks;
  if (wanted[0] || wanted[1]) {
    auto grads = through_product(b.dense, times(b.grad_scores, b.dense.cap_slope));
    if (wanted[0]) grad_query = rows_first(grads.query, query.scalar_type());
    if (wanted[1]) grad_key = rows_first(sum_groups(grads.key, key_heads), key.scalar_type());
  }
  if (wanted[2]) {
    grad_value = b.grad_output.defined()
                     ? sum_groups(at::matmul(transposed(b.dropped), b.grad_output), key_heads)
                     : at::zeros_like(value);
    grad_value = rows_first(grad_value, value.scalar_type());
  }
  if (wanted[3]) grad_bias = bias_shaped(b.grad_scores, *options.attn_bias);
  if (wanted[4])
    grad_sinks = sinks_shaped(-b.soft.sink_probabilities * b.delta.squeeze(-1), *options.sinks);
  return {grad_query, grad_key, grad_value, grad_bias, grad_sinks};
}

std::array<at::Tensor, 7> attention_double_backward(
    const std::array<at::Tensor, 5>& incoming, const std::optional<at::Tensor>& grad_output,
    const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const AttentionOptions& options, std::array<bool, 7> wanted) {
  const WithoutAutocast without_autocast;
  const auto b = backward(grad_output, grad_logsumexp, query, key, value, options);
  const auto& [dense, soft, values, grad_out, dropped, grad_weights, delta, grad_scores] = b;
  const auto& p = soft.probabilities;
  const auto dtype = dense.scores.scalar_type();
  const auto key_heads = key.sym_size(-3);

  const auto s = second_order(dense, incoming[0], incoming[1]);
  at::Tensor toward = s.toward_scores;  // X
  if (incoming[3].defined())
    toward = plus(toward, incoming[3].to(dtype).expand_symint(p.sym_sizes()));
  if (!toward.defined()) toward = at::zeros_like(p);
  toward = where_visible(dense, toward, 0.0);

  auto expected = (p * toward).sum(-1, /*keepdim=*/true);  // x
  at::Tensor toward_sink, sink_p;
  if (options.sinks && incoming[4].defined()) {
    toward_sink = incoming[4].to(dtype).unsqueeze(-1).unsqueeze(-1);
    expected = expected + soft.sink_probabilities.unsqueeze(-1) * toward_sink;
  }
  if (options.sinks) sink_p = soft.sink_probabilities.unsqueeze(-1);

  // d/dP, P and dP taken as independent: X (dP - delta) - x dP + D (dO hv^T).
  auto toward_p = toward * (grad_weights - delta) - expected * grad_weights;
  at::Tensor incoming_value;
  if (incoming[2].defined()) {
    incoming_value = repeat_heads(incoming[2].to(dtype), query.sym_size(-3));
    if (dense.visible.defined()) incoming_value = zero_rows(incoming_value, dense.visible.any(-2));
    if (grad_out.defined()) {
      toward_p = toward_p + times(at::matmul(grad_out, transposed(incoming_value)), dense.keep);
    }
  }
  auto mean = (p * toward_p).sum(-1, /*keepdim=*/true);
  const auto toward_sink_p = toward_sink.defined() ? -toward_sink * delta : at::Tensor();
  if (toward_sink_p.defined()) mean = mean + sink_p * toward_sink_p;
  const auto second = where_visible(dense, p * (toward_p - mean), 0.0);  // gradient of the scores

  // P (X - x) D: the gradient of dO V^T.
  const auto toward_product = where_visible(dense, times(p * (toward - expected), dense.keep), 0.0);
  std::array<at::Tensor, 7> result;
  if (wanted[0] && grad_output) {
    result[0] = at::matmul(toward_product, values);
    if (incoming_value.defined()) result[0] = result[0] + at::matmul(dropped, incoming_value);
    result[0] = result[0].to(grad_output->scalar_type());
  }
  if (wanted[1] && grad_logsumexp) result[1] = expected.squeeze(-1);
  if (wanted[2] || wanted[3]) {
    const auto grads = second_order_query_key(dense, s, second, grad_scores, options.softcap);
    if (wanted[2]) result[2] = grads.query.to(query.scalar_type());
    if (wanted[3]) result[3] = sum_groups(grads.key, key_heads).to(key.scalar_type());
  }
  if (wanted[4] && grad_out.defined()) {
    result[4] = sum_groups(at::matmul(transposed(toward_product), grad_out), key_heads)
                    .to(value.scalar_type());
  }
  if (wanted[5] && options.attn_bias) result[5] = bias_shaped(second, *options.attn_bias);
  if (wanted[6] && options.sinks) {
    const auto per_row =
        sink_p * ((toward_sink_p.defined() ? toward_sink_p : at::zeros_like(mean)) - mean);
    result[6] = sinks_shaped(per_row.squeeze(-1), *options.sinks);
  }
  return result;
}

namespace {

// P from the row statistics, so that logsumexp is an input of its own, and its first derivatives.
struct Weights {
  DenseScores dense;
  at::Tensor probabilities;
};

Weights weights_of(const at::Tensor& query, const at::Tensor& key, const AttentionOptions& options,
                   const at::Tensor& logsumexp, const at::Tensor& residual) {
  Weights w{dense_scores(query, key, options), {}};
  const auto shifted = (w.dense.scores - logsumexp.unsqueeze(-1)) - residual.unsqueeze(-1);
  w.probabilities = at::exp(where_visible(w.dense, shifted, -kInfinity));
  return w;
}

// The gradient of P: spread over the heads if they were averaged, then through dropout.
at::Tensor toward_probabilities(const Weights& w, const at::Tensor& grad_weights,
                                bool average_heads) {
  auto grad = grad_weights.to(w.probabilities.scalar_type());
  if (average_heads) {
    const auto heads = w.probabilities.sym_size(-3);
    grad = (grad / c10::Scalar(heads)).unsqueeze(-3).expand_symint(w.probabilities.sym_sizes());
  }
  return where_visible(w.dense, times(grad, w.dense.keep), 0.0);
}

at::Tensor mean_heads(const at::Tensor& weights, bool average_heads) {
  return average_heads ? weights.mean(-3) : weights;
}

}  // namespace

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options, const at::Tensor& logsumexp,
                             const at::Tensor& logsumexp_residual, bool average_heads) {
  const WithoutAutocast without_autocast;
  const auto w = weights_of(query, key, options, logsumexp, logsumexp_residual);
  return mean_heads(times(w.probabilities, w.dense.keep), average_heads)
      .to(query.scalar_type())
      .contiguous();
}

Tensor4 attention_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                   const at::Tensor& key, const AttentionOptions& options,
                                   const at::Tensor& logsumexp,
                                   const at::Tensor& logsumexp_residual, bool average_heads,
                                   std::array<bool, 4> wanted) {
  const WithoutAutocast without_autocast;
  const auto w = weights_of(query, key, options, logsumexp, logsumexp_residual);
  const auto grad_scores = w.probabilities * toward_probabilities(w, grad_weights, average_heads);
  at::Tensor grad_query, grad_key, grad_bias, grad_logsumexp;
  if (wanted[0] || wanted[1]) {
    const auto grads = through_product(w.dense, times(grad_scores, w.dense.cap_slope));
    if (wanted[0]) grad_query = rows_first(grads.query, query.scalar_type());
    if (wanted[1])
      grad_key = rows_first(sum_groups(grads.key, key.sym_size(-3)), key.scalar_type());
  }
  if (wanted[2]) grad_bias = bias_shaped(grad_scores, *options.attn_bias);
  if (wanted[3]) grad_logsumexp = -grad_scores.sum(-1);
  return {grad_query, grad_key, grad_bias, grad_logsumexp};
}

std::array<at::Tensor, 5> attention_weights_double_backward(
    const std::array<at::Tensor, 4>& incoming, const at::Tensor& grad_weights,
    const at::Tensor& query, const at::Tensor& key, const AttentionOptions& options,
    const at::Tensor& logsumexp, const at::Tensor& logsumexp_residual, bool average_heads,
    std::array<bool, 5> wanted) {
  const WithoutAutocast without_autocast;
  const auto w = weights_of(query, key, options, logsumexp, logsumexp_residual);
  const auto& p = w.probabilities;
  const auto grad_p = toward_probabilities(w, grad_weights, average_heads);
  const auto grad_scores = p * grad_p;
  const auto s = second_order(w.dense, incoming[0], incoming[1]);
  auto toward = s.toward_scores;
  if (incoming[2].defined()) {
    toward = plus(toward, incoming[2].to(p.scalar_type()).expand_symint(p.sym_sizes()));
  }
  if (incoming[3].defined()) {
    toward = minus(toward, incoming[3].unsqueeze(-1).expand_symint(p.sym_sizes()));
  }
  if (!toward.defined()) toward = at::zeros_like(p);
  toward = where_visible(w.dense, toward, 0.0);

  const auto second = p * (toward * grad_p);
  std::array<at::Tensor, 5> result;
  if (wanted[0]) {
    result[0] =
        mean_heads(times(toward * p, w.dense.keep), average_heads).to(grad_weights.scalar_type());
  }
  if (wanted[1] || wanted[2]) {
    const auto grads = second_order_query_key(w.dense, s, second, grad_scores, options.softcap);
    if (wanted[1]) result[1] = grads.query.to(query.scalar_type());
    if (wanted[2]) result[2] = sum_groups(grads.key, key.sym_size(-3)).to(key.scalar_type());
  }
  if (wanted[3] && options.attn_bias) result[3] = bias_shaped(second, *options.attn_bias);
  if (wanted[4]) result[4] = -second.sum(-1);
  return result;
}

}  // namespace attention_ext::composite
