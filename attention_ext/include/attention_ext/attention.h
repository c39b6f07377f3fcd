// Fused masked attention for C++ programs: the functions of the Python package's functional API,
// with its meanings and defaults. They call the dispatcher, so that autograd, autocast,
// torch::manual_seed, the CPU and the CUDA kernels are those that Python gets.
//
//   namespace ae = attention_ext;
//   const auto options = ae::AttentionFuncOptions().is_causal(true).softcap(30.0);
//   at::Tensor out = ae::attention(q, k, v, options);
//
// Letters: B any number of batch dimensions, none included; H query heads, Hkv key/value heads (H a
// multiple of Hkv: consecutive query heads share one); L queries, S keys; E and Ev head sizes.
//
// Errors: every function throws c10::Error for an argument of a wrong shape, dtype, device, layout
// or value; the text names the argument, what was expected and what came. Nested tensors are
// refused: varlen_attention takes their values and offsets.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>
#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

namespace attention_ext {

// How many keys a query sees to the left and to the right of its own position; no value: all of
// them.
using Window = std::pair<std::optional<int64_t>, std::optional<int64_t>>;

// What attention() takes beside query, key and value. A tensor that is not set takes no part.
struct AttentionFuncOptions {
  /// bool, true = takes part: (L, S), or as many dimensions as the query, each the full size or 1.
  /// A float mask is taken as `attn_bias`. Not for packed sequences.
  TORCH_ARG(at::Tensor, attn_mask);
  /// Added to the scores; the shapes of `attn_mask`; the query's dtype or float32 (float64 with
  /// float64). -inf hides the pair. Differentiable. Not for packed sequences.
  TORCH_ARG(at::Tensor, attn_bias);
  /// (B, S), bool (true = takes part) or float (added to the scores, a constant).
  TORCH_ARG(at::Tensor, key_mask);
  /// Query row i sees the keys j <= i + query_offset.
  TORCH_ARG(bool, is_causal) = false;
  /// `{127, 0}` is the causal window of 128 keys. Default: no window.
  TORCH_ARG(Window, window);
  /// Key position of query row 0, in keys: 0 is torch's top-left causal alignment, S - L the
  /// bottom-right one.
  TORCH_ARG(int64_t, query_offset) = 0;
  /// The same for each sequence: int32 or int64, (B); packed: one for each sequence.
  TORCH_ARG(at::Tensor, query_offsets);
  /// If positive, scores become softcap * tanh(score / softcap).
  TORCH_ARG(double, softcap) = 0.0;
  /// (H), one more logit in each softmax's denominator, without a value. Differentiable.
  TORCH_ARG(at::Tensor, sinks);
  /// (H) or (B, H); packed: (H) or (sequences, H). Constants.
  TORCH_ARG(at::Tensor, alibi_slopes);
  /// Factor of the dot products. Default: 1 / sqrt(E).
  TORCH_ARG(std::optional<double>, scale);
  /// Probability of dropping a weight, rounded to 1/65536. Always obeyed.
  TORCH_ARG(double, dropout_p) = 0.0;
  /// From make_rng_state(). Default: drawn from the query's device's default generator.
  TORCH_ARG(at::Tensor, rng_state);
};

// query (B, H, L, E), key (B, Hkv, S, E), value (B, Hkv, S, Ev), any strides, one dtype: float64,
// float32, bfloat16 or float16. Returns (B, H, L, Ev), laid out in memory as (B, L, H, Ev). A row
// that sees no key is 0.
C10_EXPORT at::Tensor attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const AttentionFuncOptions& options = {});

// (output, logsumexp): the natural logarithm of each row's softmax denominator, (B, H, L), float32
// (float64 for float64), differentiable.
C10_EXPORT std::tuple<at::Tensor, at::Tensor> attention_with_logsumexp(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionFuncOptions& options = {});

// (output, logsumexp, weights): the weights after dropout, (B, H, L, S), or with average_heads
// their mean over the heads, (B, L, S), made without ever holding all of them; differentiable.
C10_EXPORT std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_with_weights(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionFuncOptions& options = {}, bool average_heads = false);

// Packed sequences: number n is rows cu_seqlens[n] .. cu_seqlens[n + 1] - 1. query (T, H, E), key
// (Tk, Hkv, E), value (Tk, Hkv, Ev); cu_seqlens_q and cu_seqlens_k (sequences + 1), int32 or int64,
// from 0, never falling, ending at T and Tk. Positions count within each sequence; key_mask is
// (Tk). Returns (T, H, Ev).
C10_EXPORT at::Tensor varlen_attention(const at::Tensor& query, const at::Tensor& key,
                                       const at::Tensor& value, const at::Tensor& cu_seqlens_q,
                                       const at::Tensor& cu_seqlens_k,
                                       const AttentionFuncOptions& options = {});

// (output, logsumexp (H, T)).
C10_EXPORT std::tuple<at::Tensor, at::Tensor> varlen_attention_with_logsumexp(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
    const AttentionFuncOptions& options = {});

// A random state for dropout, int64 (6), from the device's default generator; fits any call. Two
// calls with the same state drop the same weights.
C10_EXPORT at::Tensor make_rng_state(c10::Device device = c10::kCPU);

}  // namespace attention_ext
