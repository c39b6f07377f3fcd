// One tile of the backward pass: probabilities rebuilt from the row statistics, and dS = P (dP -
// delta), both as [key][query lane]. Shared by the gradients of query, key, value (backward.h) and
// of the bias (bias_gradient.h), for attention and for attention weights, whose incoming gradient
// takes the place of dP.
#pragma once

#include "kernels/cpu/inputs.h"
#include "kernels/cpu/row_scores.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// dO * (O + what rounding took from O) of row i, added up to one vector.
template <class T>
AE_INLINE Vec<T> row_products(const BackwardParams& p, int64_t b, int64_t h, int64_t i) {
  constexpr int W = kLanes<T>;
  const Rows grad(p.grad_output, b, h, i, 0), output(p.output, b, h, i, 0);
  const Rows rest(p.output_residual, b, h, i, 0);
  const bool has_rest = p.output_residual.defined();
  const auto alike = [&](const Rows& x) {
    return x.type == grad.type && x.column_stride == grad.column_stride;
  };
  Vec<T> sum{};
  int64_t done = 0;  // columns
  const auto whole = [&]<class N>() {
    const N *const g = whole_rows<N>(grad, 0, 0), *const o = whole_rows<N>(output, 0, 0);
    const N* const left = has_rest ? whole_rows<N>(rest, 0, 0) : nullptr;
    for (; done + W <= p.v_size; done += W) {
      Vec<T> exact = load_numbers(o + done);
      if (left != nullptr) exact += load_numbers(left + done);
      sum = fma(load_numbers(g + done), exact, sum);
    }
  };
  if (alike(output) && (!has_rest || alike(rest))) with_whole<T>(grad, whole);
  const auto piece = [&](const Rows& row) {
    return load_piece<T>(row.at(0, done), row.type, row.column_stride, p.v_size - done);
  };
  for (; done < p.v_size; done += W) {
    Vec<T> exact = piece(output);
    if (has_rest) exact += piece(rest);
    sum = fma(piece(grad), exact, sum);
  }
  return sum;
}

// delta = sum of dO * (O + what rounding took from O) - dlse, of n rows from i on, or p.delta; out
// holds whole vectors, zeros behind n. Rows of a nearly one-hot softmax are differences of almost
// equal numbers, which the rounding of a 16-bit O would drown.
template <class T>
void row_deltas(const BackwardParams& p, int64_t b, int64_t h, int64_t i, int64_t n, T* out) {
  constexpr int W = kLanes<T>;
  const auto load_rows = [&](const View& view, int64_t x) {
    T rows[W] = {};
    for (int64_t r = 0; r < smaller(W, n - x); ++r) rows[r] = *view.at<T>(b, h, i + x + r, 0);
    return load(rows);
  };
  for (int64_t x = 0; x < n; x += W) {
    if (p.delta.defined()) {
      store(out + x, load_rows(p.delta, x));
      continue;
    }
    Vec<T> sums[W] = {};
    for (int64_t r = 0; p.grad_output.defined() && r < smaller(W, n - x); ++r) {
      sums[r] = row_products<T>(p, b, h, i + x + r);
    }
    Vec<T> total = sum_each<T>(sums);
    if (p.grad_logsumexp.defined()) total -= load_rows(p.grad_logsumexp, x);
    store(out + x, total);
  }
}

// The query side of a block, packed once and used against many keys. `factor` multiplies dO and
// delta, and so dS: the scale of the scores, where dS serves the gradients of Q and K alone.
template <class T, class In = T>
struct QueryBlock {
  In* query;                  // scale Q^T [E][kBlock]
  In* grad;                   // factor dO^T [Ev][kBlock]
  T* rows;                    // scale Q [row][padded], for decoding rows
  T *lse, *residual, *delta;  // [kBlock]
  T grad_factor;              // the factor, which pairs do not hold

  AE_INLINE void allocate(Arena& arena, const BackwardParams& p) {
    query = arena.take<In>(Input<In>::depth(p.qk_size) * kBlock);
    grad = arena.take<In>(Input<In>::depth(p.v_size) * kBlock);
    rows = arena.take<T>(decoding(p) ? kDecodeRows * round_up(p.qk_size, kLanes<T>) : 0);
    lse = arena.take<T>(kBlock);
    residual = arena.take<T>(kBlock);
    delta = arena.take<T>(kBlock);
  }

  void pack(const BackwardParams& p, const Problem& problem, int64_t h, int64_t i0, int64_t nq,
            T factor) {
    const int64_t i = problem.q_begin + i0;
    Input<In>::pack(Rows(p.query, problem.batch, h, i, 0), nq, p.qk_size, static_cast<T>(p.scale),
                    query);
    if (decoding(p)) {
      copy_scaled<T>(Rows(p.query, problem.batch, h, i, 0), nq, p.qk_size, static_cast<T>(p.scale),
                     rows, round_up(p.qk_size, kLanes<T>));
    }
    if (p.grad_output.defined()) {
      Input<In>::pack(Rows(p.grad_output, problem.batch, h, i, 0), nq, p.v_size, factor, grad);
    }
    grad_factor = factor;
    row_deltas<T>(p, problem.batch, h, i, nq, delta);
    for (int64_t x = 0; x < round_up(nq, kLanes<T>); ++x) {
      const bool real = x < nq;
      lse[x] = real ? *p.logsumexp.at<T>(problem.batch, h, i + x, 0) : T{0};
      residual[x] = real ? *p.residual.at<T>(problem.batch, h, i + x, 0) : T{0};
      delta[x] = real ? factor * delta[x] : T{0};
    }
  }
};

template <class T, class In = T>
struct GradientTile {
  static constexpr int W = kLanes<T>;
  Tile<T> tile;
  T* probabilities;  // P after dropout
  T* scores_grad;    // dS
  T* cap;            // slope of softcap
  uint8_t* keep;

  AE_INLINE void allocate(Arena& arena, const BackwardParams& p) {
    tile.allocate(arena, p);
    probabilities = arena.take<T>(kBlock * kBlock);
    scores_grad = arena.take<T>(kBlock * kBlock);
    cap = arena.take<T>(p.softcap > 0 ? kBlock * kBlock : 0);
    keep = arena.take<uint8_t>(p.dropout.threshold != 0 ? kBlock * kBlock : 0);
  }

  // dP arrives from outside for attention weights.
  AE_INLINE void load_weights_grad(const BackwardParams& p, const Problem& problem, int64_t h) {
    const Rows rows(p.grad_weights, problem.batch, h, tile.i0, tile.j0);
    transpose_in<T>(rows, tile.nq, tile.nk, static_cast<T>(p.grad_weights_scale), scores_grad,
                    kBlock);
  }

  // Both tiles for the classified block. want_grad: dS is needed; with_cap: dS goes through
  // softcap's slope (it does for Q and K, not for the bias, which is added behind it). `row_sums`,
  // if given, gains the sum over keys of dS (without that slope).
  void compute(const BackwardParams& p, const Problem& problem, int64_t h,
               const QueryBlock<T, In>& q, const Operand<In>& key, const Operand<In>& value,
               bool want_grad, bool with_cap, T* row_sums) {
    if (p.dropout.threshold != 0) {
      keep_tile<T>(p.dropout, problem.index, h, tile.i0, tile.lanes, tile.j0, tile.nk, keep,
                   kBlock);
    }
    if (p.grad_weights.defined() && want_grad) load_weights_grad(p, problem, h);
    if constexpr (std::is_same_v<T, In>) {
      if (decoding(p)) score_tile<T>(q.rows, round_up(p.qk_size, W), key, tile, probabilities);
    }
    for_strips<kStripVectors>(static_cast<int>(tile.lanes / W), [&]<int NV>(int v) {
      strip<NV>(p, problem, h, q, key, value, v * W, want_grad, with_cap, row_sums);
    });
  }

  template <int NV>
  AE_INLINE void strip(const BackwardParams& p, const Problem& problem, int64_t h,
                       const QueryBlock<T, In>& q, const Operand<In>& key, const Operand<In>& value,
                       int64_t x, bool want_grad, bool with_cap, T* row_sums) {
    const KeyRange keys = tile.strip_keys(x, NV * W);
    clear<NV>(probabilities + x, want_grad ? scores_grad + x : nullptr, keys);
    if (keys.begin >= keys.end) return;
    const int64_t count = keys.end - keys.begin;
    if (!decoding(p)) {
      multiply_inputs<T, NV>(key.data + keys.begin * key.stride, key.stride, q.query + x,
                             probabilities + keys.begin * kBlock + x, count, p.qk_size,
                             static_cast<T>(p.scale), &tile.ahead);
    }
    if (want_grad && !p.grad_output.defined() && !p.grad_weights.defined()) {
      for_scores<T, NV>(scores_grad + x, kBlock, keys,
                        [](Vec<T>, int64_t, int64_t) { return Vec<T>{}; });
    } else if (want_grad && p.grad_output.defined()) {
      multiply_inputs<T, NV>(value.data + keys.begin * value.stride, value.stride, q.grad + x,
                             scores_grad + keys.begin * kBlock + x, count, p.v_size, q.grad_factor,
                             &tile.ahead);
    }
    if (needs_adjusting(p, tile)) {
      adjust_scores<T, NV>(p, problem, h, tile, x, probabilities + x, kBlock, keys,
                           p.softcap > 0 ? cap + x : nullptr);
    }
    const bool plain = !tile.mixed && p.softcap == 0 && p.dropout.threshold == 0;
    with_bias_step<T, /*kHide=*/false>(tile, [&](const auto& last) {
      if (plain && want_grad && row_sums == nullptr) {
        finish<NV, false>(p, q, x, keys, want_grad, with_cap, row_sums, last);
      } else {
        finish<NV, true>(p, q, x, keys, want_grad, with_cap, row_sums, last);
      }
    });
  }

  // Keys of the tile that the strip's window leaves out hold zeros.
  template <int NV>
  AE_INLINE void clear(T* first, T* second, KeyRange keys) {
    for (int64_t y = 0; y < tile.nk; ++y) {
      if (y == keys.begin) y = keys.end;
      if (y >= tile.nk) break;
      AE_UNROLL for (int v = 0; v < NV; ++v) {
        store(first + y * kBlock + v * W, Vec<T>{});
        if (second != nullptr) store(second + y * kBlock + v * W, Vec<T>{});
      }
    }
  }

  // P = exp((s - lse) - residual), dS = P (dP - delta). Hidden pairs are selected away, never
  // multiplied by zero.
  template <int NV, bool kGeneral, class Last>
  __attribute__((noinline)) void finish(const BackwardParams& p, const QueryBlock<T, In>& q,
                                        int64_t x, KeyRange keys, bool want_grad, bool with_cap,
                                        T* row_sums, const Last& last) {
    const bool drop = kGeneral && p.dropout.threshold != 0;
    const bool cap_slope = kGeneral && with_cap && p.softcap > 0;
    const T rescale = static_cast<T>(p.dropout.rescale);
    AE_UNROLL for (int v = 0; v < NV; ++v) {
      const int64_t lane = x + v * W;
      const Vec<T> lse = load(q.lse + lane), residual = load(q.residual + lane);
      const Vec<T> delta = load(q.delta + lane);
      Vec<T> total{};
      for (int64_t y = keys.begin; y < keys.end; ++y) {
        const int64_t at = y * kBlock + lane;
        const Vec<T> score = last(load(probabilities + at), at);
        const Vec<T> prob = exp_vector<T>((score - lse) - residual);
        if constexpr (!kGeneral) {
          store(probabilities + at, prob);
          store(scores_grad + at, prob * (load(scores_grad + at) - delta));
          continue;
        }
        Vec<T> kept = prob;
        Vec<T> grad = want_grad ? load(scores_grad + at) : Vec<T>{};
        if (drop) {
          const Mask<T> stays = mask_from_bytes<T>(keep + at);
          kept = select(stays, prob * rescale, Vec<T>{});
          grad = select(stays, grad * rescale, Vec<T>{});
        }
        grad = prob * (grad - delta);
        if (tile.mixed) {
          const Mask<T> visible = mask_from_bytes<T>(tile.visible + at);
          kept = select(visible, kept, Vec<T>{});
          grad = select(visible, grad, Vec<T>{});
          total += grad;
          if (cap_slope) grad = select(visible, grad * load(cap + at), Vec<T>{});
        } else {
          total += grad;
          if (cap_slope) grad *= load(cap + at);
        }
        store(probabilities + at, kept);
        if (want_grad) store(scores_grad + at, grad);
      }
      if (kGeneral && row_sums != nullptr) store(row_sums + lane, load(row_sums + lane) + total);
    }
  }
};

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
