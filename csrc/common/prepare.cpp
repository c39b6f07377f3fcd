#include "common/prepare.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace attention_ext {

namespace {

// (..., heads, rows, size), in memory (..., rows, heads, size), so that merging the heads is a
// view. `like` gives the leading dimensions.
at::Tensor empty_heads(const at::Tensor& like, int64_t heads, int64_t rows, int64_t size) {
  c10::SmallVector<int64_t, 6> sizes(like.sizes().begin(), like.sizes().end() - 3);
  sizes.insert(sizes.end(), {rows, heads, size});
  return at::empty(sizes, like.options()).transpose(-3, -2);
}

// The gradient of query, key or value: contiguous if its input is, so that rows of a head that are
// adjacent there are adjacent here, else as the output lies.
at::Tensor empty_gradient(const at::Tensor& of) {
  if (of.is_contiguous()) return at::empty(of.sizes(), of.options());
  return empty_heads(of, of.size(-3), of.size(-2), of.size(-1));
}

at::TensorOptions exact_options(const at::Tensor& query) {
  return query.options().dtype(accumulation_type(query.scalar_type()));
}

}  // namespace

ForwardCall::ForwardCall(bool on_device, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const AttentionOptions& options)
    : PreparedCall(on_device) {
  shape = call_shape(query, key, value.size(-1));
  const auto statistics = exact_options(query);
  output = empty_heads(query, shape.heads, shape.q_length, shape.v_size);
  logsumexp = at::empty(query.sizes().slice(0, query.dim() - 1), statistics);
  residual = at::empty(logsumexp.sizes(), statistics);
  if (accumulation_type(query.scalar_type()) != query.scalar_type()) {
    output_residual = empty_heads(query, shape.heads, shape.q_length, shape.v_size);
  }

  fill_params(params, shape, query, key, value, options, storage);
  params.output = make_view(output, shape.batch_sizes, storage);
  params.logsumexp = make_row_view(logsumexp, shape.batch_sizes, storage);
  params.residual = make_row_view(residual, shape.batch_sizes, storage);
  if (output_residual.defined()) {
    params.output_residual = make_view(output_residual, shape.batch_sizes, storage);
  }
}

void GradientCall::fill_query_and_key(const at::Tensor& query, const at::Tensor& key,
                                      bool wants_query, bool wants_key) {
  if (wants_query) {
    grad_query = empty_gradient(query);
    params.grad_query = make_view(grad_query, shape.batch_sizes, storage);
  }
  if (wants_key) {
    grad_key = empty_gradient(key);
    params.grad_key = make_view(grad_key, shape.batch_sizes, storage);
  }
}

void GradientCall::fill_bias(const at::Tensor& bias, const at::TensorOptions& exact) {
  // With no batch or no heads nobody writes it.
  const bool written = shape.batch * shape.heads > 0;
  grad_bias = written ? at::empty(bias.sizes(), exact) : at::zeros(bias.sizes(), exact);
  params.grad_bias = make_view(grad_bias, shape.batch_sizes, storage);
  // Every element has a place: dimensions of size 1 are told by bias_size.
  params.bias_size[0] =
      bias.dim() > 3 ? c10::multiply_integers(bias.sizes().slice(0, bias.dim() - 3)) : 1;
  params.bias_size[1] = bias.dim() > 2 ? bias.size(-3) : 1;
  params.bias_size[2] = bias.size(-2);
  params.bias_size[3] = bias.size(-1);
}

void GradientCall::fill_sinks(const at::Tensor& sinks, const at::TensorOptions& exact) {
  grad_sinks = at::empty(sinks.sizes(), exact);
  params.grad_sinks = grad_sinks.data_ptr();
}

void GradientCall::fill_delta(const at::Tensor& logsumexp) {
  delta = at::empty(logsumexp.sizes(), logsumexp.options());
  params.delta = make_row_view(delta, shape.batch_sizes, storage);
}

GradientCall::GradientCall(bool on_device, const std::optional<at::Tensor>& grad_output,
                           const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query,
                           const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options, const at::Tensor& output,
                           const at::Tensor& logsumexp, const at::Tensor& logsumexp_residual,
                           const std::optional<at::Tensor>& output_residual,
                           std::array<bool, 5> wanted)
    : PreparedCall(on_device) {
  shape = call_shape(query, key, value.size(-1));
  const auto exact = exact_options(query);
  fill_params(params, shape, query, key, value, options, storage);
  params.output = make_view(output, shape.batch_sizes, storage);
  if (output_residual && output_residual->defined()) {
    params.output_residual = make_view(*output_residual, shape.batch_sizes, storage);
  }
  params.logsumexp = make_row_view(logsumexp, shape.batch_sizes, storage);
  params.residual = make_row_view(logsumexp_residual, shape.batch_sizes, storage);
  if (grad_output && grad_output->defined()) {
    params.grad_output = make_view(*grad_output, shape.batch_sizes, storage);
  }
  if (grad_logsumexp && grad_logsumexp->defined()) {
    params.grad_logsumexp = make_row_view(*grad_logsumexp, shape.batch_sizes, storage);
  }
  fill_query_and_key(query, key, wanted[0], wanted[1]);
  if (wanted[2]) {
    grad_value = empty_gradient(value);
    // Logsumexp does not depend on the values.
    if (params.grad_output.defined()) {
      params.grad_value = make_view(grad_value, shape.batch_sizes, storage);
    }
  }
  if (wanted[3]) fill_bias(*options.attn_bias, exact);
  if (wanted[4]) fill_sinks(*options.sinks, exact);
  if (on_device) fill_delta(logsumexp);
}

GradientCall::GradientCall(bool on_device, const at::Tensor& grad_weights, const at::Tensor& query,
                           const at::Tensor& key, const AttentionOptions& options,
                           const at::Tensor& logsumexp, const at::Tensor& logsumexp_residual,
                           std::array<bool, 4> wanted, bool average_heads)
    : PreparedCall(on_device) {
  shape = call_shape(query, key, /*v_size=*/0);
  const auto exact = exact_options(query);
  fill_params(params, shape, query, key, at::Tensor(), options, storage);
  params.logsumexp = make_row_view(logsumexp, shape.batch_sizes, storage);
  params.residual = make_row_view(logsumexp_residual, shape.batch_sizes, storage);
  params.grad_weights = make_view(average_heads ? grad_weights.unsqueeze(-3) : grad_weights,
                                  shape.batch_sizes, storage);
  if (grad_weights.size(-1) == 1) params.grad_weights.stride[3] = 0;
  params.grad_weights_scale =
      average_heads && shape.heads > 0 ? 1.0 / static_cast<double>(shape.heads) : 1.0;
  fill_query_and_key(query, key, wanted[0], wanted[1]);
  if (wanted[2]) fill_bias(*options.attn_bias, exact);
  if (wanted[3]) fill_sinks(*options.sinks, exact);
  fill_delta(logsumexp);
}

Tensor5 GradientCall::gradients(const AttentionOptions& options) && {
  if (grad_bias.defined()) grad_bias = grad_bias.to(options.attn_bias->scalar_type());
  if (grad_sinks.defined()) grad_sinks = grad_sinks.to(options.sinks->scalar_type());
  return {std::move(grad_query), std::move(grad_key), std::move(grad_value), std::move(grad_bias),
          std::move(grad_sinks)};
}

Tensor4 GradientCall::weights_gradients(const AttentionOptions& options) && {
  auto [query, key, value, bias, sinks] = std::move(*this).gradients(options);
  return {std::move(query), std::move(key), std::move(bias), std::move(sinks)};
}

WeightsCall::WeightsCall(bool on_device, const at::Tensor& query, const at::Tensor& key,
                         const AttentionOptions& options, const at::Tensor& logsumexp,
                         const at::Tensor& logsumexp_residual, bool average_heads)
    : PreparedCall(on_device) {
  shape = call_shape(query, key, /*v_size=*/0);
  c10::SmallVector<int64_t, 6> sizes(shape.batch_sizes.begin(), shape.batch_sizes.end());
  if (!average_heads) sizes.push_back(shape.heads);
  sizes.insert(sizes.end(), {shape.q_length, shape.k_length});
  weights = at::empty(sizes, query.options());
  if (weights.numel() == 0) return;

  fill_params(params, shape, query, key, at::Tensor(), options, storage);
  params.logsumexp = make_row_view(logsumexp, shape.batch_sizes, storage);
  params.residual = make_row_view(logsumexp_residual, shape.batch_sizes, storage);
  params.average = average_heads;
  params.weights =
      make_view(average_heads ? weights.unsqueeze(-3) : weights, shape.batch_sizes, storage);
}

}  // namespace attention_ext
