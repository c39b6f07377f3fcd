// Translates the masks of nn::MultiheadAttention. In them true means hidden; below, it means takes
// part.
#include "api/multihead_masks.h"

#include <ATen/ATen.h>

#include <limits>

namespace attention_ext::nn {
namespace {

at::ScalarType bias_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor pad_keys(const at::Tensor& mask, int64_t appended, bool visible) {
  return appended > 0 ? at::constant_pad_nd(mask, {0, appended}, visible ? 1 : 0) : mask;
}

// Narrows expanded dimensions to size 1: inverting then costs what the mask really holds. The last
// one keeps its size, because columns may be appended to it.
at::Tensor without_expansion(at::Tensor mask) {
  for (int64_t dim = 0; dim + 1 < mask.dim(); ++dim) {
    if (mask.stride(dim) == 0 && mask.size(dim) > 1) mask = mask.narrow(dim, 0, 1);
  }
  return mask;
}

// Replaces infinities by the dtype's largest numbers where `finite` says so.
at::Tensor keep_finite(const at::Tensor& x, const at::Tensor& finite) {
  const double largest = x.scalar_type() == at::kDouble ? std::numeric_limits<double>::max()
                                                        : std::numeric_limits<float>::max();
  return at::where(x.isinf().logical_and(finite), x.clamp(-largest, largest), x);
}

// Casts a float mask unless the operators take its dtype beside queries of `dtype`. Finite numbers
// stay finite: float64's lowest must not become float32's -inf.
at::Tensor in_bias_dtype(const at::Tensor& mask, at::ScalarType dtype) {
  const at::ScalarType target = bias_dtype(dtype), own = mask.scalar_type();
  if (own == dtype || own == target) return mask;
  const at::Tensor cast = mask.to(target);
  return own == at::kDouble ? keep_finite(cast, mask.isfinite()) : cast;
}

at::Tensor finite_sum(const std::optional<at::Tensor>& bias, const at::Tensor& key_bias) {
  if (!bias.has_value()) return key_bias;
  return keep_finite(*bias + key_bias, bias->isfinite().logical_and(key_bias.isfinite()));
}

// The window as a bool matrix (1, 1, L, S + appended) that shows the appended keys.
at::Tensor band(const Sizes& sizes, const Window& window, const at::TensorOptions& like) {
  const auto integers = like.dtype(at::kLong);
  const at::Tensor i = at::arange(sizes.length, integers).unsqueeze(1);
  const at::Tensor j = at::arange(sizes.keys + sizes.appended, integers);
  at::Tensor visible = at::ones({sizes.length, sizes.keys + sizes.appended}, like.dtype(at::kBool));
  if (window.first.has_value()) visible = visible.logical_and(j >= i - *window.first);
  if (window.second.has_value()) visible = visible.logical_and(j <= i + *window.second);
  return visible.logical_or(j >= sizes.keys).unsqueeze(0).unsqueeze(0);
}

}  // namespace

AttentionOptions translate_masks(const MaskArguments& masks, const Sizes& sizes,
                                 const at::Tensor& like) {
  AttentionOptions o;
  o.is_causal = masks.is_causal && !masks.attn_mask.defined();
  o.window_left = masks.window.first;
  o.window_right = masks.window.second;
  const at::ScalarType dtype = like.scalar_type();
  if (masks.attn_mask.defined()) {
    const bool shared = masks.attn_mask.dim() == 2;
    const at::Tensor mask =
        masks.attn_mask.view({shared ? 1 : sizes.batch, shared ? 1 : sizes.heads,
                              masks.attn_mask.size(-2), masks.attn_mask.size(-1)});
    if (mask.scalar_type() == at::kBool) {
      o.attn_mask = pad_keys(without_expansion(mask).logical_not(), sizes.appended, true);
    } else {
      o.attn_bias = pad_keys(in_bias_dtype(mask, dtype), sizes.appended, false);
    }
  }
  if (masks.key_padding_mask.defined()) {
    const at::Tensor& mask = masks.key_padding_mask;
    const bool is_bool = mask.scalar_type() == at::kBool;
    o.key_mask = pad_keys(is_bool ? mask.logical_not() : in_bias_dtype(mask, dtype), sizes.appended,
                          is_bool);
    if (o.key_mask->requires_grad()) {  // the operators' key_mask is a constant, attn_bias is not
      o.attn_bias = finite_sum(o.attn_bias, o.key_mask->view({sizes.batch, 1, 1, -1}));
      o.key_mask.reset();
    }
  }
  if (sizes.appended > 0 &&
      (o.is_causal || masks.window.first.has_value() || masks.window.second.has_value())) {
    const Window window(masks.window.first,
                        o.is_causal ? std::optional<int64_t>(0) : masks.window.second);
    const at::Tensor visible = band(sizes, window, like.options().requires_grad(false));
    o.is_causal = false;
    o.window_left.reset();
    o.window_right.reset();
    if (!o.attn_mask.has_value()) {
      o.attn_mask = visible;
    } else {  // a mask beside a bias: the two are not merged into one mask per head
      const at::Tensor zero = at::zeros({}, like.options().dtype(bias_dtype(dtype)));
      o.attn_bias = at::where(visible, o.attn_bias.value_or(zero),
                              zero - std::numeric_limits<double>::infinity());
    }
  }
  return o;
}

}  // namespace attention_ext::nn
