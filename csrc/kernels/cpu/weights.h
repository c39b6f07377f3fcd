// Attention weights rebuilt from the row statistics, P = exp((s - lse) - residual) after dropout:
// per head, or averaged over the heads in scratch, so that (B, H, L, S) exists only if the caller
// asked for it.
#pragma once

#include "kernels/cpu/inputs.h"
#include "kernels/cpu/row_scores.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// Keys an item holds at a time: the queries are packed once for them.
constexpr int64_t kWeightsKeyBlocks = 8;

template <class T, class In = T>
struct Weights {
  static constexpr int W = kLanes<T>;
  const WeightsParams& p;
  Tile<T> tile;
  In* query;  // scale Q^T [E][kBlock], or scale Q [row][padded] for decoding rows
  In* rows;   // K block where it cannot be read in place
  T *lse, *residual, *scores, *sums;
  uint8_t* keep;

  AE_INLINE Weights(const WeightsParams& params, Arena& arena) : p(params) {
    tile.allocate(arena, p);
    query = arena.take<In>(larger(p.qk_size, W) * kBlock);
    lse = arena.take<T>(kBlock);
    residual = arena.take<T>(kBlock);
    rows = arena.take<In>(in_place() ? 0 : kBlock * Input<In>::padded(p.qk_size));
    scores = arena.take<T>(kBlock * kBlock);
    sums = arena.take<T>(kWeightsKeyBlocks * kBlock * kBlock);
    keep = arena.take<uint8_t>(p.dropout.threshold != 0 ? kBlock * kBlock : 0);
  }

  AE_INLINE bool in_place() const {
    return decoding(p) ? in_lanes<T>(p.key, p.qk_size) : Input<In>::in_place(p.key, p.qk_size);
  }

  // Rows [i0, i0 + nq) of head h, or of the mean over all heads.
  void item(const Problem& problem, int64_t h, int64_t i0, int64_t nq) {
    tile.i0 = i0;
    tile.nq = nq;
    tile.lanes = round_up(nq, W);
    tile.ahead.forget();
    const int64_t step = key_block(problem.k_length), span = step * kWeightsKeyBlocks;
    for (int64_t begin = 0; begin < problem.k_length; begin += span) {
      const int64_t end = smaller(problem.k_length, begin + span);
      __builtin_memset(sums, 0, (end - begin) * kBlock * sizeof(T));
      const int64_t first = p.average ? 0 : h, last = p.average ? p.heads : h + 1;
      for (int64_t head = first; head < last; ++head) {
        add(problem, head, begin, end, step, begin == 0 || p.average);
      }
      if (p.average) {  // the statistics are packed again for every head, so their place is free
        for (int64_t x = 0; x < kBlock; ++x) lse[x] = T{1} / static_cast<T>(p.heads);
      }
      transpose_out<T>(sums, kBlock, p.average ? lse : nullptr, nq, end - begin,
                       Rows(p.weights, problem.batch, p.average ? 0 : h, i0, begin));
    }
  }

  void add(const Problem& problem, int64_t h, int64_t begin, int64_t end, int64_t step, bool pack) {
    if (pack) {
      const Rows source(p.query, problem.batch, h, problem.q_begin + tile.i0, 0);
      const T scale = static_cast<T>(p.scale);
      if (!decoding(p)) {
        Input<In>::pack(source, tile.nq, p.qk_size, scale, query);
      } else if constexpr (std::is_same_v<T, In>) {
        copy_scaled<T>(source, tile.nq, p.qk_size, scale, query, round_up(p.qk_size, W));
      }
      for (int64_t x = 0; x < kBlock; ++x) {
        const int64_t i = problem.q_begin + tile.i0 + x;
        lse[x] = x < tile.nq ? *p.logsumexp.at<T>(problem.batch, h, i, 0) : T{0};
        residual[x] = x < tile.nq ? *p.residual.at<T>(problem.batch, h, i, 0) : T{0};
      }
    }
    for (int64_t j0 = begin; j0 < end; j0 += step) {
      tile.j0 = j0;
      tile.nk = smaller(step, problem.k_length - j0);
      if (classify<T>(p, problem, h, tile) == Visibility::kHidden) continue;
      if (p.dropout.threshold != 0) {
        keep_tile<T>(p.dropout, problem.index, h, tile.i0, tile.lanes, j0, tile.nk, keep, kBlock);
      }
      const Operand<In> key = tile_operand(p, p.key, in_place(), problem, h, tile, p.qk_size, rows);
      if constexpr (std::is_same_v<T, In>) {
        if (decoding(p)) score_tile<T>(query, round_up(p.qk_size, W), key, tile, scores);
      }
      for_strips<kStripVectors>(static_cast<int>(tile.lanes / W), [&]<int NV>(int v) {
        strip<NV>(problem, h, key, v * W, sums + (j0 - begin) * kBlock);
      });
    }
  }

  template <int NV>
  AE_INLINE void strip(const Problem& problem, int64_t h, const Operand<In>& key, int64_t x,
                       T* to) {
    const KeyRange keys = tile.strip_keys(x, NV * W);
    if (keys.begin >= keys.end) return;
    if (!decoding(p)) {
      multiply_inputs<T, NV>(key.data + keys.begin * key.stride, key.stride, query + x,
                             scores + keys.begin * kBlock + x, keys.end - keys.begin, p.qk_size,
                             static_cast<T>(p.scale), &tile.ahead);
    }
    if (needs_adjusting(p, tile)) {
      adjust_scores<T, NV>(p, problem, h, tile, x, scores + x, kBlock, keys, nullptr);
    }
    const bool drop = p.dropout.threshold != 0;
    const T rescale = static_cast<T>(p.dropout.rescale);
    with_bias_step<T, /*kHide=*/false>(tile, [&](const auto& last) {
      for_scores<T, NV>(to + x, kBlock, keys, [&](Vec<T> sum, int64_t y, int64_t lane) {
        const int64_t at = y * kBlock + x + lane;
        const Vec<T> score = last(load(scores + at), at);
        Vec<T> prob = exp_vector<T>((score - load(lse + x + lane)) - load(residual + x + lane));
        if (tile.mixed) prob = select(mask_from_bytes<T>(tile.visible + at), prob, Vec<T>{});
        if (drop) prob = select(mask_from_bytes<T>(keep + at), prob * rescale, Vec<T>{});
        return sum + prob;
      });
    });
  }
};

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
