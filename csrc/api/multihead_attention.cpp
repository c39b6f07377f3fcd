// nn::MultiheadAttention: attention_ext/modules.py in C++. The projections are at::linear,
// everything between them is the operators.
#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include <array>
#include <cmath>
#include <ostream>

#include "api/multihead_checks.h"

namespace attention_ext::nn {
namespace {

// 2^(-8h/n), h = 1..n, for a power of two n; further heads take those between (Press et al., *Train
// Short, Test Long*, 2022). 16-bit queries keep float32 slopes.
at::Tensor alibi_slopes(int64_t heads, const at::Tensor& like) {
  int64_t n = 1;
  while (2 * n <= heads) n *= 2;
  std::vector<double> slopes;
  for (int64_t h = 1; h <= n; ++h) {
    slopes.push_back(std::exp2(-8.0 * static_cast<double>(h) / static_cast<double>(n)));
  }
  for (int64_t h = 1; h < 2 * (heads - n); h += 2) {
    slopes.push_back(std::exp2(-4.0 * static_cast<double>(h) / static_cast<double>(n)));
  }
  const auto dtype = like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::tensor(slopes, at::kDouble).to(like.device(), dtype);
}

class Call {
 public:
  Call(const MultiheadAttentionImpl& module, const Inputs& in)
      : module_(module), o_(module.options), in_(in), head_dim_(o_.embed_dim() / o_.num_heads()) {}

  // (N, H, L, head_dim) and twice (N, Hkv, S, head_dim), appended keys included.
  std::array<at::Tensor, 3> project() const {
    auto [q, k, v] = projections();
    append_keys(k, v);
    return {q, k, v};
  }

  // (L, N, E) or (N, L, E) again.
  at::Tensor merge(const at::Tensor& heads) const {
    const at::Tensor merged =
        o_.batch_first() ? heads.transpose(1, 2) : heads.permute({2, 0, 1, 3});
    return at::linear(merged.flatten(2), module_.out_proj->weight, given(module_.out_proj->bias));
  }

 private:
  std::array<at::Tensor, 3> projections() const {
    const int64_t q_dim = o_.embed_dim(), kv_heads = o_.num_kv_heads();
    const int64_t kv_dim = kv_heads * head_dim_;
    const at::Tensor& weight = module_.in_proj_weight;
    const at::Tensor& bias = module_.in_proj_bias;
    const bool one_memory = in_.key.is_same(in_.value) && weight.defined();
    if (one_memory && in_.query.is_same(in_.key)) {  // one projection for all three
      const auto x =
          heads(in_.query, weight, bias).split_with_sizes({o_.num_heads(), kv_heads, kv_heads}, 2);
      return {heads_first(x[0]), heads_first(x[1]), heads_first(x[2])};
    }
    if (one_memory) {  // one for key and value
      const auto w = weight.split_with_sizes({q_dim, 2 * kv_dim});
      const auto b = pieces(bias, {q_dim, 2 * kv_dim});
      const auto x = heads(in_.key, w[1], b[1]).split_with_sizes({kv_heads, kv_heads}, 2);
      return {heads_first(heads(in_.query, w[0], b[0])), heads_first(x[0]), heads_first(x[1])};
    }
    const std::vector<at::Tensor> w =
        weight.defined() ? weight.split_with_sizes({q_dim, kv_dim, kv_dim})
                         : std::vector<at::Tensor>{module_.q_proj_weight, module_.k_proj_weight,
                                                   module_.v_proj_weight};
    const auto b = pieces(bias, {q_dim, kv_dim, kv_dim});
    return {heads_first(heads(in_.query, w[0], b[0])), heads_first(heads(in_.key, w[1], b[1])),
            heads_first(heads(in_.value, w[2], b[2]))};
  }

  // Undefined tensors for a missing bias.
  static std::vector<at::Tensor> pieces(const at::Tensor& bias, at::IntArrayRef sizes) {
    return bias.defined() ? bias.split_with_sizes(sizes) : std::vector<at::Tensor>(sizes.size());
  }

  at::Tensor heads(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const {
    return at::linear(x, weight, given(bias)).unflatten(2, {-1, head_dim_});
  }

  at::Tensor heads_first(const at::Tensor& x) const {
    return o_.batch_first() ? x.transpose(1, 2) : x.permute({1, 2, 0, 3});
  }

  // The learned key and value, then zeros.
  void append_keys(at::Tensor& k, at::Tensor& v) const {
    std::vector<at::Tensor> keys{k}, values{v};
    const std::vector<int64_t> one_key{k.size(0), o_.num_kv_heads(), 1, head_dim_};
    if (o_.add_bias_kv()) {
      const auto learned = [&](const at::Tensor& x) {
        return x.to(k.scalar_type()).view({1, o_.num_kv_heads(), 1, head_dim_}).expand(one_key);
      };
      keys.push_back(learned(module_.bias_k));
      values.push_back(learned(module_.bias_v));
    }
    if (o_.add_zero_attn()) {
      keys.push_back(at::zeros(one_key, k.options().requires_grad(false)));
      values.push_back(keys.back());
    }
    if (keys.size() == 1) return;
    k = at::cat(keys, 2);
    v = at::cat(values, 2);
  }

  const MultiheadAttentionImpl& module_;
  const MultiheadAttentionOptions& o_;
  const Inputs& in_;
  int64_t head_dim_;
};

}  // namespace

MultiheadAttentionOptions::MultiheadAttentionOptions(int64_t embed_dim, int64_t num_heads)
    : embed_dim_(embed_dim),
      num_heads_(num_heads),
      kdim_(embed_dim),
      vdim_(embed_dim),
      num_kv_heads_(num_heads) {}

MultiheadAttentionImpl::MultiheadAttentionImpl(const MultiheadAttentionOptions& options_)
    : options(options_) {
  check_options(options);
  reset();
}

// Random numbers are drawn in the order of torch's Python module.
void MultiheadAttentionImpl::reset() {
  namespace init = torch::nn::init;
  const int64_t embed_dim = options.embed_dim();
  const int64_t kv_dim = options.num_kv_heads() * (embed_dim / options.num_heads());
  out_proj = register_module(
      "out_proj",
      torch::nn::Linear(torch::nn::LinearOptions(embed_dim, embed_dim).bias(options.bias())));
  const auto drawn = [this](const char* name, std::initializer_list<int64_t> shape, auto draw) {
    at::Tensor& parameter = register_parameter(name, at::empty(shape));
    draw(parameter);
    return parameter;
  };
  const auto uniform = [](at::Tensor& x) { init::xavier_uniform_(x); };
  const auto normal = [](at::Tensor& x) { init::xavier_normal_(x); };
  const auto zero = [](at::Tensor& x) { init::zeros_(x); };
  if (options.kdim() == embed_dim && options.vdim() == embed_dim) {
    in_proj_weight = drawn("in_proj_weight", {embed_dim + 2 * kv_dim, embed_dim}, uniform);
  } else {
    q_proj_weight = drawn("q_proj_weight", {embed_dim, embed_dim}, uniform);
    k_proj_weight = drawn("k_proj_weight", {kv_dim, options.kdim()}, uniform);
    v_proj_weight = drawn("v_proj_weight", {kv_dim, options.vdim()}, uniform);
  }
  if (options.bias()) {
    in_proj_bias = drawn("in_proj_bias", {embed_dim + 2 * kv_dim}, zero);
    init::zeros_(out_proj->bias);
  }
  if (options.add_bias_kv()) {
    bias_k = drawn("bias_k", {1, 1, kv_dim}, normal);
    bias_v = drawn("bias_v", {1, 1, kv_dim}, normal);
  }
  if (options.sinks()) sinks = drawn("sinks", {options.num_heads()}, zero);
}

std::tuple<at::Tensor, at::Tensor> MultiheadAttentionImpl::forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& key_padding_mask, bool need_weights, const at::Tensor& attn_mask,
    bool average_attn_weights, bool is_causal) {
  const Inputs in = checked_inputs(options, query, key, value, key_padding_mask, attn_mask);
  const double dropout_p = is_training() ? options.dropout() : 0.0;
  TORCH_CHECK_VALUE(dropout_p >= 0.0 && dropout_p <= 1.0,
                    "dropout probability has to be between 0 and 1, but got ", dropout_p);
  const Call call(*this, in);
  auto [q, k, v] = call.project();

  AttentionOptions op_options = translate_masks(
      {in.attn_mask, in.key_padding_mask, is_causal, options.window()}, in.sizes, q);
  op_options.sinks = given(sinks);
  if (options.alibi()) op_options.alibi_slopes = alibi_slopes(options.num_heads(), q);
  op_options.softcap = options.softcap();
  op_options.dropout_p = dropout_p;
  if (dropout_p > 0.0) op_options.rng_state = make_rng_state(q.device());
  const auto [heads, logsumexp, residual, _] = attention(q, k, v, op_options);
  at::Tensor weights;
  if (need_weights) {
    weights = attention_weights(q, k, op_options, logsumexp, residual, average_attn_weights);
  }
  q.reset();  // slices of the projection: the output projection may take their memory
  k.reset();
  v.reset();

  at::Tensor output = call.merge(heads);
  if (!in.batched) {
    output = output.squeeze(options.batch_first() ? 0 : 1);
    if (need_weights) weights = weights.squeeze(0);
  }
  return {std::move(output), std::move(weights)};
}

void MultiheadAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha
         << "attention_ext::nn::MultiheadAttention(embed_dim=" << options.embed_dim()
         << ", num_heads=" << options.num_heads() << ", num_kv_heads=" << options.num_kv_heads()
         << ", dropout=" << options.dropout() << ", batch_first=" << options.batch_first() << ")";
}

}  // namespace attention_ext::nn
