// A torch::nn module for C++ programs, attention_ext::nn::MultiheadAttention, and the loading of
// weights that Python saved.
//
//   namespace ae = attention_ext;
//   ae::nn::MultiheadAttention attn(ae::nn::MultiheadAttentionOptions(64, 4).batch_first(true));
//   ae::nn::load_state_dict(*attn, "weights.pt");
//   auto [output, weights] = attn->forward(x, x, x);
#pragma once

#include <attention_ext/attention.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any_value.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <string>
#include <tuple>

namespace attention_ext::nn {

// Constructor arguments of attention_ext.MultiheadAttention. The parameters are float32 on the CPU;
// `to()` moves and casts them.
struct C10_EXPORT MultiheadAttentionOptions {
  MultiheadAttentionOptions(int64_t embed_dim, int64_t num_heads);

  /// Size of the embeddings, split over the heads.
  TORCH_ARG(int64_t, embed_dim);
  /// Number of query heads.
  TORCH_ARG(int64_t, num_heads);
  /// Probability of dropping an attention weight in training, rounded to 1/65536.
  TORCH_ARG(double, dropout) = 0.0;
  /// Whether the projections have a bias.
  TORCH_ARG(bool, bias) = true;
  /// Append one learned key and value to every sequence.
  TORCH_ARG(bool, add_bias_kv) = false;
  /// Append one key and value of zeros to every sequence.
  TORCH_ARG(bool, add_zero_attn) = false;
  /// Size of the `key` embeddings. Default: embed_dim.
  TORCH_ARG(int64_t, kdim);
  /// Size of the `value` embeddings. Default: embed_dim.
  TORCH_ARG(int64_t, vdim);
  /// Inputs and output are (N, L, E) instead of (L, N, E).
  TORCH_ARG(bool, batch_first) = false;
  /// Number of key/value heads, a divisor of num_heads; consecutive query heads share one. If
  /// smaller, in_proj_weight is (embed_dim + 2 * num_kv_heads * head_dim, embed_dim). Default:
  /// num_heads.
  TORCH_ARG(int64_t, num_kv_heads);
  /// How many keys before and after its own position a query sees, on top of all masks.
  TORCH_ARG(Window, window);
  /// If positive, scores become softcap * tanh(score / softcap).
  TORCH_ARG(double, softcap) = 0.0;
  /// Adds a parameter `sinks` (num_heads), zeros at first: per head, the logit of one more entry in
  /// the softmax that has no value.
  TORCH_ARG(bool, sinks) = false;
  /// Adds linear position biases with the usual geometric slopes. Not together with appended keys,
  /// which have no position.
  TORCH_ARG(bool, alibi) = false;
};

// Fused multi-head attention with the parameters, names and shapes of the Python module's
// state_dict, and its results. A query that sees no key gets zeros before out_proj, and zero
// weights. With num_kv_heads == num_heads, equal seeds draw the parameters that Python draws.
//
// Throws c10::ValueError for options that do not fit together, c10::Error for inputs that do not.
class C10_EXPORT MultiheadAttentionImpl : public torch::nn::Cloneable<MultiheadAttentionImpl> {
 public:
  MultiheadAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : MultiheadAttentionImpl(MultiheadAttentionOptions(embed_dim, num_heads)) {}
  explicit MultiheadAttentionImpl(const MultiheadAttentionOptions& options_);

  // query (L, E) unbatched, (L, N, E), or (N, L, E) with batch_first; key (S, kdim), (S, N, kdim)
  // or (N, S, kdim); value likewise with vdim. Nested tensors are refused.
  //
  // key_padding_mask: (N, S), or (S) unbatched. bool: true = HIDDEN; float: added to the scores.
  // attn_mask: (L, S), or (N * num_heads, L, S) with index n * num_heads + h; bool: true = HIDDEN;
  // float: added to the scores, -inf hides; differentiable. An undefined tensor is no mask.
  // is_causal: query i sees keys 0..i; ignored beside attn_mask.
  //
  // Returns the output, shaped like query, and the weights that multiplied the values (after
  // dropout): (N, L, S), or (N, num_heads, L, S) if not averaged; without N if unbatched; S counts
  // the appended keys. Without need_weights they are an undefined tensor; the output is the same.
  std::tuple<at::Tensor, at::Tensor> forward(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
      const at::Tensor& key_padding_mask = {}, bool need_weights = true,
      const at::Tensor& attn_mask = {}, bool average_attn_weights = true, bool is_causal = false);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// The options with which this module was constructed.
  MultiheadAttentionOptions options;

  // in_proj_weight (embed_dim + 2 * num_kv_heads * head_dim, embed_dim) if kdim and vdim are
  // embed_dim, else the three others. What the options leave out is undefined.
  at::Tensor in_proj_weight;
  at::Tensor q_proj_weight;
  at::Tensor k_proj_weight;
  at::Tensor v_proj_weight;
  at::Tensor in_proj_bias;
  at::Tensor bias_k;
  at::Tensor bias_v;
  at::Tensor sinks;
  torch::nn::Linear out_proj = nullptr;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(at::Tensor())}, {4, torch::nn::AnyValue(true)},
                           {5, torch::nn::AnyValue(at::Tensor())}, {6, torch::nn::AnyValue(true)},
                           {7, torch::nn::AnyValue(false)})
};

TORCH_MODULE(MultiheadAttention);

// Copies a state_dict that Python saved with
//     torch.save(dict(module.state_dict()), path)
// into the parameters and buffers of a module, any torch::nn::Module whose names are those of the
// Python one. (`dict(...)`: C++ cannot read the OrderedDict that state_dict() itself is.) Dtype and
// device stay the module's.
//
// Throws c10::Error, and changes nothing, if the file cannot be read or holds anything but a dict
// of tensors, or if the keys or shapes differ: the text lists all that are missing, unexpected or
// of another shape.
C10_EXPORT void load_state_dict(torch::nn::Module& module, const std::string& path);

}  // namespace attention_ext::nn
