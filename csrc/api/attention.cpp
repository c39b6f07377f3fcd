// The public functions (attention_ext/attention.h) over the operators: they sort arguments, as
// attention_ext/functional.py does, and leave the checks of values to the operators.
#include "attention_ext/attention.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/randint.h>

#include <limits>

#include "api/functional.h"

namespace attention_ext {
namespace {

AttentionOptions for_op(const at::Tensor& query, const AttentionFuncOptions& o) {
  AttentionOptions options;
  options.attn_mask = given(o.attn_mask());
  options.attn_bias = given(o.attn_bias());
  if (options.attn_mask.has_value() && at::isFloatingType(options.attn_mask->scalar_type())) {
    TORCH_CHECK(!options.attn_bias.has_value(),
                "attention: a float attn_mask is the attn_bias; expected one of them, got both");
    options.attn_bias.swap(options.attn_mask);
  }
  options.key_mask = given(o.key_mask());
  options.sinks = given(o.sinks());
  options.alibi_slopes = given(o.alibi_slopes());
  options.query_offsets = given(o.query_offsets());
  options.rng_state = given(o.rng_state());
  options.query_offset = o.query_offset();
  options.window_left = o.window().first;
  options.window_right = o.window().second;
  options.is_causal = o.is_causal();
  options.scale = o.scale();
  options.softcap = o.softcap();
  options.dropout_p = o.dropout_p();
  if (options.dropout_p > 0.0 && !options.rng_state.has_value()) {
    options.rng_state = make_rng_state(query.device());
  }
  return options;
}

void expect_defined(const char* function, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value) {
  TORCH_CHECK(query.defined() && key.defined() && value.defined(), function, ": ",
              !query.defined() ? "query"
              : !key.defined() ? "key"
                               : "value",
              " must be a tensor, got an undefined one");
}

}  // namespace

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionFuncOptions& options) {
  return std::get<0>(attention_with_logsumexp(query, key, value, options));
}

std::tuple<at::Tensor, at::Tensor> attention_with_logsumexp(const at::Tensor& query,
                                                            const at::Tensor& key,
                                                            const at::Tensor& value,
                                                            const AttentionFuncOptions& options) {
  expect_defined("attention", query, key, value);
  auto result = attention(query, key, value, for_op(query, options));
  return {std::move(std::get<0>(result)), std::move(std::get<1>(result))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_with_weights(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionFuncOptions& options, bool average_heads) {
  expect_defined("attention", query, key, value);
  const AttentionOptions op_options = for_op(query, options);
  const auto [output, logsumexp, residual, _] = attention(query, key, value, op_options);
  return {output, logsumexp,
          attention_weights(query, key, op_options, logsumexp, residual, average_heads)};
}

at::Tensor varlen_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                            const AttentionFuncOptions& options) {
  return std::get<0>(
      varlen_attention_with_logsumexp(query, key, value, cu_seqlens_q, cu_seqlens_k, options));
}

std::tuple<at::Tensor, at::Tensor> varlen_attention_with_logsumexp(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
    const AttentionFuncOptions& options) {
  expect_defined("varlen_attention", query, key, value);
  for (const auto& [name, borders] :
       {std::pair{"cu_seqlens_q", &cu_seqlens_q}, std::pair{"cu_seqlens_k", &cu_seqlens_k}}) {
    TORCH_CHECK(borders->defined(), "varlen_attention: ", name,
                " must be a tensor of the sequences' borders, got an undefined one");
  }
  for (const auto& [name, x] :
       {std::pair{"query", &query}, std::pair{"key", &key}, std::pair{"value", &value}}) {
    TORCH_CHECK(x->dim() == 3, "varlen_attention: ", name,
                " must have 3 dimensions (tokens, heads, size), got shape ", x->sizes());
  }
  AttentionOptions op_options = for_op(query, options);
  if (op_options.key_mask.has_value()) {
    TORCH_CHECK(op_options.key_mask->dim() == 1,
                "varlen_attention: key_mask must have 1 dimension (tokens), got ",
                op_options.key_mask->sizes());
    op_options.key_mask = op_options.key_mask->unsqueeze(0);
  }
  op_options.cu_seqlens_q = cu_seqlens_q;
  op_options.cu_seqlens_k = cu_seqlens_k;
  const auto heads_first = [](const at::Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
  const auto result =
      attention(heads_first(query), heads_first(key), heads_first(value), op_options);
  return {std::get<0>(result).squeeze(0).transpose(0, 1), std::get<1>(result).squeeze(0)};
}

at::Tensor make_rng_state(c10::Device device) {
  const auto drawn = at::randint(std::numeric_limits<int64_t>::max(), {2},
                                 at::TensorOptions().dtype(at::kLong).device(device));
  return at::constant_pad_nd(drawn, {0, 4});
}

}  // namespace attention_ext
