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

// The natural score of pair (i, j) of head h if it is visible, else -inf and nothing is computed.
// `product` is scale times the dot product, before softcap. h: head.h, or another of its group.
template <ScalarType kType>
AE_DEVICE float score_of(const AttentionParams& p, const Head& head, int64_t h, int64_t i,
                         int64_t j, bool& visible, float& product) {
  const Place at = place_of(p, head, i, j);
  const Dense d = dense_of(p, head.problem, h, i, j);
  visible = at.inside(0, 0) && unmasked(p, d, 0, 0);
  if (!visible) return -kInfinity;
  const Problem& problem = head.problem;
  const Bits* const q = p.query.at<Bits>(problem.batch, h, problem.q_begin + i, 0);
  const Bits* const k = p.key.at<Bits>(problem.batch, head.kv_head, problem.k_begin + j, 0);
  product = dot<kType>(q, k, static_cast<int>(p.qk_size)) * static_cast<float>(p.scale);
  const float softcap = static_cast<float>(p.softcap);
  float s = softcap > 0.0f ? capped(product, softcap, 1.0f / softcap) : product;
  if (p.alibi_slopes != nullptr) {
    s -= std::fabs(static_cast<float>(i + problem.query_offset - j)) * alibi_slope(p, head, h);
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

// Row i of head h over some of its keys, by one warp: keys in lanes for the softmax, head sizes in
// lanes for the values. `finish` gets the row's maximum, sum and whether it saw a key, then pairs
// of neighbouring sums, not yet normalised.
template <ScalarType kType, class Finish>
AE_DEVICE void careful_sums(const AttentionParams& p, const Head& head, int64_t h, int64_t i,
                            const KeyRange& keys, Finish&& finish) {
  const Problem& problem = head.problem;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float m = -kInfinity, l = 0.0f;
  bool seen = false;
  for (int64_t j0 = keys.begin; j0 < keys.end; j0 += 32) {
    bool visible = false;
    float product = 0.0f, s = -kInfinity;
    if (j0 + lane < keys.end) s = score_of<kType>(p, head, h, i, j0 + lane, visible, product);
    seen = seen || ptx::any(visible);
    const float most = std::fmax(m, warp_max(s)), base = most == -kInfinity ? 0.0f : most;
    l = l * std::exp(m - base) + warp_sum(visible ? std::exp(s - base) : 0.0f);
    m = most;
  }
  const float base = m == -kInfinity ? 0.0f : m;
  finish.row(m, l, seen);
  for (int64_t e0 = 0; e0 < p.v_size; e0 += 64) {  // 64 columns at a time, scores once for each
    const int64_t e = e0 + 2 * lane;
    float low = 0.0f, high = 0.0f;
    for (int64_t j0 = keys.begin; j0 < keys.end; j0 += 32) {
      bool visible = false;
      float product = 0.0f, prob = 0.0f;
      const int64_t j = j0 + lane;
      if (j < keys.end) prob = std::exp(score_of<kType>(p, head, h, i, j, visible, product) - base);
      const bool drops =
          p.dropout.threshold != 0 && visible && !keep(head.dropout, problem.index, h, i, j);
      if (drops) prob = 0.0f;
      const uint32_t shown = ptx::ballot(visible);
      for (int y = 0; y < 32; ++y) {
        const float weight = ptx::shuffle(prob, y);
        if ((shown >> y & 1) == 0 || e >= p.v_size) continue;
        const Bits* const v =
            p.value.at<Bits>(problem.batch, head.kv_head, problem.k_begin + j0 + y, e);
        low += weight * ptx::unpack<kType>(v[0]);
        high += weight * ptx::unpack<kType>(v[1]);
      }
    }
    if (e < p.v_size) finish.pair(e, low, high);
  }
}

}  // namespace attention_ext::kernels::cuda::tensor
