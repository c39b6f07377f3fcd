#include "common/make_params.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "kernels/cpu/plan.h"

namespace attention_ext {

using kernels::AttentionParams;
using kernels::View;

kernels::ScalarType scalar_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return kernels::ScalarType::kFloat64;
    case at::kBFloat16:
      return kernels::ScalarType::kBFloat16;
    case at::kHalf:
      return kernels::ScalarType::kFloat16;
    case at::kBool:
      return kernels::ScalarType::kBool;
    default:
      return kernels::ScalarType::kFloat32;
  }
}

at::ScalarType accumulation_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

CallShape call_shape(const at::Tensor& query, const at::Tensor& key, int64_t v_size) {
  CallShape s;
  s.batch_sizes = query.sizes().slice(0, query.dim() - 3);
  s.batch = c10::multiply_integers(s.batch_sizes);
  s.heads = query.size(-3);
  s.kv_heads = key.size(-3);
  s.q_length = query.size(-2);
  s.k_length = key.size(-2);
  s.qk_size = query.size(-1);
  s.v_size = v_size;
  return s;
}

namespace {

int64_t* table(ParamsStorage& storage, int64_t size) {
  storage.tables.push_back(std::make_unique<int64_t[]>(static_cast<size_t>(size)));
  return storage.tables.back().get();
}

// Folds the first `batch_sizes.size()` dimensions of a tensor, which has `tail` more, into one
// stride or a table of offsets.
void fold_batch(View& view, const at::Tensor& tensor, int64_t tail, at::IntArrayRef batch_sizes,
                ParamsStorage& storage) {
  const int64_t dims = static_cast<int64_t>(batch_sizes.size());
  if (dims == 0 || tensor.dim() <= tail) return;  // no batch, or one slice for all of it
  auto stride = [&](int64_t d) { return tensor.size(d) == 1 ? 0 : tensor.stride(d); };
  int64_t expected = 0;
  bool folds = true, first = true;
  for (int64_t d = dims - 1; d >= 0; --d) {
    if (batch_sizes[d] == 1) continue;
    if (first) {
      view.stride[0] = stride(d);
      first = false;
    } else if (stride(d) != expected) {
      folds = false;
    }
    expected = stride(d) * batch_sizes[d];
  }
  if (folds) return;
  const int64_t batch = c10::multiply_integers(batch_sizes);
  if (storage.on_device) {
    // One dimension's offsets beside the sums of all behind it; nothing but launches.
    const auto indices = tensor.options().dtype(at::kLong);
    at::Tensor sums = at::zeros({1}, indices);
    for (int64_t d = dims - 1; d >= 0; --d) {
      const at::Tensor own = at::arange(batch_sizes[d], indices).mul_(stride(d));
      sums = own.unsqueeze(1).add(sums).reshape({-1});
    }
    view.batch_offsets = sums.data_ptr<int64_t>();
    storage.tensors.push_back(std::move(sums));
    return;
  }
  int64_t* const offsets = table(storage, batch);
  for (int64_t b = 0; b < batch; ++b) {
    int64_t rest = b, offset = 0;
    for (int64_t d = dims - 1; d >= 0; --d) {
      offset += rest % batch_sizes[d] * stride(d);
      rest /= batch_sizes[d];
    }
    offsets[b] = offset;
  }
  view.batch_offsets = offsets;
}

View begin_view(const at::Tensor& tensor) {
  View view;
  view.data = static_cast<char*>(tensor.data_ptr());
  if (view.data == nullptr)
    view.data = reinterpret_cast<char*>(alignof(double));  // empty, yet defined
  view.type = scalar_type(tensor.scalar_type());
  return view;
}

const void* accumulation_data(const at::Tensor& tensor, at::ScalarType type,
                              ParamsStorage& storage) {
  storage.tensors.push_back(tensor.to(type).contiguous());
  return storage.tensors.back().data_ptr();
}

const int64_t* int64_data(const at::Tensor& tensor, ParamsStorage& storage) {
  storage.tensors.push_back(tensor.to(at::kLong).contiguous());
  return storage.tensors.back().data_ptr<int64_t>();
}

void fill_dropout(kernels::DropoutParams& d, const AttentionOptions& options, int64_t heads,
                  ParamsStorage& storage) {
  d.threshold = static_cast<uint32_t>(std::nearbyint(options.dropout_p * 65536.0));
  if (d.threshold == 0) return;
  d.rescale = d.threshold < 65536 ? 65536.0 / (65536.0 - d.threshold) : 0.0;
  const int64_t* const words = int64_data(*options.rng_state, storage);
  if (storage.on_device) {
    d.state = words;  // read by the kernels
    return;
  }
  d.seed = static_cast<uint64_t>(words[0]);
  d.offset = static_cast<uint64_t>(words[1]);
  d.heads_total = words[2] != 0 ? words[2] : heads;
  d.first_head = words[3];
  d.first_row = words[4];
  d.first_key = words[5];
}

void fill_packed(AttentionParams& p, const AttentionOptions& options, ParamsStorage& storage) {
  p.problems = options.cu_seqlens_q->size(0) - 1;
  p.cu_seqlens_q = int64_data(*options.cu_seqlens_q, storage);
  p.cu_seqlens_k = int64_data(*options.cu_seqlens_k, storage);
  if (storage.on_device) return;  // lengths stay the totals, and kernels find their sequence
  int64_t* const starts = table(storage, p.problems + 1);
  p.q_length = p.k_length = starts[0] = 0;
  for (int64_t n = 0; n < p.problems; ++n) {
    const int64_t q = p.cu_seqlens_q[n + 1] - p.cu_seqlens_q[n];
    const int64_t k = p.cu_seqlens_k[n + 1] - p.cu_seqlens_k[n];
    p.q_length = std::max(p.q_length, q);
    p.k_length = std::max(p.k_length, k);
    starts[n + 1] = starts[n] + kernels::blocks_of(q, kernels::query_block(q));
  }
  p.q_block_starts = starts;
}

}  // namespace

View make_view(const at::Tensor& tensor, at::IntArrayRef batch_sizes, ParamsStorage& storage) {
  View view = begin_view(tensor);
  for (int64_t d = 1; d < 4 && d <= tensor.dim(); ++d) {
    const int64_t from_end = -d;
    view.stride[4 - d] = tensor.size(from_end) == 1 ? 0 : tensor.stride(from_end);
  }
  // Products read rows in place where columns are adjacent, and one column is.
  if (tensor.dim() >= 1 && tensor.size(-1) == 1) view.stride[3] = 1;
  fold_batch(view, tensor, 3, batch_sizes, storage);
  return view;
}

View make_row_view(const at::Tensor& tensor, at::IntArrayRef batch_sizes, ParamsStorage& storage) {
  View view = begin_view(tensor);
  view.stride[1] = tensor.stride(-2);
  view.stride[2] = tensor.stride(-1);
  fold_batch(view, tensor, 2, batch_sizes, storage);
  return view;
}

void fill_params(AttentionParams& p, const CallShape& shape, const at::Tensor& query,
                 const at::Tensor& key, const at::Tensor& value, const AttentionOptions& options,
                 ParamsStorage& storage) {
  const at::ScalarType accumulation = accumulation_type(query.scalar_type());
  p.type = scalar_type(query.scalar_type());
  p.problems = shape.batch;
  p.heads = shape.heads;
  p.kv_heads = shape.kv_heads;
  p.q_length = shape.q_length;
  p.k_length = shape.k_length;
  p.qk_size = shape.qk_size;
  p.v_size = shape.v_size;
  p.query = make_view(query, shape.batch_sizes, storage);
  p.key = make_view(key, shape.batch_sizes, storage);
  if (value.defined()) p.value = make_view(value, shape.batch_sizes, storage);
  if (options.attn_mask) {
    p.attn_mask = make_view(*options.attn_mask, shape.batch_sizes, storage);
    if (options.attn_mask->size(-1) == 1) p.attn_mask.stride[3] = 0;
  }
  if (options.attn_bias) {
    p.attn_bias = make_view(*options.attn_bias, shape.batch_sizes, storage);
    if (options.attn_bias->size(-1) == 1) p.attn_bias.stride[3] = 0;
  }
  if (options.key_mask) {
    at::Tensor mask = *options.key_mask;
    p.key_mask_is_bool = mask.scalar_type() == at::kBool;
    if (!p.key_mask_is_bool) {
      mask = mask.to(accumulation);
      storage.tensors.push_back(mask);
    }
    p.key_mask = begin_view(mask);
    p.key_mask.stride[3] = mask.size(-1) == 1 ? 0 : mask.stride(-1);
    fold_batch(p.key_mask, mask, 1, shape.batch_sizes, storage);
  }
  if (options.sinks) p.sinks = accumulation_data(*options.sinks, accumulation, storage);
  if (options.alibi_slopes) {
    const at::Tensor& slopes = *options.alibi_slopes;
    p.alibi_slopes = accumulation_data(slopes, accumulation, storage);
    p.alibi_stride[0] = slopes.dim() > 1 ? shape.heads : 0;
    p.alibi_stride[1] = 1;
  }
  if (options.query_offsets) p.query_offsets = int64_data(*options.query_offsets, storage);
  p.query_offset = options.query_offset.guard_int(__FILE__, __LINE__);
  if (options.window_left) p.window_left = options.window_left->guard_int(__FILE__, __LINE__);
  if (options.window_right) p.window_right = options.window_right->guard_int(__FILE__, __LINE__);
  p.window_left = std::min(p.window_left, kernels::kUnbounded);
  p.window_right = std::min(p.window_right, kernels::kUnbounded);
  p.scale = options.scale       ? *options.scale
            : shape.qk_size > 0 ? 1.0 / std::sqrt(static_cast<double>(shape.qk_size))
                                : 1.0;
  p.softcap = options.softcap;
  fill_dropout(p.dropout, options, shape.heads, storage);
  if (options.cu_seqlens_q) fill_packed(p, options, storage);
}

}  // namespace attention_ext
