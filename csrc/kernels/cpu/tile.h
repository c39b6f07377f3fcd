// One tile (query block x key block): which pairs are visible, the bias that goes onto its scores,
// and the passes that turn plain products into scores. Everything lies as [key][query lane], like
// the scores. Shared by all kernels.
#pragma once

#include "kernels/cpu/dropout.h"
#include "kernels/cpu/microkernel.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/mask.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// Strips of queries that go through a tile together.
constexpr int kStripVectors = 3;

// Rows of K or V: in place, or copied with their columns padded to whole vectors.
template <class T>
struct Operand {
  const T* data;
  int64_t stride;
};

template <class T>
AE_INLINE Operand<T> operand_of(const Rows& rows, bool in_place, int64_t n, int64_t size, T* copy) {
  if (in_place) return {reinterpret_cast<const T*>(rows.data), rows.row_stride};
  const int64_t stride = round_up(size, kLanes<T>);
  copy_in<T>(rows, n, size, copy, stride);
  return {copy, stride};
}

enum class Visibility { kHidden, kMixed, kVisible };

template <class T>
struct Tile {
  // The block.
  int64_t i0, nq, j0, nk;  // positions inside the problem, sizes
  int64_t lanes;           // nq rounded up to whole vectors
  // Scratch, [key][kBlock lanes].
  uint8_t* visible;  // nonzero = takes part; valid if mixed; lanes behind nq are 0
  T* bias;           // valid if has_bias
  T* key_bias;       // [key], valid if has_key_bias
  // Found by classify().
  bool mixed, has_bias, has_key_bias, windowed;
  WindowBounds window;
  Ahead ahead;  // what products over the tile ask for on their way

  AE_INLINE void allocate(Arena& arena, const AttentionParams& p) {
    visible = arena.take<uint8_t>(kBlock * kBlock);
    bias = arena.take<T>(p.attn_bias.defined() ? kBlock * kBlock : 0);
    key_bias = arena.take<T>(kBlock);
  }
  AE_INLINE bool has_last_steps() const { return mixed || has_bias; }  // see LastSteps
  // Keys of this tile that lanes [x, x + width) may see through the window.
  AE_INLINE KeyRange strip_keys(int64_t x, int64_t width) const {
    if (!windowed) return {0, nk};
    const int64_t begin = larger(0, x + window.low);
    const int64_t end = smaller(nk, x + width + window.high);
    return {smaller(begin, nk), larger(end, smaller(begin, nk))};
  }
};

AE_INLINE Bytes16 load_bytes(const uint8_t* p) {
  Bytes16 v;
  __builtin_memcpy(&v, p, 16);
  return v;
}
AE_INLINE bool any_byte(Bytes16 v) {
  typedef uint64_t Halves __attribute__((vector_size(16)));
  const Halves h = (Halves)v;
  return (h[0] | h[1]) != 0;
}

// Bytes of a bool mask row, any stride: whether some are nonzero, some zero.
struct Seen {
  bool some = false;
  bool hidden = false;
  AE_INLINE bool both() const { return some && hidden; }
};
AE_INLINE void scan_row(const uint8_t* row, int64_t stride, int64_t n, Seen& seen) {
  int64_t k = 0;
  if (stride == 1) {
    Bytes16 nonzero{}, zero{};
    for (; k + 16 <= n; k += 16) {
      const Bytes16 v = load_bytes(row + k);
      nonzero |= v;
      zero |= (Bytes16)(v == 0);
    }
    seen.some |= any_byte(nonzero);
    seen.hidden |= any_byte(zero);
  }
  for (; k < n; ++k) {
    const bool on = row[k * stride] != 0;
    seen.some |= on;
    seen.hidden |= !on;
  }
}

// visible[y][x] = mask[x][y], zeros in the lanes behind nq.
template <class T>
void transpose_mask(const Rows& mask, Tile<T>& t) {
  constexpr int kKeys = sizeof(Bytes);
  for (int64_t x0 = 0; x0 < t.lanes; x0 += 16) {
    for (int64_t y0 = 0; y0 < t.nk; y0 += kKeys) {
      const int64_t first = smaller(y0, larger(0, t.nk - kKeys)), count = smaller(kKeys, t.nk);
      Bytes rows[16];
      AE_UNROLL for (int x = 0; x < 16; ++x) {
        rows[x] = Bytes{};
        if (x0 + x >= t.nq) continue;
        const uint8_t* row = reinterpret_cast<const uint8_t*>(mask.at(x0 + x, first));
        if (mask.column_stride == 1 && count == kKeys) {
          __builtin_memcpy(&rows[x], row, kKeys);
        } else {
          uint8_t bytes[kKeys] = {};
          for (int64_t y = 0; y < count; ++y) bytes[y] = row[y * mask.column_stride];
          __builtin_memcpy(&rows[x], bytes, kKeys);
        }
      }
      transpose_bytes(rows);
      AE_UNROLL for (int piece = 0; piece < kKeys; piece += 16) {
        AE_UNROLL for (int y = 0; y < 16; ++y) {
          if (piece + y >= count) break;
          __builtin_memcpy(t.visible + (first + piece + y) * kBlock + x0,
                           reinterpret_cast<const char*>(&rows[y]) + piece, 16);
        }
      }
    }
  }
}

// Collects the reasons for hiding, in `visible`.
template <class T>
struct Classifier {
  const AttentionParams& p;
  const Problem& problem;
  int64_t h;
  Tile<T>& t;
  int sources = 0;  // how many reasons hide a part of the tile

  AE_INLINE void start() {  // before the first reason that edits `visible` in place
    if (sources++ == 0) {
      for (int64_t y = 0; y < t.nk; ++y) {
        __builtin_memset(t.visible + y * kBlock, 1, t.nq);
        __builtin_memset(t.visible + y * kBlock + t.nq, 0, kBlock - t.nq);
      }
    }
  }
  AE_INLINE void hide_key(int64_t y) { __builtin_memset(t.visible + y * kBlock, 0, kBlock); }

  bool dense_mask() {  // false: hidden
    if (!p.attn_mask.defined()) return true;
    const Rows mask(p.attn_mask, problem.batch, h, t.i0, t.j0);
    Seen seen;
    const int64_t rows = mask.row_stride == 0 ? 1 : t.nq;
    const int64_t columns = mask.column_stride == 0 ? 1 : t.nk;
    for (int64_t x = 0; x < rows && !seen.both(); ++x) {
      scan_row(reinterpret_cast<const uint8_t*>(mask.at(x, 0)), mask.column_stride, columns, seen);
    }
    if (!seen.some) return false;
    if (seen.hidden) {
      ++sources;
      if (rows == 1) {
        for (int64_t y = 0; y < t.nk; ++y) {
          const bool on = *mask.at(0, y) != 0;
          __builtin_memset(t.visible + y * kBlock, on ? 1 : 0, t.nq);
          __builtin_memset(t.visible + y * kBlock + t.nq, 0, kBlock - t.nq);
        }
      } else {
        transpose_mask(mask, t);
      }
    }
    return true;
  }

  bool key_mask() {
    if (!p.key_mask.defined()) return true;
    const Rows mask(p.key_mask, problem.batch, 0, 0, problem.k_begin + t.j0);
    Seen seen;
    if (p.key_mask_is_bool) {
      scan_row(reinterpret_cast<const uint8_t*>(mask.data), mask.column_stride, t.nk, seen);
    } else {
      t.has_key_bias = true;
      for (int64_t y = 0; y < t.nk; ++y) {
        t.key_bias[y] = load_scalar<T>(mask.at(0, y), mask.type);
        const bool on = t.key_bias[y] != -kInfinity<T>;
        seen.some |= on;
        seen.hidden |= !on;
      }
    }
    if (!seen.some) return false;
    if (seen.hidden) {
      start();
      for (int64_t y = 0; y < t.nk; ++y) {
        const bool on = p.key_mask_is_bool ? *mask.at(0, y) != 0 : t.key_bias[y] != -kInfinity<T>;
        if (!on) hide_key(y);
      }
    }
    return true;
  }

  void window() {
    t.windowed = false;
    if (!p.windowed()) return;
    t.window = window_bounds(p, problem, t.i0, t.j0);
    // Every row sees every key iff the last row's lower and the first row's upper bound reach over
    // the tile.
    if (t.nq - 1 + t.window.low <= 0 && t.window.high >= t.nk - 1) return;
    t.windowed = true;
    start();
    for (int64_t y = 0; y < t.nk; ++y) {  // row x sees key y iff y - high <= x <= y - low
      uint8_t* row = t.visible + y * kBlock;
      const int64_t begin = smaller(t.nq, larger(0, y - t.window.high));
      const int64_t end = larger(begin, smaller(t.nq, y - t.window.low + 1));
      __builtin_memset(row, 0, begin);
      __builtin_memset(row + end, 0, t.nq - end);
    }
  }

  // Whether a tile of the bias is -inf throughout. One that is not mostly shows it at once.
  bool all_hidden(const Rows& rows) const {
    constexpr int W = kLanes<T>;
    const Vec<T> hidden = broadcast(-kInfinity<T>);
    const int64_t n = rows.row_stride == 0 ? 1 : t.nq;
    const int64_t columns = rows.column_stride == 0 ? 1 : t.nk, whole = columns / W * W;
    for (int64_t x = 0; x < n; ++x) {
      for (int64_t y = whole; y < columns; ++y) {
        if (load_scalar<T>(rows.at(x, y), rows.type) != -kInfinity<T>) return false;
      }
      for (int64_t y = 0; y < whole; y += W) {
        const Vec<T> piece = load_piece<T>(rows.at(x, y), rows.type, rows.column_stride, W);
        if (any<T>(static_cast<Mask<T>>(~equal(piece, hidden)))) return false;
      }
    }
    return true;
  }

  bool bias() {  // false: hidden
    if (!p.attn_bias.defined()) return true;
    const Rows rows(p.attn_bias, problem.batch, h, t.i0, t.j0);
    const int64_t next = t.j0 + t.nk;  // the block after this one is likely as large
    prefetch_rows<false>(t.ahead, Rows(p.attn_bias, problem.batch, h, t.i0, next), t.nq,
                         smaller(t.nk, problem.k_length - next));
    if (all_hidden(rows)) return false;
    t.has_bias = true;
    const Vec<T> hidden = broadcast(-kInfinity<T>);
    Mask<T> found{};
    transpose_with<T>(rows, t.nq, t.nk, t.bias, kBlock, [&](Vec<T> x) {
      found |= equal(x, hidden);
      return x;
    });
    if (!any<T>(found)) return true;
    start();
    for (int64_t y = 0; y < t.nk; ++y) {
      for (int64_t x = 0; x < t.nq; ++x) {
        if (t.bias[y * kBlock + x] == -kInfinity<T>) t.visible[y * kBlock + x] = 0;
      }
    }
    return true;
  }

  bool any_visible() const {
    Bytes16 nonzero{};
    for (int64_t y = 0; y < t.nk; ++y) {
      for (int64_t x = 0; x < t.lanes; x += 16) nonzero |= load_bytes(t.visible + y * kBlock + x);
    }
    return any_byte(nonzero);
  }
};

// What of the tile at (i0, nq) x (j0, nk) is visible; loads its bias on the way. Cheap reasons come
// first.
template <class T>
Visibility classify(const AttentionParams& p, const Problem& problem, int64_t h, Tile<T>& t) {
  t.mixed = t.has_bias = t.has_key_bias = false;
  t.lanes = round_up(t.nq, kLanes<T>);
  Classifier<T> c{p, problem, h, t};
  // dense_mask writes `visible` afresh, so it comes before those that edit it.
  if (p.windowed()) {
    const WindowBounds w = window_bounds(p, problem, t.i0, t.j0);
    if (w.low > t.nk - 1 || t.nq - 1 + w.high < 0) return Visibility::kHidden;
  }
  if (!c.dense_mask() || !c.key_mask()) return Visibility::kHidden;
  c.window();
  if (!c.bias()) return Visibility::kHidden;
  t.mixed = c.sources > 0;
  if (!t.mixed) return Visibility::kVisible;
  // One bool mask alone has been seen to be mixed; everything else may hide the tile together.
  if ((c.sources > 1 || p.attn_bias.defined() || t.windowed) && !c.any_visible()) {
    return Visibility::kHidden;
  }
  return Visibility::kMixed;
}

// ---- passes over scores of lanes [x, x + NV vectors), keys [keys.begin, keys.end)
// ---------------------------------

template <class T, int NV, class F>
AE_INLINE void for_scores(T* s, int64_t lds, KeyRange keys, F&& f) {
  constexpr int W = kLanes<T>;
  for (int64_t y = keys.begin; y < keys.end; ++y) {
    AE_UNROLL for (int v = 0; v < NV; ++v) {
      T* at = s + y * lds + v * W;
      store(at, f(load(at), y, v * W));
    }
  }
}

// scale * dot -> softcap -> ALiBi -> bias + key mask -> -inf where hidden. adjust_scores() makes
// passes over the scores, up to the last steps (a bias without a key mask, hiding), which whoever
// reads the scores next takes on its way. Who selects by `visible` afterwards needs no hiding.
template <class T, bool kBias, bool kHide>
struct LastSteps {
  static constexpr bool kAny = kBias || kHide;
  const T* bias;
  const uint8_t* visible;

  AE_INLINE Vec<T> operator()(Vec<T> score, int64_t at) const {
    if constexpr (kBias) score += load(bias + at);
    if constexpr (kHide) {
      score = select(mask_from_bytes<T>(visible + at), score, broadcast(-kInfinity<T>));
    }
    return score;
  }
};
template <class T, bool kHide, class F>
AE_INLINE void with_bias_step(const Tile<T>& t, F&& f) {
  if (t.has_bias && !t.has_key_bias) {
    f(LastSteps<T, true, kHide>{t.bias, t.visible});
  } else {
    f(LastSteps<T, false, kHide>{t.bias, t.visible});
  }
}
template <class T, class F>
AE_INLINE void with_last_steps(const Tile<T>& t, F&& f) {
  if (t.mixed) {
    with_bias_step<T, true>(t, f);
  } else {
    with_bias_step<T, false>(t, f);
  }
}

template <class T>
AE_INLINE bool needs_adjusting(const AttentionParams& p, const Tile<T>& t) {
  return t.has_key_bias || p.softcap > 0 || p.alibi_slopes != nullptr;
}

// All but the last steps. The slope of softcap (1 - tanh^2), if wanted, goes to cap.
template <class T, int NV>
__attribute__((noinline)) void adjust_scores(const AttentionParams& p, const Problem& problem,
                                             int64_t h, const Tile<T>& t, int64_t x, T* s,
                                             int64_t lds, KeyRange keys, T* cap) {
  constexpr int W = kLanes<T>;
  if (p.softcap > 0) {
    const T c = static_cast<T>(p.softcap);
    if (cap != nullptr) {
      for_scores<T, NV>(s, lds, keys, [&](Vec<T> value, int64_t y, int64_t lane) {
        const Vec<T> u = tanh_vector<T>(value / c);
        store(cap + y * lds + lane, T{1} - u * u);
        return u * c;
      });
    } else {
      for_scores<T, NV>(s, lds, keys, [&](Vec<T> value, int64_t, int64_t) {
        return tanh_vector<T>(value / c) * c;
      });
    }
  }
  if (p.alibi_slopes != nullptr) {
    const T slope = static_cast<const T*>(
        p.alibi_slopes)[problem.index * p.alibi_stride[0] + h * p.alibi_stride[1]];
    Vec<T> lane_index;
    for (int i = 0; i < W; ++i) lane_index[i] = static_cast<T>(i);
    const int64_t diagonal = t.i0 + x + problem.query_offset - t.j0;
    for_scores<T, NV>(s, lds, keys, [&](Vec<T> value, int64_t y, int64_t lane) {
      const Vec<T> d = lane_index + static_cast<T>(diagonal + lane - y);
      return value - max(d, -d) * slope;
    });
  }
  if (t.has_bias && t.has_key_bias) {
    // A finite bias and a finite key mask have a finite sum.
    const T most = std::numeric_limits<T>::max();
    for_scores<T, NV>(s, lds, keys, [&](Vec<T> value, int64_t y, int64_t lane) {
      const Vec<T> bias = load(t.bias + y * kBlock + x + lane);
      const T key = t.key_bias[y];
      const Vec<T> sum = bias + key;
      const bool finite_key = key >= -most && key <= most;
      const Vec<T> clamped = min(broadcast(most), max(broadcast(-most), sum));
      const Mask<T> finite = less(max(bias, -bias), broadcast(kInfinity<T>));
      return value + (finite_key ? select(finite, clamped, sum) : sum);
    });
  } else if (t.has_key_bias) {
    for_scores<T, NV>(s, lds, keys,
                      [&](Vec<T> value, int64_t y, int64_t) { return value + t.key_bias[y]; });
  }
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
