// delta = sum over keys of P dP, where rowsum(dO * O) would not do: with 16-bit outputs and
// dropout, the rescaled output's rounding meets products that should cancel (a row with one visible
// key has no gradient at all). Two products more than the row sum needs; dense attention pays
// several passes over all scores there.
#pragma once

#include "kernels/cpu/gradient_tile.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

template <class T>
struct ExactDelta {
  static constexpr int W = kLanes<T>;
  const BackwardParams& p;
  const int64_t e_padded, ev_padded;
  GradientTile<T> gradient;
  QueryBlock<T> packed;
  T *key, *value, *sums;

  AE_INLINE ExactDelta(const BackwardParams& params, Arena& arena)
      : p(params), e_padded(round_up(params.qk_size, W)), ev_padded(round_up(params.v_size, W)) {
    gradient.allocate(arena, p);
    packed.allocate(arena, p);
    key = arena.take<T>(kBlock * e_padded);
    value = arena.take<T>(kBlock * ev_padded);
    sums = arena.take<T>(kBlock);
  }

  void query_rows(const Problem& problem, int64_t h, int64_t i0, int64_t nq) {
    Tile<T>& tile = gradient.tile;
    tile.i0 = i0;
    tile.nq = nq;
    packed.pack(p, problem, h, i0, nq);
    __builtin_memset(packed.delta, 0, kBlock * sizeof(T));
    __builtin_memset(sums, 0, kBlock * sizeof(T));
    const int64_t step = key_block(problem.k_length), g = h / p.group();
    for (int64_t j0 = 0; j0 < problem.k_length; j0 += step) {
      tile.j0 = j0;
      tile.nk = smaller(step, problem.k_length - j0);
      if (classify<T>(p, problem, h, tile) == Visibility::kHidden) continue;
      const int64_t j = problem.k_begin + j0;
      copy_in<T>(Rows(p.key, problem.batch, g, j, 0), tile.nk, p.qk_size, key, e_padded);
      copy_in<T>(Rows(p.value, problem.batch, g, j, 0), tile.nk, p.v_size, value, ev_padded);
      gradient.compute(p, problem, h, packed, {key, e_padded}, {value, ev_padded},
                       /*want_grad=*/true, /*with_cap=*/false, sums);
    }
    for (int64_t x = 0; x < nq; ++x) {
      const int64_t i = problem.q_begin + i0 + x;
      T delta = -sums[x];  // compute() takes dS away
      if (p.grad_logsumexp.defined()) delta -= *p.grad_logsumexp.at<T>(problem.batch, h, i, 0);
      *p.delta.at<T>(problem.batch, h, i, 0) = delta;
    }
  }
};

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
