// The score matrix of one call as dense ATen tensors: what composite.cpp differentiates. Shapes are
// (..., H, L, S); everything is in the accumulation dtype, key heads repeated for the query heads
// they serve.
#pragma once

#include "ops/attention.h"

namespace attention_ext::composite {

struct DenseScores {
  at::Tensor query, key;  // (..., H, L, E) and (..., H, S, E); rows hidden from everything are zero
  double scale;
  at::Tensor capped;     // scores after the softcap, only if there is one
  at::Tensor cap_slope;  // d capped / d (scale * q.k), only if there is a softcap
  at::Tensor scores;     // with ALiBi and biases
  at::Tensor visible;    // bool, broadcastable to the scores; undefined: all visible
  at::Tensor keep;       // 0 or 1 / (1 - p), (..., H, L, S); undefined: no dropout
};

DenseScores dense_scores(const at::Tensor& query, const at::Tensor& key,
                         const AttentionOptions& options);

// The hidden ones replaced by `other`.
at::Tensor where_visible(const DenseScores& dense, const at::Tensor& values, double other);

// Rows that something sees, (..., L or 1); undefined: all of them.
at::Tensor live_rows(const DenseScores& dense);

// (..., Hkv, S, E) -> (..., H, S, E), each head repeated for its group, and the sum over the groups
// back.
at::Tensor repeat_heads(const at::Tensor& tensor, const c10::SymInt& heads);
at::Tensor sum_groups(const at::Tensor& tensor, const c10::SymInt& key_heads);

// Zero in the rows (of the last dimension but one) where `live` is false.
at::Tensor zero_rows(const at::Tensor& tensor, const at::Tensor& live);

// The keep mask of contract section 2, point 9, scaled: Philox4x32-10 in int64 arithmetic.
at::Tensor dropout_keep(const at::Tensor& query, const at::Tensor& key,
                        const AttentionOptions& options);

}  // namespace attention_ext::composite
