// The op family as this library sees it: the options struct that travels from the schema to the
// kernels, and typed entry points that go through the dispatcher (autograd, autocast, vmap, CPU or
// CUDA). Every layer includes this file; it includes ATen only. C++ programs have
// attention_ext/include/attention_ext/attention.h.
//
// Letters: B batch (any number of leading dimensions, or none), H query heads, Hkv key/value heads,
// L query length, S key length, E query/key size, Ev value size.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <tuple>

namespace attention_ext {

// Everything but query, key and value. The defaults are those of the schema.
//
// After `check_*` (csrc/common/checks.h) has seen the options, which the registered CPU and CUDA
// functions do before anything else: window_right is 0 when is_causal is set, and the windows and
// query_offset lie within +-2^61, so that sums of positions cannot overflow.
struct AttentionOptions {
  std::optional<at::Tensor> attn_mask;     // bool, (L, S) or query's dims; each dimension full or 1
  std::optional<at::Tensor> attn_bias;     // float, the same shapes; differentiable
  std::optional<at::Tensor> key_mask;      // (B, S), bool or float
  std::optional<at::Tensor> sinks;         // (H), float; differentiable
  std::optional<at::Tensor> alibi_slopes;  // (H), (B, H) or (sequences, H), float; constants
  std::optional<at::Tensor> query_offsets;  // (B), int32 or int64; packed: one per sequence
  std::optional<at::Tensor> cu_seqlens_q;   // packed: (sequences + 1), int32 or int64
  std::optional<at::Tensor> cu_seqlens_k;   // packed: the same shape and dtype rules
  std::optional<at::Tensor> rng_state;  // int64[6]: seed, offset, heads_total, first head, row, key
  c10::SymInt query_offset = 0;         // key position of query row 0
  std::optional<c10::SymInt> window_left;   // keys seen to the left of the diagonal; none: all
  std::optional<c10::SymInt> window_right;  // keys seen to the right of the diagonal; none: all
  bool is_causal = false;                   // window_right = 0
  std::optional<double> scale;              // none: 1 / sqrt(E)
  double softcap = 0.0;                     // 0: none
  double dropout_p = 0.0;
};

using Tensor4 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Tensor5 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// output (B, H, L, Ev), laid out in memory as (B, L, H, Ev); logsumexp (B, H, L);
// logsumexp_residual, the part of logsumexp that its rounding lost, of the same shape and dtype
// (float32, float64 for float64); and output_residual, the same for output, undefined where its
// rounding is that of the sums themselves (float32, float64).
Tensor4 attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const AttentionOptions& options);

// Gradients of query, key, value, attn_bias and sinks; an undefined tensor for each that is not
// wanted. A missing incoming gradient counts as zero, a missing output_residual as none lost.
Tensor5 attention_backward(const std::optional<at::Tensor>& grad_output,
                           const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query,
                           const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options, const at::Tensor& output,
                           const at::Tensor& logsumexp, const at::Tensor& logsumexp_residual,
                           const std::optional<at::Tensor>& output_residual,
                           std::array<bool, 5> wanted);

// The weights after dropout, (B, H, L, S), or their mean over the heads, (B, L, S); contiguous, in
// the query's dtype. logsumexp and its residual are those of attention with the same arguments, and
// no inputs of their own: derivatives are those of query, key, attn_bias and sinks, complete.
at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options, const at::Tensor& logsumexp,
                             const at::Tensor& logsumexp_residual, bool average_heads);

// Gradients of query, key, attn_bias and sinks.
Tensor4 attention_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                   const at::Tensor& key, const AttentionOptions& options,
                                   const at::Tensor& logsumexp,
                                   const at::Tensor& logsumexp_residual, bool average_heads,
                                   std::array<bool, 4> wanted);

}  // namespace attention_ext
