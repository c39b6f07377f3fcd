// One place that knows the order of the schema's arguments. Every layer (ops, autograd, autocast,
// functorch, cpu, cuda) writes packed functions over AttentionOptions; `unboxed<F>` turns one into
// the flat function that the dispatcher wants, and `call` spreads the options again over a cached
// typed handle.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

#include "ops/attention.h"

namespace attention_ext {

using OptionalTensor = std::optional<at::Tensor>;

template <typename... T>
struct Types {};

// The schema's order is: head, the nine optional tensors, middle, the scalars, tail.
template <typename Self, typename Result, typename Head, typename Middle, typename Tail>
struct Signature;

template <typename Self, typename Result, typename... Head, typename... Middle, typename... Tail>
struct Signature<Self, Result, Types<Head...>, Types<Middle...>, Types<Tail...>> {
  using Packed = Result(Head..., const AttentionOptions&, Middle..., Tail...);
  using Flat = Result(Head..., const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                      Middle..., c10::SymInt, std::optional<c10::SymInt>,
                      std::optional<c10::SymInt>, bool, std::optional<double>, double, double,
                      Tail...);

  template <Packed* F>
  static Result unboxed(Head... head, const OptionalTensor& attn_mask,
                        const OptionalTensor& attn_bias, const OptionalTensor& key_mask,
                        const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
                        const OptionalTensor& query_offsets, const OptionalTensor& cu_seqlens_q,
                        const OptionalTensor& cu_seqlens_k, const OptionalTensor& rng_state,
                        Middle... middle, c10::SymInt query_offset,
                        std::optional<c10::SymInt> window_left,
                        std::optional<c10::SymInt> window_right, bool is_causal,
                        std::optional<double> scale, double softcap, double dropout_p,
                        Tail... tail) {
    const AttentionOptions options{attn_mask,
                                   attn_bias,
                                   key_mask,
                                   sinks,
                                   alibi_slopes,
                                   query_offsets,
                                   cu_seqlens_q,
                                   cu_seqlens_k,
                                   rng_state,
                                   std::move(query_offset),
                                   std::move(window_left),
                                   std::move(window_right),
                                   is_causal,
                                   scale,
                                   softcap,
                                   dropout_p};
    return F(head..., options, middle..., tail...);
  }

  static Result call(Head... head, const AttentionOptions& options, Middle... middle,
                     Tail... tail) {
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow(Self::kName, "").template typed<Flat>();
    return handle.call(head..., options.attn_mask, options.attn_bias, options.key_mask,
                       options.sinks, options.alibi_slopes, options.query_offsets,
                       options.cu_seqlens_q, options.cu_seqlens_k, options.rng_state, middle...,
                       options.query_offset, options.window_left, options.window_right,
                       options.is_causal, options.scale, options.softcap, options.dropout_p,
                       tail...);
  }
};

using TensorArg = const at::Tensor&;
using OptionalArg = const OptionalTensor&;

struct AttentionOp
    : Signature<AttentionOp, Tensor4, Types<TensorArg, TensorArg, TensorArg>, Types<>, Types<>> {
  static constexpr const char* kName = "attention_ext::attention";
};

struct AttentionBackwardOp
    : Signature<AttentionBackwardOp, Tensor5,
                Types<OptionalArg, OptionalArg, TensorArg, TensorArg, TensorArg>,
                Types<TensorArg, TensorArg, TensorArg, OptionalArg, std::array<bool, 5>>, Types<>> {
  static constexpr const char* kName = "attention_ext::attention_backward";
};

struct AttentionWeightsOp : Signature<AttentionWeightsOp, at::Tensor, Types<TensorArg, TensorArg>,
                                      Types<TensorArg, TensorArg>, Types<bool>> {
  static constexpr const char* kName = "attention_ext::attention_weights";
};

struct AttentionWeightsBackwardOp
    : Signature<AttentionWeightsBackwardOp, Tensor4, Types<TensorArg, TensorArg, TensorArg>,
                Types<TensorArg, TensorArg, std::array<bool, 4>>, Types<bool>> {
  static constexpr const char* kName = "attention_ext::attention_weights_backward";
};

// The optional tensors in the schema's order, for layers that treat them alike (saving, wrapping).
inline constexpr size_t kOptionTensors = 9;

template <typename Options, typename Function>
void for_each_tensor(Options& options, Function&& function) {
  function(options.attn_mask);
  function(options.attn_bias);
  function(options.key_mask);
  function(options.sinks);
  function(options.alibi_slopes);
  function(options.query_offsets);
  function(options.cu_seqlens_q);
  function(options.cu_seqlens_k);
  function(options.rng_state);
}

inline AttentionOptions scalars_of(const AttentionOptions& options) {
  AttentionOptions scalars;
  scalars.query_offset = options.query_offset;
  scalars.window_left = options.window_left;
  scalars.window_right = options.window_right;
  scalars.is_causal = options.is_causal;
  scalars.scale = options.scale;
  scalars.softcap = options.softcap;
  scalars.dropout_p = options.dropout_p;
  return scalars;
}

}  // namespace attention_ext
