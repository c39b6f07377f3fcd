// Checks of the optional arguments and the scalars: see checks.h.
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "common/checks_call.h"

namespace attention_ext::checks {
namespace {

constexpr int64_t kPositionLimit = int64_t{1} << 61;  // sums of a few positions stay inside int64

bool fits_scores(const Call& call, const at::Tensor& mask) {
  const auto sizes = mask.sym_sizes();
  const auto full = mask.dim() == 2 ? join({}, {call.queries, call.keys})
                                    : join(call.batch, {call.heads, call.queries, call.keys});
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (!fits(sizes[d], full[d])) return false;
  }
  return true;
}

void check_attn_mask(const Call& call, const at::Tensor& mask) {
  CHECK_ARGUMENT(call.op, is_dense(mask), "attn_mask must be a dense strided tensor, got layout ",
                 layout_of(mask));
  CHECK_ARGUMENT(call.op, mask.device() == call.device, "attn_mask must be on the query's device ",
                 call.device, ", got ", mask.device());
  CHECK_ARGUMENT(
      call.op, mask.scalar_type() == at::kBool,
      "attn_mask must be bool, True where a key takes part (a float mask is attn_bias), got ",
      mask.scalar_type());
  CHECK_ARGUMENT(call.op, mask.dim() != 3 || call.query.dim() == 3,
                 "attn_mask with 3 dimensions could mean (B, L, S) or (H, L, S): unsqueeze(1) or "
                 "unsqueeze(0) it to the query's number of dimensions, got ",
                 mask.sym_sizes(), " beside a query of ", call.query.sym_sizes());
  CHECK_ARGUMENT(call.op, mask.dim() == 2 || mask.dim() == call.query.dim(),
                 "attn_mask must be (L, S) or have the query's number of dimensions, got ",
                 mask.sym_sizes(), " beside a query of ", call.query.sym_sizes());
  CHECK_ARGUMENT(call.op, fits_scores(call, mask),
                 "attn_mask must have each dimension full or 1, got ", mask.sym_sizes(),
                 " for scores of ", Sizes(scores_shape(call)));
}

void check_attn_bias(const Call& call, const at::Tensor& bias) {
  CHECK_ARGUMENT(call.op, is_dense(bias), "attn_bias must be a dense strided tensor, got layout ",
                 layout_of(bias));
  CHECK_ARGUMENT(call.op, bias.device() == call.device, "attn_bias must be on the query's device ",
                 call.device, ", got ", bias.device());
  CHECK_ARGUMENT(call.op, is_own_or_float(call, bias), "attn_bias must be ", own_or_float(call),
                 " (a bool mask is attn_mask), got ", bias.scalar_type());
  CHECK_ARGUMENT(call.op, bias.dim() != 3 || call.query.dim() == 3,
                 "attn_bias with 3 dimensions could mean (B, L, S) or (H, L, S): unsqueeze(1) or "
                 "unsqueeze(0) it to the query's number of dimensions, got ",
                 bias.sym_sizes(), " beside a query of ", call.query.sym_sizes());
  CHECK_ARGUMENT(call.op, bias.dim() == 2 || bias.dim() == call.query.dim(),
                 "attn_bias must be (L, S) or have the query's number of dimensions, got ",
                 bias.sym_sizes(), " beside a query of ", call.query.sym_sizes());
  CHECK_ARGUMENT(call.op, fits_scores(call, bias),
                 "attn_bias must have each dimension full or 1, got ", bias.sym_sizes(),
                 " for scores of ", Sizes(scores_shape(call)));
}

void check_key_mask(const Call& call, const at::Tensor& mask) {
  CHECK_ARGUMENT(call.op, is_dense(mask), "key_mask must be a dense strided tensor, got layout ",
                 layout_of(mask));
  CHECK_ARGUMENT(call.op, mask.device() == call.device, "key_mask must be on the query's device ",
                 call.device, ", got ", mask.device());
  CHECK_ARGUMENT(call.op, mask.scalar_type() == at::kBool || is_own_or_float(call, mask),
                 "key_mask must be bool or ", own_or_float(call), ", got ", mask.scalar_type());
  const auto expected = join(call.batch, {call.keys});
  CHECK_ARGUMENT(call.op, same(mask.sym_sizes(), expected),
                 "key_mask must have the query's batch dimensions and S, ", Sizes(expected),
                 ", got ", mask.sym_sizes());
}

void check_sinks(const Call& call, const at::Tensor& sinks) {
  CHECK_ARGUMENT(call.op, is_dense(sinks), "sinks must be a dense strided tensor, got layout ",
                 layout_of(sinks));
  CHECK_ARGUMENT(call.op, sinks.device() == call.device, "sinks must be on the query's device ",
                 call.device, ", got ", sinks.device());
  CHECK_ARGUMENT(call.op, is_own_or_float(call, sinks), "sinks must be ", own_or_float(call),
                 ", got ", sinks.scalar_type());
  CHECK_ARGUMENT(call.op, sinks.dim() == 1 && holds(sinks.sym_size(0).sym_eq(call.heads)),
                 "sinks must have one value a query head, (", call.heads, "), got ",
                 sinks.sym_sizes());
}

void check_alibi_slopes(const Call& call, const at::Tensor& slopes,
                        const AttentionOptions& options) {
  CHECK_ARGUMENT(call.op, is_dense(slopes),
                 "alibi_slopes must be a dense strided tensor, got layout ", layout_of(slopes));
  CHECK_ARGUMENT(call.op, slopes.device() == call.device,
                 "alibi_slopes must be on the query's device ", call.device, ", got ",
                 slopes.device());
  CHECK_ARGUMENT(call.op, is_own_or_float(call, slopes), "alibi_slopes must be ",
                 own_or_float(call), ", got ", slopes.scalar_type());
  if (options.cu_seqlens_q) {
    const auto sequences = options.cu_seqlens_q->sym_size(0) - 1;
    CHECK_ARGUMENT(call.op,
                   same(slopes.sym_sizes(), join({}, {call.heads})) ||
                       same(slopes.sym_sizes(), join({}, {sequences, call.heads})),
                   "alibi_slopes must be (H) or have one row a packed sequence, (", sequences, ", ",
                   call.heads, "), got ", slopes.sym_sizes());
    return;
  }
  const auto expected = join(call.batch, {call.heads});
  CHECK_ARGUMENT(call.op,
                 same(slopes.sym_sizes(), Sizes(expected).slice(call.batch.size())) ||
                     same(slopes.sym_sizes(), expected),
                 "alibi_slopes must be (H) or have the query's batch dimensions and H, ",
                 Sizes(expected), ", got ", slopes.sym_sizes());
}

bool is_integer(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt;
}

// Whether values on a GPU are checked as well, at the cost of a wait in every call: for debugging.
bool checks_device_values() {
  static const bool on = [] {
    const char* const text = std::getenv("ATTENTION_EXT_CHECK_VALUES");
    return text != nullptr && std::strcmp(text, "1") == 0;
  }();
  return on;
}

// Values can be read here: a real CPU tensor, not a fake or wrapped one; a GPU's would cost a wait.
bool is_readable(const at::Tensor& tensor) {
  return (tensor.device().is_cpu() || (tensor.device().is_cuda() && checks_device_values())) &&
         tensor.has_storage() && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

at::Tensor read(const at::Tensor& tensor) {
  return tensor.to(tensor.options().device(at::kCPU).dtype(at::kLong)).contiguous();
}

void check_query_offsets(const Call& call, const at::Tensor& offsets,
                         const AttentionOptions& options) {
  CHECK_ARGUMENT(call.op, is_dense(offsets),
                 "query_offsets must be a dense strided tensor, got layout ", layout_of(offsets));
  CHECK_ARGUMENT(call.op, offsets.device() == call.device,
                 "query_offsets must be on the query's device ", call.device, ", got ",
                 offsets.device());
  CHECK_ARGUMENT(call.op, is_integer(offsets), "query_offsets must be int64 or int32, got ",
                 offsets.scalar_type());
  CHECK_ARGUMENT(call.op, options.query_offset.sym_eq(0),
                 "query_offset must stay 0 when query_offsets are given, got ",
                 options.query_offset);
  if (options.cu_seqlens_q) {
    CHECK_ARGUMENT(call.op,
                   offsets.dim() == 1 &&
                       holds((offsets.sym_size(0) + 1).sym_eq(options.cu_seqlens_q->sym_size(0))),
                   "query_offsets must have one value a packed sequence, got ", offsets.sym_sizes(),
                   " beside cu_seqlens_q of ", options.cu_seqlens_q->sym_sizes());
  } else {
    CHECK_ARGUMENT(call.op, same(offsets.sym_sizes(), call.batch),
                   "query_offsets must have the query's batch dimensions ", call.batch, ", got ",
                   offsets.sym_sizes());
  }
  if (!is_readable(offsets) || offsets.numel() == 0) return;
  const auto values = read(offsets);
  for (int64_t n = 0; n < values.numel(); ++n) {
    const int64_t offset = values.const_data_ptr<int64_t>()[n];
    CHECK_ARGUMENT(call.op, -kPositionLimit <= offset && offset <= kPositionLimit,
                   "query_offsets must lie within 2^61 of 0, got ", offset);
  }
}

void check_cu_seqlens_q(const Call& call, const at::Tensor& lengths) {
  CHECK_ARGUMENT(call.op, is_dense(lengths),
                 "cu_seqlens_q must be a dense strided tensor, got layout ", layout_of(lengths));
  CHECK_ARGUMENT(call.op, lengths.device() == call.device,
                 "cu_seqlens_q must be on the query's device ", call.device, ", got ",
                 lengths.device());
  CHECK_ARGUMENT(call.op, is_integer(lengths), "cu_seqlens_q must be int64 or int32, got ",
                 lengths.scalar_type());
  CHECK_ARGUMENT(call.op, lengths.dim() == 1 && holds(lengths.sym_size(0).sym_ge(1)),
                 "cu_seqlens_q must have one dimension and at least one value, got ",
                 lengths.sym_sizes());
}

void check_cu_seqlens_k(const Call& call, const at::Tensor& lengths, const at::Tensor& lengths_q) {
  CHECK_ARGUMENT(call.op, is_dense(lengths),
                 "cu_seqlens_k must be a dense strided tensor, got layout ", layout_of(lengths));
  CHECK_ARGUMENT(call.op, lengths.device() == call.device,
                 "cu_seqlens_k must be on the query's device ", call.device, ", got ",
                 lengths.device());
  CHECK_ARGUMENT(call.op, is_integer(lengths), "cu_seqlens_k must be int64 or int32, got ",
                 lengths.scalar_type());
  CHECK_ARGUMENT(call.op, same(lengths.sym_sizes(), lengths_q.sym_sizes()),
                 "cu_seqlens_k must have cu_seqlens_q's shape ", lengths_q.sym_sizes(), ", got ",
                 lengths.sym_sizes());
}

void check_cu_seqlens_values(const Call& call, const AttentionOptions& options) {
  if (!is_readable(*options.cu_seqlens_q) || !is_readable(*options.cu_seqlens_k)) return;
  const auto starts_q = read(*options.cu_seqlens_q), starts_k = read(*options.cu_seqlens_k);
  const int64_t* q = starts_q.const_data_ptr<int64_t>();
  const int64_t* k = starts_k.const_data_ptr<int64_t>();
  const int64_t sequences = starts_q.numel() - 1;
  CHECK_ARGUMENT(call.op, q[0] == 0, "cu_seqlens_q must start at 0, got ", q[0]);
  CHECK_ARGUMENT(call.op, k[0] == 0, "cu_seqlens_k must start at 0, got ", k[0]);
  for (int64_t n = 0; n < sequences; ++n) {
    CHECK_ARGUMENT(call.op, q[n] <= q[n + 1], "cu_seqlens_q must never fall, got ", q[n],
                   " before ", q[n + 1]);
    CHECK_ARGUMENT(call.op, k[n] <= k[n + 1], "cu_seqlens_k must never fall, got ", k[n],
                   " before ", k[n + 1]);
  }
  CHECK_ARGUMENT(call.op, call.queries.sym_eq(q[sequences]),
                 "cu_seqlens_q must end at the query's length ", call.queries, ", got ",
                 q[sequences]);
  CHECK_ARGUMENT(call.op, call.keys.sym_eq(k[sequences]),
                 "cu_seqlens_k must end at the key's length ", call.keys, ", got ", k[sequences]);
}

void check_packed(const Call& call, const AttentionOptions& options) {
  CHECK_ARGUMENT(call.op, options.cu_seqlens_q.has_value(),
                 "cu_seqlens_q must be given when cu_seqlens_k is, got None");
  CHECK_ARGUMENT(call.op, options.cu_seqlens_k.has_value(),
                 "cu_seqlens_k must be given when cu_seqlens_q is, got None");
  check_cu_seqlens_q(call, *options.cu_seqlens_q);
  check_cu_seqlens_k(call, *options.cu_seqlens_k, *options.cu_seqlens_q);
  CHECK_ARGUMENT(call.op, call.batch.size() == 1 && holds(call.batch[0].sym_eq(1)),
                 "query must be (1, H, T, E) with cu_seqlens (packed sequences), got ",
                 call.query.sym_sizes());
  CHECK_ARGUMENT(
      call.op, !options.attn_mask.has_value(),
      "attn_mask does not go with cu_seqlens: packed sequences take key_mask, window and "
      "is_causal, got a mask of ",
      options.attn_mask->sym_sizes());
  CHECK_ARGUMENT(
      call.op, !options.attn_bias.has_value(),
      "attn_bias does not go with cu_seqlens: packed sequences take alibi_slopes, got a bias of ",
      options.attn_bias->sym_sizes());
  check_cu_seqlens_values(call, options);
}

void check_dropout(const Call& call, const AttentionOptions& options) {
  CHECK_ARGUMENT(call.op, options.dropout_p >= 0.0 && options.dropout_p <= 1.0,
                 "dropout_p must lie between 0 and 1, got ", options.dropout_p);
  CHECK_ARGUMENT(
      call.op, options.dropout_p == 0.0 || options.rng_state.has_value(),
      "rng_state must be given when dropout_p > 0 (attention_ext.make_rng_state makes one), got "
      "None with dropout_p ",
      options.dropout_p);
  if (!options.rng_state) return;
  const auto& state = *options.rng_state;
  CHECK_ARGUMENT(call.op, is_dense(state), "rng_state must be a dense strided tensor, got layout ",
                 layout_of(state));
  CHECK_ARGUMENT(call.op, state.device() == call.device, "rng_state must be on the query's device ",
                 call.device, ", got ", state.device());
  CHECK_ARGUMENT(call.op, state.scalar_type() == at::kLong, "rng_state must be int64, got ",
                 state.scalar_type());
  CHECK_ARGUMENT(call.op, state.dim() == 1 && holds(state.sym_size(0).sym_eq(6)),
                 "rng_state must be (6): seed, offset, heads_total, first head, row and key, got ",
                 state.sym_sizes());
}

void check_scalars(const Call& call, const AttentionOptions& options) {
  CHECK_ARGUMENT(call.op, !options.scale || std::isfinite(*options.scale),
                 "scale must be finite, or None for 1/sqrt(E), got ", *options.scale);
  CHECK_ARGUMENT(call.op, std::isfinite(options.softcap) && options.softcap >= 0.0,
                 "softcap must be finite and at least 0 (0: none), got ", options.softcap);
  if (options.window_left) {
    CHECK_ARGUMENT(call.op, options.window_left->sym_ge(0),
                   "window_left must be at least 0, or None for no limit, got ",
                   *options.window_left);
  }
  if (options.window_right) {
    CHECK_ARGUMENT(call.op, options.window_right->sym_ge(0),
                   "window_right must be at least 0, or None for no limit, got ",
                   *options.window_right);
  }
  CHECK_ARGUMENT(call.op,
                 holds(options.query_offset.sym_ge(-kPositionLimit)) &&
                     holds(options.query_offset.sym_le(kPositionLimit)),
                 "query_offset must lie within 2^61 of 0, got ", options.query_offset);
}

std::optional<c10::SymInt> clamp_window(const std::optional<c10::SymInt>& window) {
  if (window && TORCH_GUARD_OR_FALSE(window->sym_gt(kPositionLimit)))
    return c10::SymInt(kPositionLimit);
  return window;
}

std::optional<at::Tensor> as_int64(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional<at::Tensor>(tensor->to(at::kLong)) : std::nullopt;
}

}  // namespace

AttentionOptions check_options(const Call& call, const AttentionOptions& options) {
  check_scalars(call, options);
  if (options.attn_mask) check_attn_mask(call, *options.attn_mask);
  if (options.attn_bias) check_attn_bias(call, *options.attn_bias);
  if (options.key_mask) check_key_mask(call, *options.key_mask);
  if (options.sinks) check_sinks(call, *options.sinks);
  if (options.cu_seqlens_q || options.cu_seqlens_k) check_packed(call, options);
  if (options.alibi_slopes) check_alibi_slopes(call, *options.alibi_slopes, options);
  if (options.query_offsets) check_query_offsets(call, *options.query_offsets, options);
  check_dropout(call, options);

  AttentionOptions normal = options;
  normal.window_left = clamp_window(options.window_left);
  normal.window_right = options.is_causal ? c10::SymInt(0) : clamp_window(options.window_right);
  normal.query_offsets = as_int64(options.query_offsets);
  normal.cu_seqlens_q = as_int64(options.cu_seqlens_q);
  normal.cu_seqlens_k = as_int64(options.cu_seqlens_k);
  return normal;
}

}  // namespace attention_ext::checks
