// Checks of query, key and value, of the tensors of the backward ops, and the entry points: see
// checks.h.
#include "common/checks.h"

#include <c10/core/GradMode.h>

#include "common/checks_call.h"

namespace attention_ext {

using namespace checks;

namespace {

void check_query(const char* op, const at::Tensor& query) {
  CHECK_ARGUMENT(op, is_dense(query), "query must be a dense strided tensor, got layout ",
                 layout_of(query));
  const auto dtype = query.scalar_type();
  CHECK_ARGUMENT(
      op,
      dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
      "query must be float64, float32, bfloat16 or float16, got ", dtype);
  CHECK_ARGUMENT(op, query.dim() >= 3,
                 "query must have at least 3 dimensions (heads, length, size), got ",
                 query.sym_sizes());
}

void check_key(const char* op, const at::Tensor& query, const at::Tensor& key) {
  CHECK_ARGUMENT(op, is_dense(key), "key must be a dense strided tensor, got layout ",
                 layout_of(key));
  CHECK_ARGUMENT(op, key.device() == query.device(), "key must be on the query's device ",
                 query.device(), ", got ", key.device());
  CHECK_ARGUMENT(op, key.scalar_type() == query.scalar_type(), "key must have the query's dtype ",
                 query.scalar_type(), ", got ", key.scalar_type());
  CHECK_ARGUMENT(op, key.dim() == query.dim(),
                 "key must have the query's number of dimensions, got ", key.sym_sizes(),
                 " beside a query of ", query.sym_sizes());
  const auto q = query.sym_sizes(), k = key.sym_sizes();
  const auto batch = q.size() - 3;
  CHECK_ARGUMENT(op, same(k.slice(0, batch), q.slice(0, batch)),
                 "key must have the query's batch dimensions, got ", k, " beside a query of ", q);
  CHECK_ARGUMENT(op, k[batch + 2].sym_eq(q[batch + 2]), "key must have the query's size E, got ", k,
                 " beside a query of ", q);
  if (TORCH_GUARD_OR_FALSE(k[batch].sym_eq(0))) {
    CHECK_ARGUMENT(op, q[batch].sym_eq(0), "key has no heads, but the query has: ", k,
                   " beside a query of ", q);
    return;
  }
  CHECK_ARGUMENT(op, (q[batch] % k[batch]).sym_eq(0),
                 "query's heads must be a multiple of the key's heads, got ", q[batch], " and ",
                 k[batch]);
}

void check_value(const char* op, const at::Tensor& query, const at::Tensor& key,
                 const at::Tensor& value) {
  CHECK_ARGUMENT(op, is_dense(value), "value must be a dense strided tensor, got layout ",
                 layout_of(value));
  CHECK_ARGUMENT(op, value.device() == query.device(), "value must be on the query's device ",
                 query.device(), ", got ", value.device());
  CHECK_ARGUMENT(op, value.scalar_type() == query.scalar_type(),
                 "value must have the query's dtype ", query.scalar_type(), ", got ",
                 value.scalar_type());
  CHECK_ARGUMENT(op, value.dim() == query.dim(),
                 "value must have the query's number of dimensions, got ", value.sym_sizes(),
                 " beside a query of ", query.sym_sizes());
  const auto k = key.sym_sizes(), v = value.sym_sizes();
  const auto batch = k.size() - 3;
  CHECK_ARGUMENT(op, same(v.slice(0, batch), k.slice(0, batch)),
                 "value must have the query's batch dimensions, got ", v, " beside a query of ",
                 query.sym_sizes());
  CHECK_ARGUMENT(op, v[batch].sym_eq(k[batch]), "value must have the key's number of heads, got ",
                 v, " beside a key of ", k);
  CHECK_ARGUMENT(op, v[batch + 1].sym_eq(k[batch + 1]), "value must have the key's length S, got ",
                 v, " beside a key of ", k);
}

Call describe(const char* op, const at::Tensor& query, const at::Tensor& key) {
  const auto q = query.sym_sizes();
  const auto batch = q.size() - 3;
  const auto dtype = query.scalar_type();
  return {op,
          query,
          q.slice(0, batch),
          q[batch],
          q[batch + 1],
          key.sym_size(-2),
          dtype,
          dtype == at::kDouble ? at::kDouble : at::kFloat,
          query.device()};
}

void check_logsumexp(const Call& call, const at::Tensor& logsumexp) {
  const auto rows = join(call.batch, {call.heads, call.queries});
  CHECK_ARGUMENT(call.op, is_dense(logsumexp),
                 "logsumexp must be a dense strided tensor, got layout ", layout_of(logsumexp));
  CHECK_ARGUMENT(call.op, logsumexp.device() == call.device,
                 "logsumexp must be on the query's device ", call.device, ", got ",
                 logsumexp.device());
  CHECK_ARGUMENT(call.op, logsumexp.scalar_type() == call.accumulation, "logsumexp must be ",
                 call.accumulation, ", got ", logsumexp.scalar_type());
  CHECK_ARGUMENT(call.op, same(logsumexp.sym_sizes(), rows), "logsumexp must have the shape ",
                 Sizes(rows), ", got ", logsumexp.sym_sizes());
}

void check_residual(const Call& call, const at::Tensor& residual) {
  const auto rows = join(call.batch, {call.heads, call.queries});
  CHECK_ARGUMENT(call.op, is_dense(residual),
                 "logsumexp_residual must be a dense strided tensor, got layout ",
                 layout_of(residual));
  CHECK_ARGUMENT(call.op, residual.device() == call.device,
                 "logsumexp_residual must be on the query's device ", call.device, ", got ",
                 residual.device());
  CHECK_ARGUMENT(call.op, residual.scalar_type() == call.accumulation,
                 "logsumexp_residual must be ", call.accumulation, ", got ",
                 residual.scalar_type());
  CHECK_ARGUMENT(call.op, same(residual.sym_sizes(), rows),
                 "logsumexp_residual must have the shape ", Sizes(rows), ", got ",
                 residual.sym_sizes());
}

void check_output(const Call& call, const at::Tensor& output, const c10::SymDimVector& expected) {
  CHECK_ARGUMENT(call.op, is_dense(output), "output must be a dense strided tensor, got layout ",
                 layout_of(output));
  CHECK_ARGUMENT(call.op, output.device() == call.device, "output must be on the query's device ",
                 call.device, ", got ", output.device());
  CHECK_ARGUMENT(call.op, output.scalar_type() == call.dtype, "output must have the query's dtype ",
                 call.dtype, ", got ", output.scalar_type());
  CHECK_ARGUMENT(call.op, same(output.sym_sizes(), expected), "output must have the shape ",
                 Sizes(expected), ", got ", output.sym_sizes());
}

void check_output_residual(const Call& call, const at::Tensor& residual,
                           const c10::SymDimVector& expected) {
  CHECK_ARGUMENT(call.op, is_dense(residual),
                 "output_residual must be a dense strided tensor, got layout ",
                 layout_of(residual));
  CHECK_ARGUMENT(call.op, residual.device() == call.device,
                 "output_residual must be on the query's device ", call.device, ", got ",
                 residual.device());
  CHECK_ARGUMENT(call.op, residual.scalar_type() == call.dtype,
                 "output_residual must have the query's dtype ", call.dtype, ", got ",
                 residual.scalar_type());
  CHECK_ARGUMENT(call.op, same(residual.sym_sizes(), expected),
                 "output_residual must have the output's shape ", Sizes(expected), ", got ",
                 residual.sym_sizes());
}

void check_grad_output(const Call& call, const at::Tensor& grad,
                       const c10::SymDimVector& expected) {
  CHECK_ARGUMENT(call.op, is_dense(grad), "grad_output must be a dense strided tensor, got layout ",
                 layout_of(grad));
  CHECK_ARGUMENT(call.op, grad.device() == call.device,
                 "grad_output must be on the query's device ", call.device, ", got ",
                 grad.device());
  CHECK_ARGUMENT(call.op, grad.scalar_type() == call.dtype,
                 "grad_output must have the query's dtype ", call.dtype, ", got ",
                 grad.scalar_type());
  CHECK_ARGUMENT(call.op, same(grad.sym_sizes(), expected),
                 "grad_output must have the output's shape ", Sizes(expected), ", got ",
                 grad.sym_sizes());
}

void check_grad_logsumexp(const Call& call, const at::Tensor& grad) {
  const auto rows = join(call.batch, {call.heads, call.queries});
  CHECK_ARGUMENT(call.op, is_dense(grad),
                 "grad_logsumexp must be a dense strided tensor, got layout ", layout_of(grad));
  CHECK_ARGUMENT(call.op, grad.device() == call.device,
                 "grad_logsumexp must be on the query's device ", call.device, ", got ",
                 grad.device());
  CHECK_ARGUMENT(call.op, grad.scalar_type() == call.accumulation, "grad_logsumexp must be ",
                 call.accumulation, ", got ", grad.scalar_type());
  CHECK_ARGUMENT(call.op, same(grad.sym_sizes(), rows),
                 "grad_logsumexp must have logsumexp's shape ", Sizes(rows), ", got ",
                 grad.sym_sizes());
}

void check_grad_weights(const Call& call, const at::Tensor& grad, bool average_heads) {
  const auto expected =
      average_heads ? join(call.batch, {call.queries, call.keys}) : scores_shape(call);
  CHECK_ARGUMENT(call.op, is_dense(grad),
                 "grad_weights must be a dense strided tensor, got layout ", layout_of(grad));
  CHECK_ARGUMENT(call.op, grad.device() == call.device,
                 "grad_weights must be on the query's device ", call.device, ", got ",
                 grad.device());
  CHECK_ARGUMENT(call.op, grad.scalar_type() == call.dtype,
                 "grad_weights must have the query's dtype ", call.dtype, ", got ",
                 grad.scalar_type());
  CHECK_ARGUMENT(call.op, same(grad.sym_sizes(), expected),
                 "grad_weights must have the weights' shape ", Sizes(expected), ", got ",
                 grad.sym_sizes());
}

Call check_scores_of(const char* op, const at::Tensor& query, const at::Tensor& key,
                     const AttentionOptions& options) {
  check_query(op, query);
  check_key(op, query, key);
  CHECK_ARGUMENT(op, !options.cu_seqlens_q && !options.cu_seqlens_k,
                 "cu_seqlens do not go with weights: packed sequences have no dense weights, got "
                 "cu_seqlens beside a query of ",
                 query.sym_sizes());
  return describe(op, query, key);
}

}  // namespace

AttentionOptions check_attention(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value, const AttentionOptions& options) {
  const char* op = "attention";
  check_query(op, query);
  check_key(op, query, key);
  check_value(op, query, key, value);
  return check_options(describe(op, query, key), options);
}

AttentionOptions check_attention_backward(const std::optional<at::Tensor>& grad_output,
                                          const std::optional<at::Tensor>& grad_logsumexp,
                                          const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const AttentionOptions& options,
                                          const at::Tensor& output, const at::Tensor& logsumexp,
                                          const at::Tensor& logsumexp_residual,
                                          const std::optional<at::Tensor>& output_residual,
                                          std::array<bool, 5> wanted) {
  const char* op = "attention_backward";
  check_query(op, query);
  check_key(op, query, key);
  check_value(op, query, key, value);
  const auto call = describe(op, query, key);
  auto normal = check_options(call, options);
  const auto expected = join(call.batch, {call.heads, call.queries, value.sym_size(-1)});
  check_output(call, output, expected);
  check_logsumexp(call, logsumexp);
  check_residual(call, logsumexp_residual);
  if (output_residual) check_output_residual(call, *output_residual, expected);
  if (grad_output) check_grad_output(call, *grad_output, expected);
  if (grad_logsumexp) check_grad_logsumexp(call, *grad_logsumexp);
  CHECK_ARGUMENT(op, !wanted[3] || options.attn_bias,
                 "wanted asks for the gradient of attn_bias, which must be given, got None");
  CHECK_ARGUMENT(op, !wanted[4] || options.sinks,
                 "wanted asks for the gradient of sinks, which must be given, got None");
  return normal;
}

AttentionOptions check_attention_weights(const at::Tensor& query, const at::Tensor& key,
                                         const AttentionOptions& options,
                                         const at::Tensor& logsumexp,
                                         const at::Tensor& logsumexp_residual) {
  const auto call = check_scores_of("attention_weights", query, key, options);
  auto normal = check_options(call, options);
  check_logsumexp(call, logsumexp);
  check_residual(call, logsumexp_residual);
  return normal;
}

AttentionOptions check_attention_weights_backward(const at::Tensor& grad_weights,
                                                  const at::Tensor& query, const at::Tensor& key,
                                                  const AttentionOptions& options,
                                                  const at::Tensor& logsumexp,
                                                  const at::Tensor& logsumexp_residual,
                                                  bool average_heads, std::array<bool, 4> wanted) {
  const auto call = check_scores_of("attention_weights_backward", query, key, options);
  auto normal = check_options(call, options);
  check_logsumexp(call, logsumexp);
  check_residual(call, logsumexp_residual);
  check_grad_weights(call, grad_weights, average_heads);
  CHECK_ARGUMENT(
      call.op, !wanted[2] || options.attn_bias,
      "wanted asks for the weights' gradient of attn_bias, which must be given, got None");
  CHECK_ARGUMENT(call.op, !wanted[3] || options.sinks,
                 "wanted asks for the weights' gradient of sinks, which must be given, got None");
  return normal;
}

void check_constants(const char* op, const AttentionOptions& options) {
  const auto differentiated = [](const std::optional<at::Tensor>& tensor) {
    if (!tensor || !at::isFloatingType(tensor->scalar_type())) return false;
    return (tensor->requires_grad() && c10::GradMode::is_enabled()) ||
           tensor->_fw_grad(/*level=*/0).defined();
  };
  CHECK_ARGUMENT(
      op, !differentiated(options.alibi_slopes),
      "alibi_slopes are constants and must not require grad (a learned bias is attn_bias), got "
      "a tensor that does");
  CHECK_ARGUMENT(
      op, !differentiated(options.key_mask),
      "key_mask is a constant and must not require grad (a learned bias is attn_bias), got a "
      "tensor that does");
}

}  // namespace attention_ext
