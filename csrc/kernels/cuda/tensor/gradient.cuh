// What the two backward kernels share: probabilities rebuilt from the row statistics, dS, the
// scaling that keeps dS inside float16, and the careful way for one pair.
//
//   P = exp((s - logsumexp) - residual)      dS = P (keep ? dP * rescale : 0  -  delta)
//
// Hidden pairs are selected away, never multiplied by zero.
#pragma once

#include "kernels/cuda/choose.h"
#include "kernels/cuda/plan.h"
#include "kernels/cuda/tensor/careful.cuh"
#include "kernels/cuda/tensor/entries.h"
#include "kernels/cuda/tensor/walk.cuh"

namespace attention_ext::kernels::cuda::tensor {

// Products of one slice become probabilities. lse(n, c) and rest(n, c) are the statistics of the
// element's row. `natural`: adjust_scores() has been here.
template <int kColumns, class Lse, class Rest>
AE_DEVICE void make_probabilities(float (&s)[kColumns / 8][4], bool natural, float scale,
                                  uint32_t visible, Lse&& lse, Rest&& rest) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float above = natural ? s[n][c] - lse(n, c) : std::fma(s[n][c], scale, -lse(n, c));
      const float prob = ptx::exp2_approx((above - rest(n, c)) * kLog2E);
      s[n][c] = (visible >> (4 * n + c) & 1) != 0 ? prob : 0.0f;
    }
  }
}

// dP becomes dS.
template <int kColumns, class Delta>
AE_DEVICE void make_gradients(float (&dp)[kColumns / 8][4], const float (&prob)[kColumns / 8][4],
                              uint32_t visible, uint32_t kept, float rescale, Delta&& delta) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float got = (kept >> (4 * n + c) & 1) != 0 ? dp[n][c] * rescale : 0.0f;
      const float ds = prob[n][c] * (got - delta(n, c));
      dp[n][c] = (visible >> (4 * n + c) & 1) != 0 ? ds : 0.0f;
    }
  }
}

// dS goes through softcap's slope on its way to Q and K; `products` are Q K^T once more, which is
// cheaper than keeping them in registers for a rare option.
template <int kColumns>
AE_DEVICE void multiply_by_slope(float (&ds)[kColumns / 8][4],
                                 const float (&products)[kColumns / 8][4], float scale,
                                 float softcap) {
  const float unit = -2.0f * kLog2E * scale / softcap;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      // 1 - tanh^2(x) = 4 t / (1 + t)^2, t = exp(-2 |x|).
      const float t = ptx::exp2_approx(-std::fabs(products[n][c] * unit));
      const float r = ptx::reciprocal_approx(1.0f + t);
      // Hidden pairs have a dS of 0, and perhaps a product that is not finite.
      ds[n][c] = ds[n][c] != 0.0f ? ds[n][c] * (4.0f * t * r * r) : 0.0f;
    }
  }
}

// dS may exceed float16 where its inputs do not, and small gradients fall below it. Every row of an
// accumulator has its own power of two, which its terms are multiplied with before they are
// rounded; it falls when a larger term comes, and the sums so far follow.
template <ScalarType kType>
struct TermScale {
  static constexpr bool kUsed = kType == ScalarType::kFloat16;
  float factor[2] = {0x1p100f, 0x1p100f};

  template <int kColumns, int kSize>
  AE_DEVICE void apply(float (&terms)[kColumns / 8][4], float (&sums)[kSize / 8][4]) {
    if constexpr (kUsed) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = 0.0f;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          most = std::fmax(
              most, std::fmax(std::fabs(terms[n][2 * half]), std::fabs(terms[n][2 * half + 1])));
        }
        most = quad_max(most);
        // The largest power of two that keeps `most` below 2^15; infinities and 0 change nothing.
        const float wanted = is_finite(most) ? power_below(most) : 0x1p100f;
        const float next = std::fmin(factor[half], wanted);
        if (next != factor[half]) {
          const float change = next / factor[half];
          factor[half] = next;
#pragma unroll
          for (int e = 0; e < kSize / 8; ++e) {
            sums[e][2 * half] *= change;
            sums[e][2 * half + 1] *= change;
          }
        }
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          terms[n][2 * half] *= factor[half];
          terms[n][2 * half + 1] *= factor[half];
        }
      }
    }
  }
  // What the sums of a row are multiplied with at the end.
  AE_DEVICE float undo(int half) const { return kUsed ? 1.0f / factor[half] : 1.0f; }

 private:
  AE_DEVICE static float power_below(float most) {
    const int exponent = most > 0.0f ? ilogb(most) : -86;
    return ldexpf(1.0f, 14 - (exponent < -86 ? -86 : exponent));
  }
};

// One visible pair the careful way: its probability after dropout, and dS with softcap's slope.
struct PairGradient {
  bool visible;
  float weight, ds;
};
template <ScalarType kType>
AE_DEVICE PairGradient pair_gradient(const BackwardParams& p, const Head& head, int64_t i,
                                     int64_t j) {
  PairGradient g{false, 0.0f, 0.0f};
  float product = 0.0f;
  const float s = score_of<kType>(p, head, head.h, i, j, g.visible, product);
  if (!g.visible) return g;
  const Problem& problem = head.problem;
  const int64_t row = problem.q_begin + i;
  const float lse = *p.logsumexp.at<const float>(problem.batch, head.h, row, 0);
  const float rest = *p.residual.at<const float>(problem.batch, head.h, row, 0);
  const float delta = *p.delta.at<const float>(problem.batch, head.h, row, 0);
  const float prob = std::exp((s - lse) - rest);
  const bool kept = p.dropout.threshold == 0 || keep(head.dropout, problem.index, head.h, i, j);
  float dp = 0.0f;
  if (kept && p.grad_output.defined()) {
    const Bits* const v =
        p.value.at<const Bits>(problem.batch, head.kv_head, problem.k_begin + j, 0);
    const Bits* const g_out = p.grad_output.at<const Bits>(problem.batch, head.h, row, 0);
    dp = dot<kType>(g_out, v, static_cast<int>(p.v_size)) * static_cast<float>(p.dropout.rescale);
  }
  g.weight = kept ? prob : 0.0f;
  g.ds = prob * (dp - delta);
  if (p.softcap > 0) {
    const float u = std::tanh(product / static_cast<float>(p.softcap));
    g.ds *= 1.0f - u * u;
  }
  return g;
}

template <ScalarType kType>
AE_DEVICE void store_pair(const View& to, int64_t offset, float low, float high) {
  *reinterpret_cast<uint32_t*>(reinterpret_cast<Bits*>(to.data) + offset) =
      ptx::pack<kType>(low, high);
}

}  // namespace attention_ext::kernels::cuda::tensor
