// From plain products to scores, and from scores to P and dS: the passes over the sixteen pairs of
// a thread. Shared by all passes, so that rebuilt scores have the bits the forward pass had.
#pragma once

#include "kernels/cuda/simt/product.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

// bias + key mask of one visible pair; two finite numbers have a finite sum.
template <class A>
AE_DEVICE A add_finite(A bias, A key) {
  const A sum = bias + key;
  if (is_finite(sum) || !is_finite(bias) || !is_finite(key)) return sum;
  return sum > A{0} ? kLargest<A> : -kLargest<A>;
}

AE_DEVICE bool needs_adjusting(const AttentionParams& p) {
  return p.softcap > 0 || p.alibi_slopes != nullptr || p.attn_bias.defined() ||
         (p.key_mask.defined() && !p.key_mask_is_bool);
}

// Products become scores: scale -> softcap -> ALiBi -> bias + key mask, where visible. kSlope:
// keeps softcap's slope (1 - tanh^2) in shared.slopes. Every thread of the block calls it, after
// multiply().
//
// The options take a detour through this thread's own cells of shared.pairs, so that their loop
// over the rows is not unrolled: sixteen copies of it would cost more registers than two blocks on
// a multiprocessor have. Without options there is no detour.
template <bool kSlope, class A>
AE_DEVICE void adjust_scores(const AttentionParams& p, const Problem& problem, int64_t h,
                             const TileAt& at, uint32_t visible, Shared<A>& shared,
                             A (&s)[kPer][kPer]) {
  const Lane lane;
  const A scale = static_cast<A>(p.scale);
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
#pragma unroll
    for (int n = 0; n < kPer; ++n) s[r][n] *= scale;
  }
  if (!needs_adjusting(p)) return;
  const A softcap = static_cast<A>(p.softcap);
  if (kSlope && p.softcap > 0) __syncthreads();  // others may still read the operands
  store_pairs(s, shared);
  const bool has_bias = p.attn_bias.defined();
  const bool has_key_bias = p.key_mask.defined() && !p.key_mask_is_bool;
  const A alibi =
      p.alibi_slopes == nullptr
          ? A{0}
          : static_cast<const A*>(
                p.alibi_slopes)[problem.index * p.alibi_stride[0] + h * p.alibi_stride[1]];
#pragma unroll 1
  for (int r = 0; r < kPer; ++r) {
    const int64_t i = at.i0 + lane.row(r);
    const A distance = static_cast<A>(i + problem.query_offset - at.j0);
#pragma unroll 1
    for (int n = 0; n < kPer; ++n) {
      const int key = lane.key(n);
      if ((visible & pair_bit(r, n)) == 0) continue;
      A& cell = shared.pairs[lane.row(r)][key];
      A score = cell;
      if (p.softcap > 0) {
        const A u = std::tanh(score / softcap);
        if (kSlope) shared.slopes[lane.row(r)][key] = A{1} - u * u;
        score = u * softcap;
      }
      if (p.alibi_slopes != nullptr) score -= std::fabs(distance - static_cast<A>(key)) * alibi;
      if (has_bias || has_key_bias) {
        A bias{0}, key_bias{0};
        if (has_bias) {
          bias = load_any<A>(p.attn_bias, p.attn_bias.offset(problem.batch, h, i, at.j0 + key));
        }
        if (has_key_bias) key_bias = float_key_mask<A>(p, problem, at.j0 + key);
        score += add_finite(bias, key_bias);
      }
      cell = score;
    }
  }
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
#pragma unroll
    for (int n = 0; n < kPer; ++n) s[r][n] = shared.pairs[lane.row(r)][lane.key(n)];
  }
}

// Over the 16 lanes that share a row; every one of them gets the result, formed in the same order.
template <class A>
AE_DEVICE A row_sum(A x) {
#pragma unroll
  for (int step = kSide / 2; step > 0; step /= 2) x += __shfl_xor_sync(kWholeWarp, x, step);
  return x;
}
template <class A>
AE_DEVICE A row_max(A x) {
#pragma unroll
  for (int step = kSide / 2; step > 0; step /= 2) {
    x = std::fmax(x, __shfl_xor_sync(kWholeWarp, x, step));
  }
  return x;
}

// What backward and weights kernels know of this thread's four rows.
template <class A>
struct RowStatistics {
  A lse[kPer], residual[kPer], delta[kPer];
  AE_DEVICE void load(const AttentionParams& p, const View* delta_view, const Problem& problem,
                      int64_t h, const TileAt& at) {
    const Lane lane;
#pragma unroll
    for (int r = 0; r < kPer; ++r) {
      const bool real = lane.row(r) < at.rows;
      const int64_t i = problem.q_begin + at.i0 + lane.row(r);
      lse[r] = real ? *p.logsumexp.at<const A>(problem.batch, h, i, 0) : A{0};
      residual[r] = real ? *p.residual.at<const A>(problem.batch, h, i, 0) : A{0};
      delta[r] = real && delta_view != nullptr && delta_view->defined()
                     ? *delta_view->at<const A>(problem.batch, h, i, 0)
                     : A{0};
    }
  }
  // P = exp((s - lse) - residual) is exact also where logsumexp alone is not.
  AE_DEVICE A probability(int r, A score) const { return std::exp((score - lse[r]) - residual[r]); }
};

// The two tiles of the backward pass.
template <class A>
struct GradientPairs {
  A kept[kPer][kPer];    // P after dropout
  A scores[kPer][kPer];  // dS = P (dP - delta), of the scores behind softcap
  A inner[kPer][kPer];   // dS of the plain products but for the scale: through softcap's slope
};

// Fills them for a visible tile; every thread of the block calls it. want_scores: dS is needed.
// Pairs that are not visible are selected away, never multiplied by zero.
template <class T>
AE_DEVICE void gradient_pairs(const BackwardParams& p, const Problem& problem, int64_t h,
                              const TileAt& at, uint32_t visible, bool want_scores,
                              Shared<Accumulation<T>>& shared,
                              GradientPairs<Accumulation<T>>& out) {
  using A = Accumulation<T>;
  const Lane lane;
  const int64_t g = h / p.group(), i = problem.q_begin + at.i0, j = problem.k_begin + at.j0;
  const bool drop = p.dropout.threshold != 0;
  if (drop) fill_keep(p, problem, h, at, shared);

  A dp[kPer][kPer] = {};
  if (want_scores && p.grad_output.defined()) {
    multiply(Rows<T>(p.grad_output, problem.batch, h, i, at.rows),
             Rows<T>(p.value, problem.batch, g, j, at.keys), p.v_size, shared, dp);
  } else if (want_scores && p.grad_weights.defined()) {
    const A factor = static_cast<A>(p.grad_weights_scale);
#pragma unroll
    for (int r = 0; r < kPer; ++r) {
#pragma unroll
      for (int n = 0; n < kPer; ++n) {
        if ((visible & pair_bit(r, n)) == 0) continue;
        const int64_t offset =
            p.grad_weights.offset(problem.batch, h, at.i0 + lane.row(r), at.j0 + lane.key(n));
        dp[r][n] = load_any<A>(p.grad_weights, offset) * factor;
      }
    }
  }
  A products[kPer][kPer];
  multiply(Rows<T>(p.query, problem.batch, h, i, at.rows),
           Rows<T>(p.key, problem.batch, g, j, at.keys), p.qk_size, shared, products);

  adjust_scores</*kSlope=*/true>(p, problem, h, at, visible, shared, products);

  RowStatistics<A> rows;
  rows.load(p, &p.delta, problem, h, at);
  const A rescale = static_cast<A>(p.dropout.rescale);
  const int shift = drop ? keep_shift(p, at) : 0;
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
#pragma unroll
    for (int n = 0; n < kPer; ++n) {
      const bool seen = (visible & pair_bit(r, n)) != 0;
      const A prob = rows.probability(r, products[r][n]);
      A kept = prob, grad = dp[r][n];
      if (drop) {
        const bool stays = is_kept(shared, shift, lane.row(r), lane.key(n));
        kept = stays ? prob * rescale : A{0};
        grad = stays ? grad * rescale : A{0};
      }
      grad = prob * (grad - rows.delta[r]);
      A inner = grad;
      if (p.softcap > 0) inner *= shared.slopes[lane.row(r)][lane.key(n)];
      out.kept[r][n] = seen ? kept : A{0};
      out.scores[r][n] = seen ? grad : A{0};
      out.inner[r][n] = seen ? inner : A{0};
    }
  }
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
