// What the op family IS: its schemas. One TORCH_LIBRARY block; kernels register elsewhere, by
// dispatch key.
#include <torch/library.h>

#include <string>

namespace {

// Tensors are positional (vmap's registration refuses keyword-only ones), scalars keyword-only.
const std::string kTensors =
    "Tensor? attn_mask=None, Tensor? attn_bias=None, Tensor? key_mask=None, Tensor? sinks=None, "
    "Tensor? alibi_slopes=None, Tensor? query_offsets=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? rng_state=None";
// The same for ops with further tensors behind them, where a default is not allowed.
const std::string kRequiredTensors =
    "Tensor? attn_mask, Tensor? attn_bias, Tensor? key_mask, Tensor? sinks, Tensor? alibi_slopes, "
    "Tensor? query_offsets, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rng_state";
const std::string kScalars =
    "*, SymInt query_offset=0, SymInt? window_left=None, SymInt? window_right=None, "
    "bool is_causal=False, float? scale=None, float softcap=0.0, float dropout_p=0.0";

}  // namespace

TORCH_LIBRARY(attention_ext, m) {
  const auto define = [&m](const std::string& schema) {
    m.def(torch::schema(schema.c_str()), {at::Tag::pt2_compliant_tag});
  };
  define("attention(Tensor query, Tensor key, Tensor value, " + kTensors + ", " + kScalars +
         ") -> (Tensor output, Tensor logsumexp, Tensor logsumexp_residual, "
         "Tensor output_residual)");
  // AOTInductor's packages cannot say that an output is undefined, as output_residual is for
  // float32.
  define("_attention_without_output_residual(Tensor query, Tensor key, Tensor value, " + kTensors +
         ", " + kScalars + ") -> (Tensor output, Tensor logsumexp, Tensor logsumexp_residual)");
  define(
      "attention_backward(Tensor? grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, "
      "Tensor value, " +
      kRequiredTensors +
      ", Tensor output, Tensor logsumexp, Tensor logsumexp_residual, "
      "Tensor? output_residual, bool[5] wanted, " +
      kScalars + ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  define("attention_weights(Tensor query, Tensor key, " + kRequiredTensors +
         ", Tensor logsumexp, Tensor logsumexp_residual, " + kScalars +
         ", bool average_heads=False) -> Tensor");
  define("attention_weights_backward(Tensor grad_weights, Tensor query, Tensor key, " +
         kRequiredTensors + ", Tensor logsumexp, Tensor logsumexp_residual, bool[4] wanted, " +
         kScalars + ", bool average_heads=False) -> (Tensor, Tensor, Tensor, Tensor)");
}
