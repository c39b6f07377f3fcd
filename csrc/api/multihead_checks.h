// What nn::MultiheadAttention refuses: at construction, and at every call before any work.
#pragma once

#include "api/multihead_masks.h"
#include "attention_ext/nn.h"

namespace attention_ext::nn {

void check_options(const MultiheadAttentionOptions& options);

// The arguments of one call with a batch dimension, and its sizes.
struct Inputs {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  at::Tensor key_padding_mask;
  at::Tensor attn_mask;
  bool batched;  // whether they had that dimension before
  Sizes sizes;
};

// Equal inputs stay the same tensor, so that one projection serves them.
Inputs checked_inputs(const MultiheadAttentionOptions& options, const at::Tensor& query,
                      const at::Tensor& key, const at::Tensor& value,
                      const at::Tensor& key_padding_mask, const at::Tensor& attn_mask);

}  // namespace attention_ext::nn
