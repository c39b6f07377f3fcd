// Fused attention forward: one query block against its key blocks with online softmax. Queries lie
// in lanes: Q^T is packed once per block (scale folded in), K and V are read as scalar broadcasts
// from their own rows (pairs of them: inputs.h), the softmax runs down the columns of S^T = K Q^T,
// and O^T += V^T P stays in scratch until the end.
//
// Passes of a (query block, key block) pair, one strip of up to three vectors of queries at a time,
// while K and V lie in L1/L2:
//   1 classify   hidden pairs of blocks are skipped, mixed ones carry a byte per pair
//   2 S^T        product
//   3 adjust     softcap, ALiBi, float key masks; only where there is one
//   4 softmax    bias and hiding on its way, running maximum and sum, P in place; dropout
//   5 O^T        product, rescaled while its accumulators are loaded
// Hidden values meet the sums as 0 * V. That is exact unless V is not finite, which the result
// shows: then the block is computed again with every hidden pair left out of the sums (`careful`).
#pragma once

#include "kernels/cpu/inputs.h"
#include "kernels/cpu/online_softmax.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

template <class T, class In = T>
struct Forward {
  const AttentionParams& p;
  Tile<T> tile;
  Partial<T> part;  // output O^T [Ev][kBlock]
  In* query;        // Q^T [E][kBlock]
  T* scores;        // S^T, then P^T [key][kBlock]
  T* scale;         // [kBlock], what the sums of older keys shrink by
  In* key_rows;     // K or V block where it cannot be read in place
  T* value_rows;
  uint8_t* keep;
  bool together;  // K and V can be had at the same time; else their copies share one place
  bool fresh;     // nothing has been added to the output yet

  static constexpr int W = kLanes<T>;

  AE_INLINE Forward(const AttentionParams& params, Arena& arena) : p(params) {
    tile.allocate(arena, p);
    part.allocate(arena, p.v_size * kBlock);
    query = arena.take<In>(Input<In>::depth(p.qk_size) * kBlock);
    scores = arena.take<T>(kBlock * kBlock);
    scale = arena.take<T>(kBlock);
    if constexpr (std::is_same_v<T, In>) {
      together = readable_in_place<T>(p.key) && readable_in_place<T>(p.value);
      const int64_t columns = round_up(larger(p.qk_size, p.v_size), W);
      key_rows = value_rows = arena.take<T>(together ? 0 : kBlock * columns);
    } else {
      together = true;
      const bool in_place = Input<In>::in_place(p.key, p.qk_size);
      key_rows = arena.take<In>(in_place ? 0 : kBlock * Input<In>::padded(p.qk_size));
      value_rows = arena.take<T>(kBlock * round_up(p.v_size, W));
    }
    keep = arena.take<uint8_t>(p.dropout.threshold != 0 ? kBlock * kBlock : 0);
  }

  template <class U>
  AE_INLINE Operand<U> operand(const View& view, const Problem& problem, int64_t h, int64_t size,
                               U* copy) {
    return tile_operand(p, view, Input<U>::in_place(view, size), problem, h, tile, size, copy);
  }

  // O^T += V^T P with hidden pairs left out: for values that are not finite.
  template <int NV>
  __attribute__((noinline)) void careful_product(const Operand<T>& value, int64_t x, KeyRange keys,
                                                 const Vec<T>* shrink) {
    for (int64_t e = 0; e < p.v_size; ++e) {
      AE_UNROLL for (int v = 0; v < NV; ++v) {
        T* const at = part.output + e * kBlock + x + v * W;
        Vec<T> sum = load(at) * shrink[v];
        for (int64_t y = keys.begin; y < keys.end; ++y) {
          const Vec<T> next = fma(broadcast(value.data[y * value.stride + e]),
                                  load(scores + y * kBlock + x + v * W), sum);
          sum = select(mask_from_bytes<T>(tile.visible + y * kBlock + x + v * W), next, sum);
        }
        store(at, sum);
      }
    }
  }

  // Whether no hidden value has spoilt a row's sums: 0 x is 0 for finite x only.
  AE_INLINE bool finite_output() const {
    Vec<T> check{};
    T rest{};
    const int64_t whole = tile.nq / W * W;
    for (int64_t e = 0; e < p.v_size; ++e) {
      const T* const row = part.output + e * kBlock;
      for (int64_t x = 0; x < whole; x += W) check = fma(load(row + x), Vec<T>{}, check);
      for (int64_t x = whole; x < tile.nq; ++x) rest += row[x] * T{0};
    }
    return rest + sum_lanes<T>(check) == T{0};
  }

  // The query block (i0, nq) of head h against `keys`, into `part`; computed again carefully if a
  // hidden value was felt.
  void query_rows(const Problem& problem, int64_t h, int64_t i0, int64_t nq, KeyRange keys,
                  int64_t& visited) {
    tile.i0 = i0;
    tile.nq = nq;
    Input<In>::pack(Rows(p.query, problem.batch, h, problem.q_begin + i0, 0), nq, p.qk_size,
                    static_cast<T>(p.scale), query);
    const bool met_mixed = run(problem, h, keys, /*careful=*/false, visited);
    if (met_mixed && !finite_output()) {
      int64_t again = 0;
      run(problem, h, keys, /*careful=*/true, again);
    }
  }

  AE_INLINE void clear_output() {
    __builtin_memset(part.output, 0, p.v_size * kBlock * sizeof(T));
    fresh = false;
  }

  // All key blocks of [keys.begin, keys.end) for the query block in `tile`. Returns whether a mixed
  // block was met.
  bool run(const Problem& problem, int64_t h, KeyRange keys, bool careful, int64_t& visited) {
    bool met_mixed = false;
    part.clear(0);
    fresh = true;
    const int64_t step = key_block(problem.k_length);
    const KeyRange hull = p.windowed() ? window_hull(p, problem, tile.i0, tile.i0 + tile.nq - 1)
                                       : KeyRange{0, problem.k_length};
    const int64_t first = larger(keys.begin, hull.begin / step * step);
    const int64_t end = smaller(keys.end, hull.end);
    for (int64_t j0 = first; j0 < end; j0 += step) {
      tile.j0 = j0;
      tile.nk = smaller(step, problem.k_length - j0);
      const Visibility visibility = classify<T>(p, problem, h, tile);
      if (visibility == Visibility::kHidden) continue;
      met_mixed |= tile.mixed;
      ++visited;
      // The first block starts the output from zero; under a window it may leave out whole strips.
      if (fresh && (tile.windowed || careful)) clear_output();
      block(problem, h, careful && tile.mixed);
      fresh = false;
    }
    if (fresh) clear_output();
    return met_mixed;
  }

  void block(const Problem& problem, int64_t h, bool careful) {
    const bool adjust = needs_adjusting(p, tile);
    const int vectors = static_cast<int>(tile.lanes / W);
    note_seen(tile, part);
    if (p.dropout.threshold != 0) {
      keep_tile<T>(p.dropout, problem.index, h, tile.i0, tile.lanes, tile.j0, tile.nk, keep,
                   kBlock);
    }
    const Operand<In> key = operand(p.key, problem, h, p.qk_size, key_rows);
    if (together) {
      const Operand<T> value = operand(p.value, problem, h, p.v_size, value_rows);
      for_strips<kStripVectors>(vectors, [&]<int NV>(int v) {
        probabilities<NV>(problem, h, key, v * W, adjust);
        values<NV>(value, v * W, careful);
      });
      return;
    }
    for_strips<kStripVectors>(
        vectors, [&]<int NV>(int v) { probabilities<NV>(problem, h, key, v * W, adjust); });
    // Takes the place of the keys.
    const Operand<T> value = operand(p.value, problem, h, p.v_size, value_rows);
    for_strips<kStripVectors>(vectors, [&]<int NV>(int v) { values<NV>(value, v * W, careful); });
  }

  template <int NV>
  AE_INLINE void probabilities(const Problem& problem, int64_t h, const Operand<In>& key, int64_t x,
                               bool adjust) {
    const KeyRange keys = tile.strip_keys(x, NV * W);
    if (keys.begin >= keys.end) return;
    multiply_inputs<T, NV>(key.data + keys.begin * key.stride, key.stride, query + x,
                           scores + keys.begin * kBlock + x, keys.end - keys.begin, p.qk_size,
                           static_cast<T>(p.scale), &tile.ahead);
    if (adjust) adjust_scores<T, NV>(p, problem, h, tile, x, scores + x, kBlock, keys, nullptr);
    with_last_steps(
        tile, [&](const auto& last) { softmax_strip<T, NV>(scores, scale, part, x, keys, last); });
    if (p.dropout.threshold != 0) drop_strip<T, NV>(scores, keep, x, keys);
  }

  template <int NV>
  AE_INLINE void values(const Operand<T>& value, int64_t x, bool careful) {
    const KeyRange keys = tile.strip_keys(x, NV * W);
    if (keys.begin >= keys.end) return;
    Vec<T> shrink[NV];
    AE_UNROLL for (int v = 0; v < NV; ++v) shrink[v] = load(scale + x + v * W);
    if (careful) return careful_product<NV>(value, x, keys, shrink);
    const auto product = fresh ? multiply_panel<T, NV, Start::kZero, Read::kColumns>
                               : multiply_panel<T, NV, Start::kScale, Read::kColumns>;
    product(value.data + keys.begin * value.stride, value.stride, scores + keys.begin * kBlock + x,
            kBlock, part.output + x, kBlock, p.v_size, keys.end - keys.begin, shrink, Band{},
            &tile.ahead);
  }
};

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
