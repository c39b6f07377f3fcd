// Forward for very short queries (decoding with a key/value cache): bound by reading K and V, so an
// item takes all heads of a group over one range of keys and reads every key once from memory (once
// for every 64 rows of a large group, where products bind). Head sizes lie in lanes for the
// products, so that a single query row wastes nothing, keys lie in lanes for the softmax, and
// options and masks work on the same tiles as everywhere.
#pragma once

#include "kernels/cpu/finish.h"
#include "kernels/cpu/row_scores.h"

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
  T* query;          // [head at work][row][e_padded], scaled
  Partial<T>* part;  // per head at work; output [row][ev_padded]
  T* lines;          // scores, then probabilities [row][kBlock]
  T* scores;         // the same as a tile [key][kBlock], for options
  T *key_rows, *value_rows;
  uint8_t* keep;

  AE_INLINE Decode(const AttentionParams& params, Arena& arena)
      : p(params),
        e_padded(round_up(params.qk_size, W)),
        ev_padded(round_up(params.v_size, W)),
        heads_at_once(smaller(params.group(), kDecodeRowsAtOnce / larger(1, params.q_length))) {
    tile.allocate(arena, p);
    query = arena.take<T>(heads_at_once * p.q_length * e_padded);
    part = arena.take<Partial<T>>(heads_at_once);
    for (int64_t n = 0; n < heads_at_once; ++n) {
      Partial<T> one;
      one.allocate(arena, p.q_length * ev_padded);
      if (arena.memory != nullptr) part[n] = one;
    }
    scores = arena.take<T>(kBlock * kBlock);
    lines = arena.take<T>(heads_at_once * p.q_length * kBlock);
    key_rows = arena.take<T>(in_lanes<T>(p.key, p.qk_size) ? 0 : kBlock * e_padded);
    value_rows = arena.take<T>(in_lanes<T>(p.value, p.v_size) ? 0 : kBlock * ev_padded);
    keep = arena.take<uint8_t>(p.dropout.threshold != 0 ? kBlock * kBlock : 0);
  }

  AE_INLINE Operand<T> operand(const View& view, const Problem& problem, int64_t g, int64_t size,
                               T* copy) {
    const Rows source(view, problem.batch, g, problem.k_begin + tile.j0, 0);
    return operand_of<T>(source, in_lanes<T>(view, size), tile.nk, size, copy);
  }

  // `count` heads of group g, from its head `first` on, over `keys`.
  void run(const Problem& problem, int64_t g, int64_t first, int64_t count, KeyRange keys,
           int64_t& visited) {
    const int64_t h = g * p.group() + first, rows = p.q_length;
    heads = count;
    tile.i0 = 0;
    tile.nq = rows;
    for (int64_t n = 0; n < heads; ++n) {
      part[n].clear(rows * ev_padded);
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
          key = operand(p.key, problem, g, p.qk_size, key_rows);
          value = operand(p.value, problem, g, p.v_size, value_rows);
        }
        if (n == 0 && alike() && !tile.mixed) {
          together(key, value);
          visited += heads;
          break;
        }
        ++visited;
        head(problem, h + n, part[n], query + n * rows * e_padded, key, value);
      }
    }
  }

  // Whether nothing tells the heads of a group, or their keys, apart.
  AE_INLINE bool alike() const {
    return !p.attn_mask.defined() && !p.attn_bias.defined() && !p.key_mask.defined() &&
           p.softcap == 0 && p.alibi_slopes == nullptr && p.dropout.threshold == 0;
  }

  // A visible tile without options for all rows at work: four rows share a reading of the
  // keys, and one of the values.
  void together(const Operand<T>& key, const Operand<T>& value) {
    const int64_t count = heads * p.q_length;
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) {
      row_scores<T, 4>(query + r * e_padded, e_padded, key, tile.nk, lines + r * kBlock);
    }
    for (; r < count; ++r) {
      row_scores<T, 1>(query + r * e_padded, e_padded, key, tile.nk, lines + r * kBlock);
    }
    for (int64_t n = 0; n < heads; ++n) note_seen(tile, part[n]);
    for (r = 0; r + 4 <= count; r += 4) values_together<4>(value, r);
    for (; r < count; ++r) values_together<1>(value, r);
  }

  // Softmax and values of NR rows, from row r on.
  template <int NR>
  AE_INLINE void values_together(const Operand<T>& value, int64_t r) {
    T shrink[NR];
    T* output[NR];
    for (int n = 0; n < NR; ++n) {
      const Partial<T>& one = part[(r + n) / p.q_length];
      const int64_t x = (r + n) % p.q_length;
      shrink[n] = softmax_line(lines + (r + n) * kBlock, one, x);
      output[n] = one.output + x * ev_padded;
    }
    values<NR>(value, 0, lines + r * kBlock, shrink, output);
  }

  void head(const Problem& problem, int64_t h, const Partial<T>& one, const T* q,
            const Operand<T>& key, const Operand<T>& value) {
    const bool drop = p.dropout.threshold != 0;
    note_seen(tile, one);
    if (drop) {
      keep_tile<T>(p.dropout, problem.index, h, 0, tile.lanes, tile.j0, tile.nk, keep, kBlock);
    }
    for (int64_t x = 0; x < tile.nq; ++x) {
      row_scores<T, 1>(q + x * e_padded, e_padded, key, tile.nk, lines + x * kBlock);
    }
    if (needs_adjusting(p, tile)) adjust(problem, h);
    for (int64_t x = 0; x < tile.nq; ++x) {
      T* const line = lines + x * kBlock;
      const T shrink = softmax_line(line, one, x);
      for (int64_t y = 0; drop && y < tile.nk; ++y) {
        if (keep[y * kBlock + x] == 0) line[y] = T{0};
      }
      T* const output = one.output + x * ev_padded;
      values<1>(value, x, line, &shrink, &output);
    }
  }

  // Options and masks work on tiles [key][query lane]: there and back.
  void adjust(const Problem& problem, int64_t h) {
    for (int64_t y = 0; y < tile.nk; ++y) {
      for (int64_t x = 0; x < tile.lanes; ++x) {
        scores[y * kBlock + x] = x < tile.nq ? lines[x * kBlock + y] : T{0};
      }
    }
    for_strips<kStripVectors>(static_cast<int>(tile.lanes / W), [&]<int NV>(int v) {
      adjust_scores<T, NV>(p, problem, h, tile, v * W, scores + v * W, kBlock, {0, tile.nk},
                           nullptr);
    });
    for (int64_t x = 0; x < tile.nq; ++x) {
      for (int64_t y = 0; y < tile.nk; ++y) lines[x * kBlock + y] = scores[y * kBlock + x];
    }
  }

  // Online softmax of one row with its keys in lanes. Returns what the sums of older keys shrink
  // by.
  AE_INLINE T softmax_line(T* line, const Partial<T>& one, int64_t x) {
    const int64_t end = round_up(tile.nk, W);
    for (int64_t y = tile.nk; y < end; ++y) line[y] = -kInfinity<T>;
    Vec<T> most = broadcast(one.maximum[x]);
    for (int64_t y = 0; y < end; y += W) most = max(most, load(line + y));
    T maximum = most[0];
    for (int lane = 1; lane < W; ++lane) maximum = most[lane] > maximum ? most[lane] : maximum;
    const T base = maximum == -kInfinity<T> ? T{0} : maximum;
    Vec<T> sum{};
    for (int64_t y = 0; y < end; y += W) {
      const Vec<T> prob = exp_bounded<T>(load(line + y) - base);
      store(line + y, prob);
      sum += prob;
    }
    T total{};
    for (int lane = 0; lane < W; ++lane) total += sum[lane];
    const T shrink = exp_bounded<T>(broadcast(one.maximum[x] - base))[0];
    one.maximum[x] = maximum;
    one.sum[x] = one.sum[x] * shrink + total;
    return shrink;
  }

  // O rows = shrink * O rows + sum of visible p V, some vectors of them at a time. Hidden keys are
  // left out, so what they hold is never felt; x is the lane that tells them, for a single row.
  template <int NR>
  AE_INLINE void values(const Operand<T>& value, int64_t x, const T* line, const T* shrink,
                        T* const* output) {
    // Accumulators for NR rows: 8 or 16 of 32 registers, 8 of 16.
    constexpr int kMost = NR == 1 ? 8 : kRegisters == 32 ? 4 : 2;
    int64_t e = 0;
    for (; e + kMost * W <= ev_padded; e += kMost * W) {
      value_vectors<NR, kMost>(value, x, line, shrink, e, output);
    }
    if (kMost > 4 && e + 4 * W <= ev_padded) {
      value_vectors<NR, 4>(value, x, line, shrink, e, output);
      e += 4 * W;
    }
    for (; e < ev_padded; e += W) value_vectors<NR, 1>(value, x, line, shrink, e, output);
  }
  template <int NR, int N>
  AE_INLINE void value_vectors(const Operand<T>& value, int64_t x, const T* line, const T* shrink,
                               int64_t e, T* const* output) {
    Vec<T> sum[NR][N];
    AE_UNROLL for (int r = 0; r < NR; ++r) {
      AE_UNROLL for (int v = 0; v < N; ++v) {
        sum[r][v] = load(output[r] + e + v * W) * broadcast(shrink[r]);
      }
    }
    for (int64_t y = 0; y < tile.nk; ++y) {
      if (NR == 1 && tile.mixed && tile.visible[y * kBlock + x] == 0) continue;
      const T* const row = value.data + y * value.stride + e;
      Vec<T> prob[NR];
      AE_UNROLL for (int r = 0; r < NR; ++r) prob[r] = broadcast(line[r * kBlock + y]);
      AE_UNROLL for (int v = 0; v < N; ++v) {
        const Vec<T> right = load(row + v * W);
        AE_UNROLL for (int r = 0; r < NR; ++r) sum[r][v] = fma(prob[r], right, sum[r][v]);
      }
    }
    AE_UNROLL for (int r = 0; r < NR; ++r) {
      AE_UNROLL for (int v = 0; v < N; ++v) store(output[r] + e + v * W, sum[r][v]);
    }
  }

  // Results of the heads at work, the first of them `first_head`, into the tensors or, where the
  // keys are split, into the buffer between the phases.
  void finish_heads(const Problem& problem, int64_t first_head, void* partials, int64_t split) {
    const int64_t rows = p.q_length;
    for (int64_t n = 0; n < heads; ++n) {
      const int64_t h = first_head + n;
      const Partial<T>& one = part[n];
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
