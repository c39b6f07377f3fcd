// torch's masks of a multi-head attention module as the operators take them; what
// attention_ext/_module_masks.py is in Python. For the module in this folder.
#pragma once

#include "api/functional.h"

namespace attention_ext::nn {

// The sizes of one call; `keys` leaves out the appended ones.
struct Sizes {
  int64_t batch;
  int64_t heads;
  int64_t length;
  int64_t keys;
  int64_t appended;
};

struct MaskArguments {
  at::Tensor attn_mask;         // (L, S) or (N * H, L, S), true = hidden or float, or undefined
  at::Tensor key_padding_mask;  // (N, S), true = hidden or float, or undefined
  bool is_causal;               // without effect beside attn_mask
  Window window;                // on top of all masks
};

// Inverts bool masks, gives float ones a dtype that fits `like` (the projected query), and lets
// every query see the appended keys. Nothing is expanded. Returns options with all masks set.
AttentionOptions translate_masks(const MaskArguments& masks, const Sizes& sizes,
                                 const at::Tensor& like);

}  // namespace attention_ext::nn
