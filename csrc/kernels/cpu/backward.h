// Fused attention backward. A work item owns a range of keys of one key/value head: their dK and dV
// stay in scratch while the item walks over the query blocks of every head of the group. The query
// blocks' dQ over the range is formed from zero and added to the sums of earlier ranges in the
// order of the ranges, under a counter per query block, so that ranges run in parallel and every
// bit is the same for any number of threads. Items are taken in order, so one only waits for items
// already running.
//
// Five products per (query block, key block), nothing of size L x S: S^T = K Q^T, dP^T = V dO^T
// (gradient_tile.h), dV += P^T dO, dK += dS^T Q, dQ += dS K.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif
#include <sched.h>

#include "kernels/cpu/gradient_tile.h"
#include "kernels/cpu/kernels.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// C (+)= sum over visible pairs only, for factors that are not finite. rows x depth pairs,
// visibility of (row, k) by `sees`.
template <class T, class A, class Sees>
void careful_accumulate(A&& left, const T* b, int64_t ldb, T* c, int64_t ldc, int64_t rows,
                        int64_t depth, Sees&& sees) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < depth; ++k) {
      if (!sees(i, k)) continue;
      const Vec<T> factor = broadcast(left(i, k));
      for (int64_t e = 0; e < ldc; e += kLanes<T>) {
        store(c + i * ldc + e, fma(factor, load(b + k * ldb + e), load(c + i * ldc + e)));
      }
    }
  }
}

template <class T>
struct Backward {
  static constexpr int W = kLanes<T>;
  const BackwardParams& p;
  const int64_t e_padded, ev_padded, range;
  GradientTile<T> gradient;
  QueryBlock<T> packed;
  T *query, *grad;            // Q, dO [row][padded]
  T *key, *value;             // the key block [row][padded]
  T *key_grad, *value_grad;   // sums of the range
  T *query_grad, *statistic;  // of (range, query block)
  bool want_query, want_key, want_value, want_statistic, want_scores, want_bias;

  AE_INLINE Backward(const BackwardParams& params, Arena& arena)
      : p(params),
        e_padded(round_up(params.qk_size, W)),
        ev_padded(round_up(params.v_size, W)),
        range(kBlock * backward_range_blocks(params)) {
    want_query = p.grad_query.defined();
    want_key = p.grad_key.defined();
    want_value = p.grad_value.defined();
    want_statistic = p.grad_statistics.defined();
    want_bias = bias_with_keys(p);
    want_scores = want_query || want_key || want_statistic;
    gradient.allocate(arena, p);
    packed.allocate(arena, p);
    query = arena.take<T>(kBlock * e_padded);
    grad = arena.take<T>(kBlock * ev_padded);
    key = arena.take<T>(kBlock * e_padded);
    value = arena.take<T>(kBlock * ev_padded);
    key_grad = arena.take<T>(range * e_padded);
    value_grad = arena.take<T>(range * ev_padded);
    query_grad = arena.take<T>(kBlock * e_padded);
    statistic = arena.take<T>(kBlock);
  }

  // Which ranges a query block takes part in: those that its window reaches.
  struct Turn {
    int64_t first, end;  // ranges
  };
  AE_INLINE Turn turn(const Problem& problem, int64_t i0, int64_t nq, int64_t size) const {
    const KeyRange hull =
        p.windowed() ? window_hull(p, problem, i0, i0 + nq - 1) : KeyRange{0, problem.k_length};
    if (hull.begin >= hull.end) return {0, 0};
    return {hull.begin / size, (hull.end - 1) / size + 1};
  }

  void item(BackwardState& state, WorkQueue& queue, int64_t index, int64_t& visited) {
    const int64_t ranges = backward_ranges(p);
    const auto [n, g, r] = range_index(p, index);
    const Problem problem = p.problem(n);
    const int64_t size = backward_range(p, problem.k_length);
    const int64_t k_begin = smaller(problem.k_length, r * size);
    const int64_t k_end = smaller(problem.k_length, k_begin + size);
    __builtin_memset(key_grad, 0, (k_end - k_begin) * e_padded * sizeof(T));
    __builtin_memset(value_grad, 0, (k_end - k_begin) * ev_padded * sizeof(T));
    const int64_t rows = query_block(problem.q_length);
    const int64_t blocks = blocks_of(problem.q_length, rows);
    for (int64_t h = g * p.group(); h < (g + 1) * p.group(); ++h) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t i0 = b * rows, nq = smaller(rows, problem.q_length - i0);
        const Turn t = turn(problem, i0, nq, size);
        if (t.first == t.end && r == 0) clear_rows(problem, h, i0, nq);
        if (r < t.first || r >= t.end) continue;
        if (want_bias &&
            !wait_for(bias_turn(state, problem, h, b, r), bias_place(problem, h), queue)) {
          return;
        }
        query_rows(problem, h, i0, nq, {k_begin, k_end}, want_bias && bias_place(problem, h) == 0,
                   visited);
        if (want_bias) pass_on(bias_turn(state, problem, h, b, r), bias_place(problem, h));
        if (!add_in_turn(state, queue, problem, h, i0, nq, b, r - t.first, t.end - t.first)) return;
      }
    }
    write_keys(problem, g, k_begin, k_end - k_begin);
    release_sums(state, problem, g, ranges);
  }

  // The products of one query block with the keys of the range. `first_of_bias`: nobody has written
  // this part of the bias gradient yet.
  void query_rows(const Problem& problem, int64_t h, int64_t i0, int64_t nq, KeyRange keys,
                  bool first_of_bias, int64_t& visited) {
    __builtin_memset(query_grad, 0, nq * e_padded * sizeof(T));
    __builtin_memset(statistic, 0, kBlock * sizeof(T));
    Tile<T>& tile = gradient.tile;
    tile.i0 = i0;
    tile.nq = nq;
    bool have_queries = false, finite_queries = true;
    const int64_t step = key_block(problem.k_length), k_begin = keys.begin;
    if (p.windowed()) {
      const KeyRange hull = window_hull(p, problem, i0, i0 + nq - 1);
      keys = {larger(keys.begin, hull.begin / step * step), smaller(keys.end, hull.end)};
    }
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
        have_queries = true;
        finite_queries = pack_queries(problem, h);
      }
      const bool finite_keys = pack_keys(problem, h);
      gradient.compute(p, problem, h, packed, {key, e_padded}, {value, ev_padded}, want_scores,
                       /*with_cap=*/true, want_statistic ? statistic : nullptr);
      products(j0 - k_begin, tile.mixed && !(finite_queries && finite_keys));
      if (want_bias) add_to_bias(problem, h, first_of_bias);
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

  bool pack_queries(const Problem& problem, int64_t h) {
    const Tile<T>& tile = gradient.tile;
    const int64_t i = problem.q_begin + tile.i0;
    packed.pack(p, problem, h, tile.i0, tile.nq);
    copy_in<T>(Rows(p.query, problem.batch, h, i, 0), tile.nq, p.qk_size, query, e_padded);
    bool finite = all_finite(query, tile.nq, e_padded);
    if (p.grad_output.defined()) {
      copy_in<T>(Rows(p.grad_output, problem.batch, h, i, 0), tile.nq, p.v_size, grad, ev_padded);
      finite = all_finite(grad, tile.nq, ev_padded) && finite;
    }
    return finite;
  }

  bool pack_keys(const Problem& problem, int64_t h) {
    const Tile<T>& tile = gradient.tile;
    const int64_t g = h / p.group(), j = problem.k_begin + tile.j0;
    copy_in<T>(Rows(p.key, problem.batch, g, j, 0), tile.nk, p.qk_size, key, e_padded);
    if (p.value.defined()) {
      copy_in<T>(Rows(p.value, problem.batch, g, j, 0), tile.nk, p.v_size, value, ev_padded);
    }
    return !tile.mixed || all_finite(key, tile.nk, e_padded);
  }

  // dV += P^T dO, dK += dS^T Q, dQ += dS K for the block whose first key is `row` of the range.
  void products(int64_t row, bool careful) {
    const Tile<T>& tile = gradient.tile;
    const int64_t nq = tile.nq, nk = tile.nk;
    T* const dv = value_grad + row * ev_padded;
    T* const dk = key_grad + row * e_padded;
    const T *const prob = gradient.probabilities, *const ds = gradient.scores_grad;
    if (careful) {
      auto sees = [&](int64_t y, int64_t x) { return tile.visible[y * kBlock + x] != 0; };
      auto sees_back = [&](int64_t x, int64_t y) { return sees(y, x); };
      auto left = [&](int64_t y, int64_t x) { return prob[y * kBlock + x]; };
      auto left_grad = [&](int64_t y, int64_t x) { return ds[y * kBlock + x]; };
      auto left_back = [&](int64_t x, int64_t y) { return ds[y * kBlock + x]; };
      if (want_value) careful_accumulate<T>(left, grad, ev_padded, dv, ev_padded, nk, nq, sees);
      if (want_key) careful_accumulate<T>(left_grad, query, e_padded, dk, e_padded, nk, nq, sees);
      if (want_query) {
        careful_accumulate<T>(left_back, key, e_padded, query_grad, e_padded, nq, nk, sees_back);
      }
    } else {
      Band by_key, by_query;
      if (tile.windowed) {
        by_key = {-tile.window.high, -tile.window.low};
        by_query = {tile.window.low, tile.window.high};
      }
      if (want_value) accumulate<Read::kRows>(prob, grad, ev_padded, dv, nk, nq, by_key);
      if (want_key) accumulate<Read::kRows>(ds, query, e_padded, dk, nk, nq, by_key);
      if (want_query) accumulate<Read::kColumns>(ds, key, e_padded, query_grad, nq, nk, by_query);
    }
  }

  template <Read kRead>
  AE_INLINE void accumulate(const T* a, const T* b, int64_t width, T* c, int64_t rows,
                            int64_t depth, Band band) {
    for_strips<4>(static_cast<int>(width / W), [&]<int NV>(int v) {
      multiply_panel<T, NV, Start::kAdd, kRead>(a, kBlock, b + v * W, width, c + v * W, width, rows,
                                                depth, nullptr, band);
    });
  }

  // ---- sums that several items share, taken in turn ----

  // False if another thread has failed, so that the turn may never come.
  static bool wait_for(const std::atomic<int32_t>& turn, int64_t place, const WorkQueue& queue) {
    for (int spins = 0; turn.load(std::memory_order_acquire) < place;) {
      if (queue.failed.load(std::memory_order_relaxed)) return false;
      if (++spins < 2000) {
#if defined(__SSE2__)
        _mm_pause();
#endif
      } else {
        sched_yield();
      }
    }
    return true;
  }
  AE_INLINE static void pass_on(std::atomic<int32_t>& turn, int64_t place) {
    turn.store(static_cast<int32_t>(place + 1), std::memory_order_release);
  }

  // The bias gradient: batch elements and heads that share a tile of it add in their order.
  AE_INLINE std::atomic<int32_t>& bias_turn(BackwardState& state, const Problem& problem, int64_t h,
                                            int64_t block, int64_t r) const {
    const int64_t b_bias = p.bias_size[0] == 1 ? 0 : problem.index;
    const int64_t h_bias = p.bias_size[1] == 1 ? 0 : h;
    const int64_t blocks = blocks_of(p.q_length, query_block(p.q_length));
    return state
        .bias_added[((b_bias * p.bias_size[1] + h_bias) * blocks + block) * backward_ranges(p) + r];
  }
  AE_INLINE int64_t bias_place(const Problem& problem, int64_t h) const {
    const int64_t before = p.bias_size[0] == 1 ? problem.index : 0;
    return p.bias_size[1] == 1 ? before * p.heads + h : before;
  }

  // dQ and the gradient of logsumexp: the ranges of a head add in their order.

  AE_INLINE bool direct() const {  // the gradient has the accumulation type itself
    return p.type == ScalarType::kFloat64 || p.type == ScalarType::kFloat32;
  }

  // dQ rows (L, e_padded) of one head in the accumulation type, made by whoever comes first.
  T* sums_of(BackwardState& state, const Problem& problem, int64_t h) {
    std::atomic<void*>& slot = state.sums[problem.index * p.heads + h];
    void* found = slot.load(std::memory_order_acquire);
    if (found == nullptr) {
      T* const fresh = new T[problem.q_length * e_padded];
      if (slot.compare_exchange_strong(found, fresh)) return fresh;
      delete[] fresh;
    }
    return static_cast<T*>(found);
  }

  void release_sums(BackwardState& state, const Problem& problem, int64_t g, int64_t ranges) {
    if (state.sums == nullptr) return;
    if (state.remaining[problem.index * p.kv_heads + g].fetch_add(1) + 1 < ranges) return;
    for (int64_t h = g * p.group(); h < (g + 1) * p.group(); ++h) {
      delete[] static_cast<T*>(state.sums[problem.index * p.heads + h].exchange(nullptr));
    }
  }

  // Waits until `place` earlier ranges have added their part, then adds ours. False if another
  // thread has failed.
  bool add_in_turn(BackwardState& state, WorkQueue& queue, const Problem& problem, int64_t h,
                   int64_t i0, int64_t nq, int64_t block, int64_t place, int64_t places) {
    if (!want_query && !want_statistic) return true;
    const int64_t blocks_before =
        p.packed() ? p.q_block_starts[problem.index] * p.heads +
                         h * (p.q_block_starts[problem.index + 1] - p.q_block_starts[problem.index])
                   : (problem.index * p.heads + h) *
                         blocks_of(problem.q_length, query_block(problem.q_length));
    std::atomic<int32_t>* const added =
        state.added != nullptr ? &state.added[blocks_before + block] : nullptr;
    if (place > 0 && !wait_for(*added, place, queue)) return false;
    const bool last = place + 1 == places;
    if (want_query) {
      const Rows out(p.grad_query, problem.batch, h, problem.q_begin + i0, 0);
      const T scale = static_cast<T>(p.scale);
      if (places == 1) {
        copy_out<T>(query_grad, e_padded, nq, p.qk_size, scale, out);
      } else if (direct()) {
        if (place > 0) add_rows(out, nq);
        copy_out<T>(query_grad, e_padded, nq, p.qk_size, last ? scale : T{1}, out);
      } else {
        T* const sums = sums_of(state, problem, h) + i0 * e_padded;
        for (int64_t k = 0; place > 0 && k < nq * e_padded; k += W) {
          store(query_grad + k, load(query_grad + k) + load(sums + k));
        }
        if (last) {
          copy_out<T>(query_grad, e_padded, nq, p.qk_size, scale, out);
        } else {
          __builtin_memcpy(sums, query_grad, nq * e_padded * sizeof(T));
        }
      }
    }
    if (want_statistic) {
      for (int64_t x = 0; x < nq; ++x) {
        T* const at = p.grad_statistics.at<T>(problem.batch, h, problem.q_begin + i0 + x, 0);
        *at = place > 0 ? *at + statistic[x] : statistic[x];
      }
    }
    if (added != nullptr) pass_on(*added, place);
    return true;
  }

  AE_INLINE void add_rows(const Rows& rows, int64_t nq) {
    for (int64_t i = 0; i < nq; ++i) {
      for (int64_t e = 0; e < p.qk_size; e += W) {
        T* const at = query_grad + i * e_padded + e;
        store(at, load(at) +
                      load_piece<T>(rows.at(i, e), rows.type, rows.column_stride, p.qk_size - e));
      }
    }
  }

  void clear_rows(const Problem& problem, int64_t h, int64_t i0, int64_t nq) {
    __builtin_memset(query_grad, 0, nq * e_padded * sizeof(T));
    if (want_query) {
      copy_out<T>(query_grad, e_padded, nq, p.qk_size, T{1},
                  Rows(p.grad_query, problem.batch, h, problem.q_begin + i0, 0));
    }
    for (int64_t x = 0; want_statistic && x < nq; ++x) {
      *p.grad_statistics.at<T>(problem.batch, h, problem.q_begin + i0 + x, 0) = T{0};
    }
  }

  void write_keys(const Problem& problem, int64_t g, int64_t k_begin, int64_t count) {
    const int64_t j = problem.k_begin + k_begin;
    if (want_key) {
      copy_out<T>(key_grad, e_padded, count, p.qk_size, static_cast<T>(p.scale),
                  Rows(p.grad_key, problem.batch, g, j, 0));
    }
    if (want_value) {
      copy_out<T>(value_grad, ev_padded, count, p.v_size, T{1},
                  Rows(p.grad_value, problem.batch, g, j, 0));
    }
  }
};

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
