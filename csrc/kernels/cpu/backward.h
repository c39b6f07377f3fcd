// Fused attention backward. A work item owns a range of keys of one key/value head: their dK and dV
// are summed while the item walks over the query blocks of every head of the group. A query block's
// dQ goes on where the range before left it, under a counter per query block, so that ranges run
// side by side, each a query block behind the one before, and every bit is the same for any number
// of threads. Items are taken in order, so one only waits for items already running.
//
// Sums lie in the gradient tensors themselves where whole vectors of adjacent rows fit there, else
// in scratch or, for dQ that several ranges add to, in buffers of the heads in flight.
//
// Five products per (query block, key block), nothing of size L x S: S^T = K Q^T, dP^T = V dO^T
// (gradient_tile.h), dV += P^T dO, dK += dS^T Q, dQ += dS K.
#pragma once

#include "kernels/cpu/careful.h"
#include "kernels/cpu/gradient_tile.h"
#include "kernels/cpu/rows_ahead.h"
#include "kernels/cpu/turns.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

template <class T, class In = T>
struct Backward {
  static constexpr int W = kLanes<T>;
  const BackwardParams& p;
  const int64_t e_padded, ev_padded, range;
  Turns<T> turns;
  GradientTile<T, In> gradient;
  QueryBlock<T, In> packed;
  // Copies, padded to whole vectors, of what cannot be read in place: Q and dO of the query block,
  // K and V of the key block. As pairs K serves the product with Q, in floats the one with dS.
  T *query_rows, *grad_rows, *key_rows;
  In *key_inputs, *value_rows;
  T *key_sums, *value_sums;  // of the range
  T *query_sums, *row_sums;  // of the query block
  bool want_query, want_key, want_value, want_delta, want_scores, want_bias;
  T in_scores_grad;  // the part of the scale that dS already holds: all of it, or 1

  // Of the query block at work.
  Operand<T> query, grad;
  bool fresh_query_sums;  // nothing has been added to its dQ yet, by any range
  bool has_turn;          // its dQ is this range's to add to
  // Of the item at work.
  KeyRange owned;
  int64_t next_item;  // that comes after it on this thread, or about there; -1 if none does
  Target<T> query_grad, key_grad, value_grad;
  bool fresh_key_sums[8];  // by key block of the range

  AE_INLINE Backward(const BackwardParams& params, Arena& arena)
      : p(params),
        e_padded(round_up(params.qk_size, W)),
        ev_padded(round_up(params.v_size, W)),
        range(kBlock * backward_range_blocks(params)),
        turns(params, e_padded) {
    want_query = p.grad_query.defined();
    want_key = p.grad_key.defined();
    want_value = p.grad_value.defined();
    want_delta = p.new_delta.defined();
    want_bias = bias_with_keys(p);
    want_scores = want_query || want_key || want_delta;
    in_scores_grad = p.grad_weights.defined() || want_bias ? T{1} : static_cast<T>(p.scale);
    gradient.allocate(arena, p);
    packed.allocate(arena, p);
    const auto copy = [&](bool in_place, int64_t columns) {
      return arena.take<T>(in_place ? 0 : kBlock * columns);
    };
    const auto copy_inputs = [&](const View& view, int64_t size) {
      const bool in_place = Input<In>::in_place(view, size);
      return arena.take<In>(in_place ? 0 : kBlock * Input<In>::padded(size));
    };
    query_rows = copy(in_near_lanes<T>(p.query, p.qk_size), e_padded);
    grad_rows = copy(in_near_lanes<T>(p.grad_output, p.v_size), ev_padded);
    key_rows = copy(in_near_lanes<T>(p.key, p.qk_size), e_padded);
    key_inputs = std::is_same_v<T, In> ? nullptr : copy_inputs(p.key, p.qk_size);
    value_rows = copy_inputs(p.value, p.v_size);
    const auto sums = [&](const View& view, int64_t columns, bool scaled) {
      return arena.take<T>(adds_in_place(view, columns, scaled) ? 0 : range * round_up(columns, W));
    };
    key_sums = sums(p.grad_key, p.qk_size, scores_are_scaled());
    value_sums = sums(p.grad_value, p.v_size, true);
    query_sums = arena.take<T>(kBlock * e_padded);
    row_sums = arena.take<T>(kBlock);
  }

  // What dQ and dK are still to be multiplied with.
  AE_INLINE T missing_scale() const {
    return in_scores_grad == T{1} ? static_cast<T>(p.scale) : T{1};
  }

  AE_INLINE bool scores_are_scaled() const { return missing_scale() == T{1}; }

  void item(int64_t index, int64_t next, int64_t& visited) {
    const auto [n, g, r] = range_index(p, index, turns.state->heads_at_once);
    const Problem problem = p.problem(n);
    const KeyRanges ranges(p, problem.k_length);
    owned = ranges.keys(r);
    next_item = next < turns.queue->count ? next : -1;
    const int64_t rows = query_block(problem.q_length);
    const int64_t blocks = blocks_of(problem.q_length, rows);
    // With one query block nothing is added to a key's gradient later.
    const bool once = blocks * p.group() == 1;
    const int64_t key_row = problem.k_begin + owned.begin;
    key_grad =
        target(once, scores_are_scaled(), p.grad_key, problem, g, key_row, p.qk_size, key_sums);
    value_grad = target(once, true, p.grad_value, problem, g, key_row, p.v_size, value_sums);
    for (bool& fresh : fresh_key_sums) fresh = true;
    for (int64_t h = g * p.group(); h < (g + 1) * p.group(); ++h) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t i0 = b * rows, nq = smaller(rows, problem.q_length - i0);
        const KeyRange hull =
            p.windowed() ? window_hull(p, problem, i0, i0 + nq - 1) : KeyRange{0, problem.k_length};
        if (hull.begin >= hull.end) {
          if (r == 0) clear_rows(problem, h, i0, nq);
          continue;
        }
        const int64_t first = ranges.of(hull.begin), last = ranges.of(hull.end - 1);
        if (r < first || r > last) continue;
        const Visit visit{problem, h, b, i0, nq, hull, r - first, last - first + 1};
        gradient.tile.ahead.forget();
        if (!query_block_with(visit, visited)) return;
      }
    }
    write_keys(problem, g, owned.begin, owned.end - owned.begin);
    turns.release_sums(problem, g);
  }

  // Whether a gradient is summed where it is to be in the end: whole vectors of adjacent rows, and
  // nothing to be multiplied with. What is written only `once` may have rows far apart.
  AE_INLINE bool adds_in_place(const View& view, int64_t columns, bool scaled,
                               bool once = false) const {
    return view.defined() && scaled &&
           (once ? in_lanes<T>(view, columns) : in_near_lanes<T>(view, columns));
  }
  AE_INLINE Target<T> target(bool once, bool scaled, const View& view, const Problem& problem,
                             int64_t h, int64_t row, int64_t columns, T* sums) const {
    if (adds_in_place(view, columns, scaled, once)) {
      return {view.template at<T>(problem.batch, h, row, 0), view.stride[2]};
    }
    return {sums, round_up(columns, W)};
  }

  // The products of one query block with the keys of the range. False if another thread has failed.
  bool query_block_with(const Visit& at, int64_t& visited) {
    const auto& [problem, h, block, i0, nq, hull, place, places] = at;
    if (want_bias && !turns.wait_for(turns.of_bias(at), turns.bias_place(at))) return false;
    const bool first_of_bias = want_bias && turns.bias_place(at) == 0;
    if (want_delta) __builtin_memset(row_sums, 0, kBlock * sizeof(T));
    Tile<T>& tile = gradient.tile;
    tile.i0 = i0;
    tile.nq = nq;
    has_turn = false;
    bool have_queries = false, checked_queries = false, finite_queries = true;
    const int64_t step = key_block(problem.k_length);
    const KeyRange keys{larger(owned.begin, hull.begin / step * step),
                        smaller(owned.end, hull.end)};
    for (int64_t j0 = keys.begin; j0 < keys.end; j0 += step) {
      tile.j0 = j0;
      tile.nk = smaller(step, problem.k_length - j0);
      if (classify<T>(p, problem, h, tile) == Visibility::kHidden) {
        if (first_of_bias) {
          __builtin_memset(gradient.scores_grad, 0, tile.nk * kBlock * sizeof(T));
          add_to_bias(problem, h, /*first=*/true);
        }
        continue;
      }
      ++visited;
      if (!have_queries) {
        pack_queries(problem, h);
        RowsAhead(p, tile.ahead).ask(at, owned, next_item, turns.state->heads_at_once);
      }
      have_queries = true;
      const Operand<T> key = tile_operand(p, p.key, in_near_lanes<T>(p.key, p.qk_size), problem, h,
                                          tile, p.qk_size, key_rows);
      Operand<In> key_input, value{nullptr, 0};
      if constexpr (std::is_same_v<T, In>) {
        key_input = key;
      } else {
        key_input = input(p.key, problem, h, p.qk_size, key_inputs);
      }
      if (p.value.defined()) value = input(p.value, problem, h, p.v_size, value_rows);
      if (want_bias) {
        prefetch_rows<true>(tile.ahead, Rows(p.grad_bias, problem.batch, h, i0, j0), nq, tile.nk);
      }
      gradient.compute(p, problem, h, packed, key_input, value, want_scores, /*with_cap=*/true,
                       want_delta ? row_sums : nullptr);
      bool careful = false;
      if (tile.mixed) {
        if (!checked_queries) finite_queries = finite_query_side();
        checked_queries = true;
        careful = !finite_queries || !all_finite(key.data, tile.nk, e_padded, key.stride);
      }
      add_to_keys(j0 - owned.begin, step, careful);
      if (want_query) {
        if (!take_turn(at)) return false;
        add_to_queries(key, careful);
      }
      if (want_bias) add_to_bias(problem, h, first_of_bias);
    }
    if (want_bias) turns.pass_on(turns.of_bias(at), turns.bias_place(at));
    return finish_queries(at);
  }

  AE_INLINE static void clear(const Target<T>& to, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; ++i) {
      __builtin_memset(to.data + i * to.stride, 0, columns * sizeof(T));
    }
  }

  AE_INLINE void add_to_bias(const Problem& problem, int64_t h, bool first) {
    const Tile<T>& tile = gradient.tile;
    const Rows rows(p.grad_bias, problem.batch, h, tile.i0, tile.j0);
    if (first) {
      transpose_out<T>(gradient.scores_grad, kBlock, nullptr, tile.nq, tile.nk, rows);
    } else {
      transpose_add<T>(gradient.scores_grad, kBlock, tile.nq, tile.nk, rows);
    }
  }

  void pack_queries(const Problem& problem, int64_t h) {
    const Tile<T>& tile = gradient.tile;
    const int64_t i = problem.q_begin + tile.i0;
    packed.pack(p, problem, h, tile.i0, tile.nq, in_scores_grad);
    query = operand_of<T>(Rows(p.query, problem.batch, h, i, 0),
                          in_near_lanes<T>(p.query, p.qk_size), tile.nq, p.qk_size, query_rows);
    if (!p.grad_output.defined()) return;
    grad = operand_of<T>(Rows(p.grad_output, problem.batch, h, i, 0),
                         in_near_lanes<T>(p.grad_output, p.v_size), tile.nq, p.v_size, grad_rows);
  }

  bool finite_query_side() const {
    const int64_t nq = gradient.tile.nq;
    return all_finite(query.data, nq, e_padded, query.stride) &&
           (!p.grad_output.defined() || all_finite(grad.data, nq, ev_padded, grad.stride));
  }

  AE_INLINE Operand<In> input(const View& view, const Problem& problem, int64_t h, int64_t size,
                              In* copy) const {
    return tile_operand(p, view, Input<In>::in_place(view, size), problem, h, gradient.tile, size,
                        copy);
  }

  // dV += P^T dO and dK += dS^T Q for the block whose first key is `row` of the range; the first
  // time as sums of their own.
  void add_to_keys(int64_t row, int64_t step, bool careful) {
    const Tile<T>& tile = gradient.tile;
    const int64_t nq = tile.nq, nk = tile.nk;
    const Target<T> dv{value_grad.data + row * value_grad.stride, value_grad.stride};
    const Target<T> dk{key_grad.data + row * key_grad.stride, key_grad.stride};
    const T *const prob = gradient.probabilities, *const ds = gradient.scores_grad;
    bool& fresh = fresh_key_sums[row / step];
    if (careful) {
      auto sees = [&](int64_t y, int64_t x) { return tile.visible[y * kBlock + x] != 0; };
      auto left = [&](int64_t y, int64_t x) { return prob[y * kBlock + x]; };
      auto left_grad = [&](int64_t y, int64_t x) { return ds[y * kBlock + x]; };
      if (want_value) {
        if (fresh) clear(dv, nk, ev_padded);
        careful_accumulate<T>(left, grad, dv, ev_padded, nk, nq, sees);
      }
      if (want_key) {
        if (fresh) clear(dk, nk, e_padded);
        careful_accumulate<T>(left_grad, query, dk, e_padded, nk, nq, sees);
      }
    } else {
      Band band;
      if (tile.windowed) band = {-tile.window.high, -tile.window.low};
      if (want_value) accumulate<Read::kRows>(fresh, prob, grad, dv, ev_padded, nk, nq, band);
      if (want_key) accumulate<Read::kRows>(fresh, ds, query, dk, e_padded, nk, nq, band);
    }
    fresh = false;
  }

  // dQ += dS K.
  void add_to_queries(const Operand<T>& key, bool careful) {
    const Tile<T>& tile = gradient.tile;
    const int64_t nq = tile.nq, nk = tile.nk;
    const T* const ds = gradient.scores_grad;
    if (careful) {
      auto sees = [&](int64_t x, int64_t y) { return tile.visible[y * kBlock + x] != 0; };
      auto left = [&](int64_t x, int64_t y) { return ds[y * kBlock + x]; };
      if (fresh_query_sums) clear(query_grad, nq, e_padded);
      careful_accumulate<T>(left, key, query_grad, e_padded, nq, nk, sees);
    } else {
      Band band;
      if (tile.windowed) band = {tile.window.low, tile.window.high};
      accumulate<Read::kColumns>(fresh_query_sums, ds, key, query_grad, e_padded, nq, nk, band);
    }
    fresh_query_sums = false;
  }

  template <Read kRead>
  AE_INLINE void accumulate(bool fresh, const T* a, const Operand<T>& b, const Target<T>& c,
                            int64_t width, int64_t rows, int64_t depth, Band band) {
    for_strips<4>(static_cast<int>(width / W), [&]<int NV>(int v) {
      const auto product = fresh ? multiply_panel<T, NV, Start::kZero, kRead>
                                 : multiply_panel<T, NV, Start::kAdd, kRead>;
      product(a, kBlock, b.data + v * W, b.stride, c.data + v * W, c.stride, rows, depth, nullptr,
              band, &gradient.tile.ahead);
    });
  }

  // ---- sums of dQ ----

  // Waits until the earlier ranges have added their parts, and finds the sums of dQ. False if
  // another thread has failed.
  bool take_turn(const Visit& at) {
    if (has_turn) return true;
    if (at.place > 0 && !turns.wait_for(turns.of_ranges(at), at.place)) return false;
    has_turn = true;
    fresh_query_sums = at.place == 0;
    if (!want_query) return true;
    const bool once = at.places == 1 && at.problem.k_length <= kBlock;
    query_grad = target(once, scores_are_scaled(), p.grad_query, at.problem, at.h,
                        at.problem.q_begin + at.i0, p.qk_size, query_sums);
    if (query_grad.data == query_sums && at.places > 1) {
      query_grad.data = turns.sums_of(at.problem, at.h) + at.i0 * e_padded;
    }
    return true;
  }

  // Behind the last key block of the range: its part of dQ and of delta is done.
  bool finish_queries(const Visit& at) {
    if (!want_query && !want_delta) return true;
    if (!take_turn(at)) return false;
    const auto& [problem, h, block, i0, nq, hull, place, places] = at;
    const Rows out(p.grad_query, problem.batch, h, problem.q_begin + i0, 0);
    if (want_query && fresh_query_sums) clear(query_grad, nq, e_padded);
    if (want_query && place + 1 == places &&
        query_grad.data != reinterpret_cast<const T*>(out.data)) {
      copy_out<T>(query_grad.data, e_padded, nq, p.qk_size, missing_scale(), out);
    }
    if (want_delta) {
      for (int64_t x = 0; x < nq; ++x) {
        T* const to = p.new_delta.at<T>(problem.batch, h, problem.q_begin + i0 + x, 0);
        *to = place > 0 ? *to + row_sums[x] : row_sums[x];
      }
    }
    if (turns.state->added != nullptr) turns.pass_on(turns.of_ranges(at), place);
    return true;
  }

  void clear_rows(const Problem& problem, int64_t h, int64_t i0, int64_t nq) {
    __builtin_memset(query_sums, 0, nq * e_padded * sizeof(T));
    if (want_query) {
      copy_out<T>(query_sums, e_padded, nq, p.qk_size, T{1},
                  Rows(p.grad_query, problem.batch, h, problem.q_begin + i0, 0));
    }
    for (int64_t x = 0; want_delta && x < nq; ++x) {
      *p.new_delta.at<T>(problem.batch, h, problem.q_begin + i0 + x, 0) = T{0};
    }
  }

  void write_keys(const Problem& problem, int64_t g, int64_t k_begin, int64_t count) {
    const int64_t j = problem.k_begin + k_begin, step = key_block(problem.k_length);
    for (int64_t y = 0; y < count; y += step) {  // key blocks that no query sees
      if (!fresh_key_sums[y / step]) continue;
      const int64_t nk = smaller(step, count - y);
      if (want_key) clear({key_grad.data + y * key_grad.stride, key_grad.stride}, nk, e_padded);
      if (want_value) {
        clear({value_grad.data + y * value_grad.stride, value_grad.stride}, nk, ev_padded);
      }
    }
    if (want_key && key_grad.data == key_sums) {
      copy_out<T>(key_sums, e_padded, count, p.qk_size, missing_scale(),
                  Rows(p.grad_key, problem.batch, g, j, 0));
    }
    if (want_value && value_grad.data == value_sums) {
      copy_out<T>(value_sums, ev_padded, count, p.v_size, T{1},
                  Rows(p.grad_value, problem.batch, g, j, 0));
    }
  }
};

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
