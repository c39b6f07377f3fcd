// See dense_scores.h. No in-place operation and no reading of values: this runs under vmap, grad
// and compile.
#include "common/dense_scores.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

namespace attention_ext::composite {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::ScalarType accumulation_of(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor iota(const c10::SymInt& size, const at::Tensor& like) {
  return at::arange(c10::Scalar(size), like.options().dtype(at::kLong));
}

// Where each query row and key stands: positions within its sequence, the row's key offset, and the
// sequence it belongs to (packed only).
struct Positions {
  at::Tensor rows;                              // (L, 1)
  at::Tensor keys;                              // (S)
  at::Tensor offsets;                           // broadcastable to (..., H, L, 1)
  at::Tensor sequence_of_row, sequence_of_key;  // (L, 1) and (S); undefined unless packed
};

// For each position, the packed sequence it lies in: how many sequences end at or before it.
at::Tensor sequence_of(const at::Tensor& positions, const at::Tensor& starts) {
  const auto ends = starts.slice(0, 1);
  return at::le(ends, positions.unsqueeze(-1)).sum(-1);
}

Positions positions_of(const at::Tensor& query, const at::Tensor& key,
                       const AttentionOptions& options) {
  Positions at_;
  const auto rows = iota(query.sym_size(-2), query);
  at_.keys = iota(key.sym_size(-2), query);
  at_.rows = rows.unsqueeze(-1);
  if (options.cu_seqlens_q) {
    // Position 0 of an empty query or key keeps the indices below in range.
    const auto starts_q = options.cu_seqlens_q->to(at::kLong),
               starts_k = options.cu_seqlens_k->to(at::kLong);
    const auto of_row = sequence_of(rows, starts_q), of_key = sequence_of(at_.keys, starts_k);
    at_.rows = (rows - starts_q.index_select(0, of_row)).unsqueeze(-1);
    at_.keys = at_.keys - starts_k.index_select(0, of_key);
    at_.sequence_of_row = of_row.unsqueeze(-1);
    at_.sequence_of_key = of_key;
    if (options.query_offsets) {
      at_.offsets = options.query_offsets->to(at::kLong).index_select(0, of_row).unsqueeze(-1);
    }
  } else if (options.query_offsets) {
    at_.offsets = options.query_offsets->to(at::kLong).unsqueeze(-1).unsqueeze(-1).unsqueeze(-1);
  }
  if (!at_.offsets.defined())
    at_.offsets = at::zeros({1, 1}, at_.rows.options()) + options.query_offset;
  return at_;
}

at::Tensor both(const at::Tensor& left, const at::Tensor& right) {
  return left.defined() ? at::logical_and(left, right) : right;
}

bool needs_positions(const AttentionOptions& options) {
  return options.window_left || options.window_right || options.is_causal || options.alibi_slopes ||
         options.cu_seqlens_q;
}

at::Tensor key_mask_rows(const at::Tensor& key_mask) {
  return key_mask.unsqueeze(-2).unsqueeze(-2);
}

// attn_bias and a float key_mask as one number a score: -inf is left to `visible`, and two finite
// ones have a finite sum.
at::Tensor bias_of(const AttentionOptions& options, at::ScalarType dtype) {
  at::Tensor bias, mask;
  if (options.attn_bias) {
    bias = options.attn_bias->to(dtype);
    bias = at::where(at::eq(bias, -kInfinity), 0.0, bias);
  }
  if (options.key_mask && options.key_mask->scalar_type() != at::kBool) {
    mask = key_mask_rows(options.key_mask->to(dtype));
    mask = at::where(at::eq(mask, -kInfinity), 0.0, mask);
  }
  if (!bias.defined() || !mask.defined()) return bias.defined() ? bias : mask;
  const double lowest = dtype == at::kDouble ? std::numeric_limits<double>::lowest()
                                             : std::numeric_limits<float>::lowest();
  const auto sum = bias + mask;
  const auto overflow = at::logical_and(at::eq(sum, -kInfinity),
                                        at::logical_and(at::isfinite(bias), at::isfinite(mask)));
  return at::where(overflow, lowest, sum);
}

at::Tensor visible_of(const AttentionOptions& options, const Positions& at_) {
  at::Tensor visible;
  if (options.attn_mask) visible = *options.attn_mask;
  if (options.key_mask) {
    const auto rows = key_mask_rows(*options.key_mask);
    visible = both(visible, rows.scalar_type() == at::kBool ? rows : at::ne(rows, -kInfinity));
  }
  if (options.attn_bias) visible = both(visible, at::ne(*options.attn_bias, -kInfinity));
  const auto window_right =
      options.is_causal ? std::optional<c10::SymInt>(0) : options.window_right;
  if (options.window_left || window_right) {
    const auto distance = at_.keys - (at_.rows + at_.offsets);
    if (window_right) visible = both(visible, at::le(distance, c10::Scalar(*window_right)));
    if (options.window_left)
      visible = both(visible, at::ge(distance, c10::Scalar(-*options.window_left)));
  }
  if (at_.sequence_of_row.defined()) {
    visible = both(visible, at::eq(at_.sequence_of_row, at_.sequence_of_key));
  }
  return visible;
}

// Broadcastable to (..., H, L, S).
at::Tensor slopes_of(const AttentionOptions& options, const Positions& at_) {
  const auto& slopes = *options.alibi_slopes;
  if (at_.sequence_of_row.defined() && slopes.dim() == 2) {  // (sequences, H) -> (H, L, 1)
    const auto of_row = at_.sequence_of_row.squeeze(-1);
    return slopes.index_select(0, of_row).transpose(0, 1).unsqueeze(-1);
  }
  return slopes.unsqueeze(-1).unsqueeze(-1);
}

at::Tensor low32(const at::Tensor& bits) { return at::bitwise_and(bits, int64_t{0xffffffff}); }
at::Tensor high32(const at::Tensor& bits) { return low32(at::bitwise_right_shift(bits, 32)); }

// Four words of 32 bits, each in the low half of an int64.
using Words = std::array<at::Tensor, 4>;

Words philox(Words counter, at::Tensor key0, at::Tensor key1) {
  constexpr int64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr int64_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const auto product0 = counter[0] * kMultiplier0, product1 = counter[2] * kMultiplier1;
    counter = {
        at::bitwise_xor(at::bitwise_xor(high32(product1), counter[1]), key0), low32(product1),
        at::bitwise_xor(at::bitwise_xor(high32(product0), counter[3]), key1), low32(product0)};
    key0 = low32(key0 + kWeyl0);
    key1 = low32(key1 + kWeyl1);
  }
  return counter;
}

}  // namespace

at::Tensor where_visible(const DenseScores& dense, const at::Tensor& values, double other) {
  return dense.visible.defined() ? at::where(dense.visible, values, other) : values;
}

at::Tensor live_rows(const DenseScores& dense) {
  return dense.visible.defined() ? dense.visible.any(-1) : at::Tensor();
}

at::Tensor repeat_heads(const at::Tensor& tensor, const c10::SymInt& heads) {
  const auto key_heads = tensor.sym_size(-3);
  if (key_heads == heads) return tensor;
  c10::SymDimVector shape(tensor.sym_sizes().begin(), tensor.sym_sizes().end());
  shape[shape.size() - 3] = heads;
  c10::SymDimVector grouped(tensor.sym_sizes().begin(), tensor.sym_sizes().end());
  grouped.insert(grouped.end() - 2, heads / key_heads);
  return tensor.unsqueeze(-3).expand_symint(grouped).reshape_symint(shape);
}

at::Tensor sum_groups(const at::Tensor& tensor, const c10::SymInt& key_heads) {
  const auto heads = tensor.sym_size(-3);
  if (key_heads == heads) return tensor;
  c10::SymDimVector grouped(tensor.sym_sizes().begin(), tensor.sym_sizes().end());
  grouped[grouped.size() - 3] = key_heads;
  grouped.insert(grouped.end() - 2, heads / key_heads);
  return tensor.reshape_symint(grouped).sum(-3);
}

at::Tensor zero_rows(const at::Tensor& tensor, const at::Tensor& live) {
  return live.defined() ? at::where(live.unsqueeze(-1), tensor, 0.0) : tensor;
}

at::Tensor dropout_keep(const at::Tensor& query, const at::Tensor& key,
                        const AttentionOptions& options) {
  if (options.dropout_p == 0.0) return {};
  const auto& state = *options.rng_state;
  const auto field = [&](int64_t n) { return state.select(-1, n); };
  const auto at_ = positions_of(query, key, options);
  const auto heads = query.sym_size(-3);

  // (flattened batch index * heads_total + first_head + h) over (..., H, 1, 1); packed: over (H, L,
  // 1).
  const auto heads_total =
      at::where(at::eq(field(2), 0), at::zeros_like(field(2)) + heads, field(2));
  auto batch = at_.sequence_of_row;
  if (!batch.defined()) {
    c10::SymInt elements = 1;
    c10::SymDimVector shape;
    for (const auto& size : query.sym_sizes().slice(0, query.dim() - 3)) {
      elements *= size;
      shape.push_back(size);
    }
    shape.insert(shape.end(), 3, 1);
    batch = iota(elements, query).reshape_symint(shape);
  }
  const auto head = batch * heads_total + field(3) + iota(heads, query).unsqueeze(-1).unsqueeze(-1);
  const auto rows = at_.rows + field(4), keys = at_.keys + field(5);

  const auto offset = field(1), seed = field(0);
  const auto words =
      philox({low32(offset), low32(head), low32(rows), low32(at::bitwise_right_shift(keys, 3))},
             low32(seed), at::bitwise_xor(high32(seed), high32(offset)));
  const auto lane = at::bitwise_and(keys, 7), word = at::bitwise_right_shift(lane, 1);
  auto bits = words[3];
  for (int64_t n = 0; n < 3; ++n) bits = at::where(at::eq(word, n), words[n], bits);
  bits = at::where(at::eq(at::bitwise_and(lane, 1), 0), bits, at::bitwise_right_shift(bits, 16));
  bits = at::bitwise_and(bits, 0xffff);

  const double threshold = std::nearbyint(options.dropout_p * 65536.0);
  const double rescale = threshold < 65536.0 ? 65536.0 / (65536.0 - threshold) : 0.0;
  return at::ge(bits, threshold).to(accumulation_of(query)) * rescale;
}

DenseScores dense_scores(const at::Tensor& query, const at::Tensor& key,
                         const AttentionOptions& options) {
  DenseScores dense;
  const auto dtype = accumulation_of(query);
  const auto size = query.sym_size(-1);
  dense.scale =
      options.scale
          ? *options.scale
          : (size == 0 ? 1.0 : 1.0 / std::sqrt(double(size.guard_int(__FILE__, __LINE__))));
  const auto at_ = needs_positions(options) ? positions_of(query, key, options) : Positions{};
  dense.visible = visible_of(options, at_);
  dense.query = query.to(dtype);
  dense.key = repeat_heads(key.to(dtype), query.sym_size(-3));
  if (dense.visible.defined()) {
    dense.query = zero_rows(dense.query, dense.visible.any(-1));
    dense.key = zero_rows(dense.key, dense.visible.any(-2));
  }

  dense.scores = at::matmul(dense.query, dense.key.transpose(-2, -1)) * dense.scale;
  if (options.softcap > 0.0) {
    const auto tanh = at::tanh(dense.scores / options.softcap);
    dense.capped = tanh * options.softcap;
    dense.cap_slope = 1.0 - tanh * tanh;
    dense.scores = dense.capped;
  }
  if (options.alibi_slopes) {
    const auto distance = at::abs(at_.keys - (at_.rows + at_.offsets)).to(dtype);
    dense.scores = dense.scores - slopes_of(options, at_).to(dtype) * distance;
  }
  const auto bias = bias_of(options, dtype);
  if (bias.defined()) dense.scores = dense.scores + bias;
  dense.keep = dropout_keep(query, key, options);
  return dense;
}

}  // namespace attention_ext::composite
