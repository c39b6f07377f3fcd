// The careful way for blocks in which a hidden key or row holds something that is not finite: a
// product of tiles multiplies it by zero, which is NaN. Rows are computed again one by one, with
// scalar products and every hidden pair left out. Rare, so written for clarity; kept out of line so
// that the tensor-core loops pay no register for it.
#pragma once

#include "kernels/cuda/tensor/scores.cuh"

namespace attention_ext::kernels::cuda::tensor {

template <ScalarType kType>
AE_DEVICE float dot(const Bits* a, const Bits* b, int size) {
  float sum = 0.0f;
  for (int e = 0; e < size; ++e) sum += ptx::unpack<kType>(a[e]) * ptx::unpack<kType>(b[e]);
  return sum;
}

// The natural score of pair (i, j) if it is visible, else -inf and nothing is computed. `product`
// is scale times the dot product, before softcap.
template <ScalarType kType>
AE_DEVICE float score_of(const AttentionParams& p, const Head& head, int64_t i, int64_t j,
                         bool& visible, float& product) {
  const Place at = place_of(p, head, i, j);
  const Dense d = dense_of(p, head, i, j);
  visible = at.inside(0, 0) && unmasked(p, d, 0, 0);
  if (!visible) return -kInfinity;
  const Problem& problem = head.problem;
  const Bits* const q = p.query.at<Bits>(problem.batch, head.h, problem.q_begin + i, 0);
  const Bits* const k = p.key.at<Bits>(problem.batch, head.kv_head, problem.k_begin + j, 0);
  product = dot<kType>(q, k, static_cast<int>(p.qk_size)) * static_cast<float>(p.scale);
  const float softcap = static_cast<float>(p.softcap);
  float s = softcap > 0.0f ? capped(product, softcap, 1.0f / softcap) : product;
  if (p.alibi_slopes != nullptr) {
    s -= std::fabs(static_cast<float>(i + problem.query_offset - j)) * alibi_slope(p, head);
  }
  const float b = d.bias != nullptr ? load_value(d.bias, p.attn_bias.type, 0) : 0.0f;
  return s + (has_key_bias(p) ? sum_of_biases(b, load_value(d.key_mask, p.key_mask.type, 0)) : b);
}

AE_DEVICE float warp_max(float x) {
  for (int step = 16; step > 0; step >>= 1) {
    x = std::fmax(x, __shfl_xor_sync(0xffffffffu, x, step));
  }
  return x;
}
AE_DEVICE float warp_sum(float x) {
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

}  // namespace attention_ext::kernels::cuda::tensor
