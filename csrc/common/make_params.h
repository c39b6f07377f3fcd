// From tensors and options to the params struct that kernels take. The arguments have been checked.
#pragma once

#include <memory>
#include <vector>

#include "kernels/params.h"
#include "ops/attention.h"

namespace attention_ext {

// What the params point at: small tensors in the accumulation type, tables of batch offsets and of
// positions. On a device nothing is read back and nothing is copied from the host's memory (a
// captured CUDA graph would read it again when it runs): tables are computed there, dropout's state
// and packed sequences' borders are read by the kernels.
struct ParamsStorage {
  bool on_device = false;
  std::vector<at::Tensor> tensors;
  std::vector<std::unique_ptr<int64_t[]>> tables;
};

// Sizes of a call, with the leading dimensions folded into one batch.
struct CallShape {
  at::IntArrayRef batch_sizes;  // of the query
  int64_t batch, heads, kv_heads, q_length, k_length, qk_size, v_size;
};
CallShape call_shape(const at::Tensor& query, const at::Tensor& key, int64_t v_size);

kernels::ScalarType scalar_type(at::ScalarType type);
at::ScalarType accumulation_type(at::ScalarType type);

// A view of (..., head, row, column) whose leading dimensions, each full or 1, fold onto
// `batch_sizes`.
kernels::View make_view(const at::Tensor& tensor, at::IntArrayRef batch_sizes,
                        ParamsStorage& storage);
// The same for (..., head, row): row statistics.
kernels::View make_row_view(const at::Tensor& tensor, at::IntArrayRef batch_sizes,
                            ParamsStorage& storage);

// Everything that the options and the tensors shared by all ops say. `value` may be undefined
// (weights).
void fill_params(kernels::AttentionParams& params, const CallShape& shape, const at::Tensor& query,
                 const at::Tensor& key, const at::Tensor& value, const AttentionOptions& options,
                 ParamsStorage& storage);

}  // namespace attention_ext
