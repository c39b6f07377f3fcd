// What each op returns, without data: shapes, dtypes and strides exactly as the real kernels give
// them, on symbolic sizes. Gradients of query, key and value are contiguous where these are, and
// lie in memory as (B, L, H, E) where not, like the output; the bias's and the sinks' are
// contiguous.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "common/checks.h"
#include "ops/signature.h"

namespace attention_ext {
namespace {

c10::SymDimVector leading(const at::Tensor& tensor, int64_t dims) {
  const auto sizes = tensor.sym_sizes();
  return c10::SymDimVector(sizes.begin(), sizes.begin() + dims);
}

at::Tensor contiguous(const c10::SymDimVector& sizes, const at::Tensor& like,
                      at::ScalarType dtype) {
  return at::empty_symint(sizes, like.options().dtype(dtype));
}

// (..., heads, length, size), laid out as (..., length, heads, size).
at::Tensor rows_first(const at::Tensor& like, const c10::SymInt& heads, const c10::SymInt& length,
                      const c10::SymInt& size) {
  auto sizes = leading(like, like.dim() - 3);
  sizes.append({length, heads, size});
  return contiguous(sizes, like, like.scalar_type()).transpose(-2, -3);
}

at::Tensor contiguous_like(const at::Tensor& tensor) {
  return contiguous(leading(tensor, tensor.dim()), tensor, tensor.scalar_type());
}

at::Tensor gradient_of(const at::Tensor& input) {
  if (input.is_contiguous_or_false()) return contiguous_like(input);
  return rows_first(input, input.sym_size(-3), input.sym_size(-2), input.sym_size(-1));
}

at::ScalarType accumulation_of(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor4 attention_meta(TensorArg query, TensorArg key, TensorArg value,
                       const AttentionOptions& options) {
  check_attention(query, key, value, options);
  const auto rows = leading(query, query.dim() - 1);
  const auto output = [&] {
    return rows_first(query, query.sym_size(-3), query.sym_size(-2), value.sym_size(-1));
  };
  const bool rounded = query.scalar_type() != accumulation_of(query);
  return {output(), contiguous(rows, query, accumulation_of(query)),
          contiguous(rows, query, accumulation_of(query)), rounded ? output() : at::Tensor()};
}

Tensor5 attention_backward_meta(OptionalArg grad_output, OptionalArg grad_logsumexp,
                                TensorArg query, TensorArg key, TensorArg value,
                                const AttentionOptions& options, TensorArg output,
                                TensorArg logsumexp, TensorArg logsumexp_residual,
                                OptionalArg output_residual, std::array<bool, 5> wanted) {
  check_attention_backward(grad_output, grad_logsumexp, query, key, value, options, output,
                           logsumexp, logsumexp_residual, output_residual, wanted);
  Tensor5 grads;
  if (wanted[0]) std::get<0>(grads) = gradient_of(query);
  if (wanted[1]) std::get<1>(grads) = gradient_of(key);
  if (wanted[2]) std::get<2>(grads) = gradient_of(value);
  if (wanted[3]) std::get<3>(grads) = contiguous_like(*options.attn_bias);
  if (wanted[4]) std::get<4>(grads) = contiguous_like(*options.sinks);
  return grads;
}

at::Tensor attention_weights_meta(TensorArg query, TensorArg key, const AttentionOptions& options,
                                  TensorArg logsumexp, TensorArg logsumexp_residual,
                                  bool average_heads) {
  check_attention_weights(query, key, options, logsumexp, logsumexp_residual);
  auto sizes = leading(query, query.dim() - (average_heads ? 3 : 2));
  sizes.append({query.sym_size(-2), key.sym_size(-2)});
  return contiguous(sizes, query, query.scalar_type());
}

Tensor4 attention_weights_backward_meta(TensorArg grad_weights, TensorArg query, TensorArg key,
                                        const AttentionOptions& options, TensorArg logsumexp,
                                        TensorArg logsumexp_residual, std::array<bool, 4> wanted,
                                        bool average_heads) {
  check_attention_weights_backward(grad_weights, query, key, options, logsumexp, logsumexp_residual,
                                   average_heads, wanted);
  Tensor4 grads;
  if (wanted[0]) std::get<0>(grads) = gradient_of(query);
  if (wanted[1]) std::get<1>(grads) = gradient_of(key);
  if (wanted[2]) std::get<2>(grads) = contiguous_like(*options.attn_bias);
  if (wanted[3]) std::get<3>(grads) = contiguous_like(*options.sinks);
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(attention_ext, Meta, m) {
  m.impl("attention", AttentionOp::unboxed<attention_meta>);
  m.impl("attention_backward", AttentionBackwardOp::unboxed<attention_backward_meta>);
  m.impl("attention_weights", AttentionWeightsOp::unboxed<attention_weights_meta>);
  m.impl("attention_weights_backward",
         AttentionWeightsBackwardOp::unboxed<attention_weights_backward_meta>);
}

// No kernels here: the checks say so in their own words.
#define REFUSE(KEY)                                                                      \
  TORCH_LIBRARY_IMPL(attention_ext, KEY, m) {                                            \
    m.impl("attention", AttentionOp::unboxed<attention_meta>);                           \
    m.impl("attention_backward", AttentionBackwardOp::unboxed<attention_backward_meta>); \
    m.impl("attention_weights", AttentionWeightsOp::unboxed<attention_weights_meta>);    \
    m.impl("attention_weights_backward",                                                 \
           AttentionWeightsBackwardOp::unboxed<attention_weights_backward_meta>);        \
  }
REFUSE(SparseCPU)
REFUSE(SparseCUDA)
REFUSE(SparseMeta)
REFUSE(SparseCsrCPU)
REFUSE(SparseCsrCUDA)
REFUSE(NestedTensorCPU)
REFUSE(NestedTensorCUDA)
REFUSE(MkldnnCPU)
REFUSE(QuantizedCPU)
REFUSE(QuantizedCUDA)

}  // namespace attention_ext
