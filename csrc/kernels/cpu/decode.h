// Forward for very short queries (decoding with a key/value cache): bound by reading K and V, so an
// item takes all heads of a group over one range of keys and reads every key once from memory (once
// for every 64 rows of a large group, where products bind). Head sizes lie in lanes for the
// products, so that a single query row wastes nothing, keys of a few rows for the softmax, and
// options and masks work on the same tiles as everywhere.
#pragma once

#include "kernels/cpu/finish.h"
#include "kernels/cpu/row_values.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

template <class T>
struct Decode {
  static constexpr int W = kLanes<T>;
  const AttentionParams& p;
  const int64_t e_padded, ev_padded;
  const int64_t heads_at_once;
  int64_t heads;  // at work: some neighbours of a group
  Tile<T> tile;
  // Of all rows at work, those of a head together.
  T* query;          // [row][e_padded], scaled
  T* output;         // [row][ev_padded], not normalised
  T *maximum, *sum;  // [row]
  T* lines;          // scores, then probabilities, kBlock a row: [key][row] of a group of rows
  uint8_t* seen;     // [head at work][kBlock]
  T* scores;         // of a head, as a tile [key][kBlock], for options
  T *key_rows, *value_rows;
  uint8_t* keep;

  AE_INLINE Decode(const AttentionParams& params, Arena& arena)
      : p(params),
        e_padded(round_up(params.qk_size, W)),
        ev_padded(round_up(params.v_size, W)),
        heads_at_once(smaller(params.group(), kDecodeRowsAtOnce / larger(1, params.q_length))) {
    tile.allocate(arena, p);
    const int64_t rows = heads_at_once * p.q_length;
    query = arena.take<T>(rows * e_padded);
    output = arena.take<T>(rows * ev_padded);
    maximum = arena.take<T>(rows + kBlock);  // Partial::clear() clears as many from every row on
    sum = arena.take<T>(rows + kBlock);
    lines = arena.take<T>(rows * kBlock);
    seen = arena.take<uint8_t>(heads_at_once * kBlock);
    scores = arena.take<T>(kBlock * kBlock);
    key_rows = arena.take<T>(in_lanes<T>(p.key, p.qk_size) ? 0 : kBlock * e_padded);
    value_rows = arena.take<T>(in_lanes<T>(p.value, p.v_size) ? 0 : kBlock * ev_padded);
    keep = arena.take<uint8_t>(p.dropout.threshold != 0 ? kBlock * kBlock : 0);
  }

  AE_INLINE Partial<T> part(int64_t n) const {  // of head n at work
    const int64_t row = n * p.q_length;
    return {output + row * ev_padded, maximum + row, sum + row, seen + n * kBlock};
  }

  AE_INLINE Operand<T> operand(const View& view, const Problem& problem, int64_t h, int64_t size,
                               T* copy) {
    return tile_operand(p, view, in_lanes<T>(view, size), problem, h, tile, size, copy);
  }

  // `count` heads of group g, from its head `first` on, over `keys`.
  void run(const Problem& problem, int64_t g, int64_t first, int64_t count, KeyRange keys,
           int64_t& visited) {
    const int64_t h = g * p.group() + first, rows = p.q_length;
    heads = count;
    tile.i0 = 0;
    tile.nq = rows;
    for (int64_t n = 0; n < heads; ++n) {
      part(n).clear(rows * ev_padded);
      T* const q = query + n * rows * e_padded;
      copy_scaled<T>(Rows(p.query, problem.batch, h + n, 0, 0), rows, p.qk_size,
                     static_cast<T>(p.scale), q, e_padded);
    }
    const int64_t step = key_block(problem.k_length);
    const KeyRange hull =
        p.windowed() ? window_hull(p, problem, 0, rows - 1) : KeyRange{0, problem.k_length};
    const int64_t begin = larger(keys.begin, hull.begin / step * step);
    for (int64_t j0 = begin; j0 < smaller(keys.end, hull.end); j0 += step) {
      tile.j0 = j0;
      tile.nk = smaller(step, problem.k_length - j0);
      Operand<T> key{nullptr, 0}, value{nullptr, 0};
      for (int64_t n = 0; n < heads; ++n) {
        if (classify<T>(p, problem, h + n, tile) == Visibility::kHidden) continue;
        if (key.data == nullptr) {
          key = operand(p.key, problem, h, p.qk_size, key_rows);
          value = operand(p.value, problem, h, p.v_size, value_rows);
        }
        if (n == 0 && alike() && !tile.mixed) {
          together(key, value);
          visited += heads;
          break;
        }
        ++visited;
        head(problem, h + n, n, key, value);
      }
    }
  }

  // Whether nothing tells the heads of a group, or their keys, apart.
  AE_INLINE bool alike() const {
    return !p.attn_mask.defined() && !p.attn_bias.defined() && !p.key_mask.defined() &&
           p.softcap == 0 && p.alibi_slopes == nullptr && p.dropout.threshold == 0;
  }

  // A visible tile without options for all rows at work, some of which share every reading of the
  // keys and of the values.
  void together(const Operand<T>& key, const Operand<T>& value) {
    const int64_t rows = heads * p.q_length;
    T shrink[kDecodeRowsAtOnce];
    tile.ahead.forget();
    if (rows >= 4 && value.data != value_rows && short_streams_are_slow()) {
      tile.ahead.add(reinterpret_cast<const char*>(value.data), value.stride * sizeof(T), tile.nk,
                     p.v_size * sizeof(T), /*write=*/false);
    }
    for_row_groups<T>(rows, [&]<int NR>(int64_t r) {
      row_scores<T, NR>(query + r * e_padded, e_padded, key, tile.nk, lines + r * kBlock,
                        &tile.ahead);
    });
    for_row_groups<T>(rows, [&]<int NR>(int64_t r) { softmax_rows<NR>(r, shrink + r); });
    for (int64_t n = 0; n < heads; ++n) note_seen(tile, part(n));
    // Of each quarter, so many values lie in the first cache when the next rows come to them.
    const int64_t quarter = quarter_of(tile.nk), step = rows == 1 ? quarter : 8;
    for (int64_t y = 0; y < quarter; y += step) {
      const KeyRange keys{y, smaller(quarter, y + step)};
      for_row_groups<T>(rows, [&]<int NR>(int64_t r) {
        row_values<T, NR>(value, tile.nk, keys, ev_padded, lines + r * kBlock, shrink + r,
                          output + r * ev_padded, [](int64_t) { return true; });
      });
    }
  }

  // The tile for head h, the n-th at work.
  void head(const Problem& problem, int64_t h, int64_t n, const Operand<T>& key,
            const Operand<T>& value) {
    const bool drop = p.dropout.threshold != 0;
    note_seen(tile, part(n));
    if (drop) {
      keep_tile<T>(p.dropout, problem.index, h, 0, tile.lanes, tile.j0, tile.nk, keep, kBlock);
    }
    const int64_t first = n * p.q_length;
    for (int64_t r = first; r < first + tile.nq; ++r) {
      row_scores<T, 1>(query + r * e_padded, e_padded, key, tile.nk, lines + r * kBlock);
    }
    if (needs_adjusting(p, tile) || tile.has_last_steps()) {
      adjust(problem, h, lines + first * kBlock);
    }
    for (int64_t x = 0; x < tile.nq; ++x) {
      const int64_t r = first + x;
      T* const line = lines + r * kBlock;
      T shrink;
      softmax_rows<1>(r, &shrink);
      for (int64_t y = 0; drop && y < tile.nk; ++y) {
        if (keep[y * kBlock + x] == 0) line[y] = T{0};
      }
      row_values<T, 1>(value, tile.nk, {0, quarter_of(tile.nk)}, ev_padded, line, &shrink,
                       output + r * ev_padded,
                       [&](int64_t y) { return !tile.mixed || tile.visible[y * kBlock + x] != 0; });
    }
  }

  // Options and masks work on tiles [key][query lane]: there and back.
  void adjust(const Problem& problem, int64_t h, T* of_head) {
    for (int64_t y = 0; y < tile.nk; ++y) {
      for (int64_t x = 0; x < tile.lanes; ++x) {
        scores[y * kBlock + x] = x < tile.nq ? of_head[x * kBlock + y] : T{0};
      }
    }
    for_strips<kStripVectors>(static_cast<int>(tile.lanes / W), [&]<int NV>(int v) {
      adjust_scores<T, NV>(p, problem, h, tile, v * W, scores + v * W, kBlock, {0, tile.nk},
                           nullptr);
      with_last_steps(tile, [&](const auto& last) {
        for_scores<T, NV>(scores + v * W, kBlock, {0, tile.nk},
                          [&](Vec<T> value, int64_t y, int64_t lane) {
                            return last(value, y * kBlock + v * W + lane);
                          });
      });
    });
    for (int64_t x = 0; x < tile.nq; ++x) {
      for (int64_t y = 0; y < tile.nk; ++y) of_head[x * kBlock + y] = scores[y * kBlock + x];
    }
  }

  // Online softmax of a group of rows from row r on, some keys of each row in the lanes. `shrink`:
  // what the sums of older keys shrink by.
  template <int NR>
  AE_INLINE void softmax_rows(int64_t r, T* shrink) {
    T* const line = lines + r * kBlock;
    const int64_t count = tile.nk * NR, end = round_up(count, W);
    for (int64_t i = count; i < end; ++i) line[i] = -kInfinity<T>;
    const Vec<T> before = repeat_lanes<T, NR>(load(maximum + r));
    Vec<T> most = before;
    for (int64_t i = 0; i < end; i += W) most = max(most, load(line + i));
    most = fold_lanes<T, NR>(most, [](Vec<T> a, Vec<T> b) { return max(a, b); });
    const Vec<T> base = select(equal(most, broadcast(-kInfinity<T>)), Vec<T>{}, most);
    Vec<T> total{};
    for (int64_t i = 0; i < end; i += W) {
      const Vec<T> prob = exp_bounded<T>(load(line + i) - base);
      store(line + i, prob);
      total += prob;
    }
    total = fold_lanes<T, NR>(total, [](Vec<T> a, Vec<T> b) { return a + b; });
    const Vec<T> factor = exp_bounded<T>(before - base);
    store_lanes<T, NR>(shrink, factor);
    store_lanes<T, NR>(maximum + r, most);
    store_lanes<T, NR>(sum + r, fma(load(sum + r), factor, total));
  }

  // Results of the heads at work, the first of them `first_head`, into the tensors or, where the
  // keys are split, into the buffer between the phases.
  void finish_heads(const Problem& problem, int64_t first_head, void* partials, int64_t split) {
    const int64_t rows = p.q_length;
    for (int64_t n = 0; n < heads; ++n) {
      const int64_t h = first_head + n;
      const Partial<T> one = part(n);
      if (forward_splits(p) > 1) {
        const SplitResult<T> to(partials, p, problem.index * p.heads + h, split);
        save_statistics(rows, one, to);
        for (int64_t i = 0; i < rows; ++i) {
          __builtin_memcpy(to.output + i * p.v_size, one.output + i * ev_padded,
                           p.v_size * sizeof(T));
        }
        continue;
      }
      finish_statistics(p, problem, h, 0, rows, one);
      for (int64_t i = 0; i < rows; ++i) {
        const OutputRows to(p, problem, h, i);
        copy_out<T>(one.output + i * ev_padded, ev_padded, 1, p.v_size, one.sum[i], to.output,
                    to.rest_or_null());
      }
    }
  }
};

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
