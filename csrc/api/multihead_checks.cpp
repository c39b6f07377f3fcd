// The sentences are those of the Python module where that has its own.
#include "api/multihead_checks.h"

#include <ATen/ATen.h>

#include <cmath>

namespace attention_ext::nn {
namespace {

void check_mask_dtype(const at::Tensor& mask, const char* name) {
  TORCH_CHECK(
      !mask.defined() || mask.scalar_type() == at::kBool || at::isFloatingType(mask.scalar_type()),
      "only bool and floating types of ", name, " are supported, got ", mask.scalar_type());
}

void check_dim(const char* name, const at::Tensor& x, std::initializer_list<int64_t> expected,
               const at::Tensor& query) {
  if (!x.defined()) return;
  const auto* const found = std::find(expected.begin(), expected.end(), x.dim());
  TORCH_CHECK(found != expected.end(), "MultiheadAttention: beside a ", query.dim(), "-D query, ",
              name, " must have ", at::IntArrayRef(expected), " dimensions, got shape ", x.sizes());
}

// Batched shapes that do not fit together.
void check_shapes(const MultiheadAttentionOptions& o, const Inputs& in) {
  TORCH_CHECK(in.query.size(-1) == o.embed_dim(), "was expecting embedding dimension of ",
              o.embed_dim(), ", but got ", in.query.size(-1));
  if (o.kdim() == o.embed_dim() && o.vdim() == o.embed_dim()) {
    TORCH_CHECK(in.key.sizes() == in.value.sizes(), "key shape ", in.key.sizes(),
                " does not match value shape ", in.value.sizes());
    TORCH_CHECK(in.key.size(-1) == o.embed_dim(), "was expecting key and value of size ",
                o.embed_dim(), ", but got ", in.key.size(-1));
  } else {
    TORCH_CHECK(in.key.sizes().slice(0, 2) == in.value.sizes().slice(0, 2),
                "key's sequence and batch dims ", in.key.sizes().slice(0, 2),
                " do not match value's ", in.value.sizes().slice(0, 2));
    TORCH_CHECK(in.key.size(-1) == o.kdim() && in.value.size(-1) == o.vdim(),
                "was expecting key of size ", o.kdim(), " and value of size ", o.vdim(),
                ", but got ", in.key.size(-1), " and ", in.value.size(-1));
  }
  const int64_t batch_dim = o.batch_first() ? 0 : 1;
  TORCH_CHECK(in.key.size(batch_dim) == in.query.size(batch_dim),
              "query and key must have the same batch size, but got query ", in.query.sizes(),
              " and key ", in.key.sizes(),
              " with batch_first=", o.batch_first() ? "True" : "False");
}

void check_mask_shapes(const Inputs& in) {
  if (in.key_padding_mask.defined()) {
    const int64_t expected[] = {in.sizes.batch, in.sizes.keys};
    for (int64_t dim = 0; dim < 2; ++dim) {
      TORCH_CHECK(in.key_padding_mask.size(dim) == expected[dim], "Expected key_padded_mask.shape[",
                  dim, "] to be ", expected[dim], ", but got ", in.key_padding_mask.size(dim));
    }
  }
  if (in.attn_mask.defined()) {
    std::vector<int64_t> expected{in.sizes.length, in.sizes.keys};
    if (in.attn_mask.dim() == 3) {
      expected.insert(expected.begin(), in.sizes.batch * in.sizes.heads);
    }
    TORCH_CHECK(in.attn_mask.sizes() == expected, "The shape of the ", in.attn_mask.dim(),
                "D attn_mask is ", in.attn_mask.sizes(), ", but should be ",
                at::IntArrayRef(expected), ".");
  }
}

}  // namespace

void check_options(const MultiheadAttentionOptions& o) {
  TORCH_CHECK_VALUE(o.embed_dim() > 0 && o.num_heads() > 0,
                    "embed_dim and num_heads must be greater than 0, got embed_dim=", o.embed_dim(),
                    " and num_heads=", o.num_heads());
  TORCH_CHECK_VALUE(o.embed_dim() % o.num_heads() == 0,
                    "embed_dim must be divisible by num_heads, got embed_dim=", o.embed_dim(),
                    " and num_heads=", o.num_heads());
  TORCH_CHECK_VALUE(o.kdim() > 0 && o.vdim() > 0,
                    "kdim and vdim must be greater than 0, got kdim=", o.kdim(),
                    " and vdim=", o.vdim());
  TORCH_CHECK_VALUE(o.num_kv_heads() > 0 && o.num_heads() % o.num_kv_heads() == 0,
                    "num_kv_heads must be positive and divide num_heads, got num_kv_heads=",
                    o.num_kv_heads(), " and num_heads=", o.num_heads());
  TORCH_CHECK_VALUE(!o.alibi() || !(o.add_bias_kv() || o.add_zero_attn()),
                    "alibi cannot be combined with add_bias_kv or add_zero_attn: the keys they "
                    "append have no position");
  TORCH_CHECK_VALUE(std::isfinite(o.softcap()) && o.softcap() >= 0.0,
                    "softcap must be finite and not negative, got ", o.softcap());
  for (const auto& side : {o.window().first, o.window().second}) {
    TORCH_CHECK_VALUE(side.value_or(0) >= 0,
                      "window must be (left, right), each a non-negative int or none, got ",
                      side.value_or(0));
  }
}

Inputs checked_inputs(const MultiheadAttentionOptions& o, const at::Tensor& query,
                      const at::Tensor& key, const at::Tensor& value,
                      const at::Tensor& key_padding_mask, const at::Tensor& attn_mask) {
  TORCH_CHECK(query.defined() && key.defined() && value.defined(),
              "MultiheadAttention: query, key and value must be tensors, got an undefined one");
  TORCH_CHECK(!query.is_nested() && !key.is_nested() && !value.is_nested(),
              "MultiheadAttention: nested tensors are not supported in C++; pad them and pass a "
              "key_padding_mask");
  check_mask_dtype(key_padding_mask, "key_padding_mask");
  check_mask_dtype(attn_mask, "attn_mask");
  TORCH_CHECK(query.dim() == 2 || query.dim() == 3,
              "MultiheadAttention: query must be unbatched 2-D or batched 3-D, got shape ",
              query.sizes());
  const bool batched = query.dim() == 3;
  check_dim("key", key, {query.dim()}, query);
  check_dim("value", value, {query.dim()}, query);
  check_dim("key_padding_mask", key_padding_mask, {query.dim() - 1}, query);
  check_dim("attn_mask", attn_mask, {2, 3}, query);

  const int64_t batch_dim = o.batch_first() ? 0 : 1;
  Inputs in{query, key, value, key_padding_mask, attn_mask, batched, {}};
  if (!batched) {
    in.query = query.unsqueeze(batch_dim);
    in.key = key.is_same(query) ? in.query : key.unsqueeze(batch_dim);
    in.value = value.is_same(key) ? in.key : value.unsqueeze(batch_dim);
    if (key_padding_mask.defined()) in.key_padding_mask = key_padding_mask.unsqueeze(0);
  }
  check_shapes(o, in);
  in.sizes = {in.query.size(batch_dim), o.num_heads(), in.query.size(1 - batch_dim),
              in.key.size(1 - batch_dim), int64_t{o.add_bias_kv()} + int64_t{o.add_zero_attn()}};
  check_mask_shapes(in);
  return in;
}

}  // namespace attention_ext::nn
