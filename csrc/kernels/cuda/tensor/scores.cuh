// From products to scores, element by element of a fragment tile: scale, softcap, ALiBi, bias, key
// mask, and which pairs are visible; dropout's keep bits. Everything a call may or may not use is a
// branch that all threads take alike. Bits of a slice: element c of block n is bit 4 n + c.
//
// Tiles come in two orientations: with query rows down and keys across (forward, gradients of
// queries and of the bias), or with keys down and queries across (gradients of keys and values).
#pragma once

#include "kernels/cuda/tensor/tile.cuh"
#include "kernels/mask.h"
#include "kernels/philox.h"

namespace attention_ext::kernels::cuda::tensor {

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kMost = 3.402823466e+38f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// One head of one problem. It lies in shared memory, where it costs no registers.
struct Head {
  Problem problem;
  DropoutParams dropout;
  int64_t h, kv_head;
};

AE_DEVICE Head head_of(const AttentionParams& p, int64_t n, int64_t h) {
  return {p.problem(n), with_state(p.dropout, p.heads), h, h / p.group()};
}

// Where the query rows of a tile lie: row x is query i0 + query(x) of head head.h + head(x), and
// `offset` elements behind the tile's first row in a tensor. Here: rows of one head.
struct HeadRows {
  static constexpr bool kGrouped = false;
  AE_DEVICE int head(int) const { return 0; }
  AE_DEVICE int query(int x) const { return x; }
  AE_DEVICE int64_t offset(const View& view, int x) const { return x * view.stride[2]; }
};
// Rows of all heads of a group, which share their keys: its heads' queries one head after the other
// are cut into tiles. Rows behind the last one stand for it; they are computed and not written.
struct GroupRows {
  static constexpr bool kGrouped = true;
  int first, count;   // this tile's first row, and all rows of the group
  int length, start;  // L, and the first query among this tile's rows, its i0

  AE_DEVICE GroupRows(int first_row, int all, int queries, int tile)
      : first(first_row), count(all), length(queries), start(0) {
    const int last = (first + tile < count ? first + tile : count) - 1;
    if (first / length == last / length) start = first % length;
  }
  AE_DEVICE int at(int x) const { return first + x < count ? first + x : count - 1; }
  AE_DEVICE int head(int x) const { return at(x) / length; }
  AE_DEVICE int query(int x) const { return at(x) % length - start; }
  AE_DEVICE int64_t offset(const View& view, int x) const {
    return head(x) * view.stride[1] + query(x) * view.stride[2];
  }
};
// Whether something beside windows hides pairs.
AE_DEVICE bool has_dense_mask(const AttentionParams& p) {
  return p.attn_mask.defined() || p.attn_bias.defined() || p.key_mask.defined();
}
AE_DEVICE bool has_key_bias(const AttentionParams& p) {
  return p.key_mask.defined() && !p.key_mask_is_bool;
}
// Whether scores are more than products times a positive scale.
AE_DEVICE bool natural_scores(const AttentionParams& p) {
  return p.attn_bias.defined() || p.softcap > 0 || p.alibi_slopes != nullptr || has_key_bias(p) ||
         !(static_cast<float>(p.scale) > 0);
}

// Block pairs computed, for tests of "work follows the mask".
AE_DEVICE void count_visits(const AttentionParams& p, int64_t count) {
  atomicAdd(reinterpret_cast<unsigned long long*>(p.visited),
            static_cast<unsigned long long>(count));
}

AE_DEVICE bool is_finite(float x) { return x - x == 0.0f; }

// Where a tile lies: rows from i0, keys from j0, of which nq and nk are inside; row x sees key y of
// it through the window iff x + low <= y <= x + high.
struct Place {
  int64_t i0, j0;
  int nq, nk;
  int low, high;

  AE_DEVICE bool inside(int x, int y) const {
    return x < nq && y < nk && y >= x + low && y <= x + high;
  }
};

AE_DEVICE int clamp_to_tile(int64_t x) {
  constexpr int64_t kFar = 1 << 20;  // beyond any tile
  return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x);
}

AE_DEVICE Place place_of(const AttentionParams& p, const Head& head, int64_t i0, int64_t j0) {
  const WindowBounds w = window_bounds(p, head.problem, i0, j0);
  return {i0,
          j0,
          clamp_to_tile(head.problem.q_length - i0),
          clamp_to_tile(head.problem.k_length - j0),
          clamp_to_tile(w.low),
          clamp_to_tile(w.high)};
}

// The dense tensors of one tile, from its first pair on.
struct Dense {
  const char* mask;
  const char* key_mask;
  const char* bias;
};
AE_DEVICE int bytes_of(ScalarType type) {
  return type == ScalarType::kFloat32 ? 4 : type == ScalarType::kBool ? 1 : 2;
}
AE_DEVICE const char* origin(const View& view, int64_t b, int64_t h, int64_t i, int64_t j) {
  return view.data + view.offset(b, h, i, j) * bytes_of(view.type);
}
AE_DEVICE Dense dense_of(const AttentionParams& p, const Problem& problem, int64_t h, int64_t i0,
                         int64_t j0) {
  Dense d{nullptr, nullptr, nullptr};
  if (p.attn_mask.defined()) d.mask = origin(p.attn_mask, problem.batch, h, i0, j0);
  if (p.attn_bias.defined()) d.bias = origin(p.attn_bias, problem.batch, h, i0, j0);
  if (p.key_mask.defined()) {
    d.key_mask = origin(p.key_mask, problem.batch, 0, 0, problem.k_begin + j0);
  }
  return d;
}

// Value number `at` of a bias or float key mask, of any type that the kernels take.
AE_DEVICE float load_value(const char* data, ScalarType type, int64_t at) {
  if (type == ScalarType::kFloat32) return reinterpret_cast<const float*>(data)[at];
  const Bits bits = reinterpret_cast<const Bits*>(data)[at];
  return type == ScalarType::kFloat16 ? ptx::unpack<ScalarType::kFloat16>(bits)
                                      : ptx::unpack<ScalarType::kBFloat16>(bits);
}

// Whether pair (x, y), which the window shows, is visible; every other reason counts.
template <class Rows = HeadRows>
AE_DEVICE bool unmasked(const AttentionParams& p, const Dense& d, int x, int y,
                        const Rows& rows = {}) {
  if (d.mask != nullptr && d.mask[rows.offset(p.attn_mask, x) + y * p.attn_mask.stride[3]] == 0) {
    return false;
  }
  if (d.key_mask != nullptr) {
    const int64_t at = y * p.key_mask.stride[3];
    if (p.key_mask_is_bool) {
      if (d.key_mask[at] == 0) return false;
    } else if (load_value(d.key_mask, p.key_mask.type, at) == -kInfinity) {
      return false;
    }
  }
  return d.bias == nullptr ||
         load_value(d.bias, p.attn_bias.type,
                    rows.offset(p.attn_bias, x) + y * p.attn_bias.stride[3]) != -kInfinity;
}

// Visible pairs of one slice. `row` is where the slice's rows begin in the tile.
template <bool kKeysDown, int kColumns, class Rows = HeadRows>
AE_DEVICE uint32_t visible_bits(const AttentionParams& p, const Head& head, int64_t i0, int64_t j0,
                                int row, const Rows& rows = {}) {
  static_assert(kColumns <= 64);
  const Place at = place_of(p, head, i0, j0);
  const Dense d = dense_of(p, head.problem, head.h, i0, j0);
  uint32_t bits = 0;
#pragma unroll 1
  for (int n = 0; n < kColumns / 8; ++n) {
    uint32_t four = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int down = row + fragment_row(0, c), across = fragment_column(n, c);
      const int x = kKeysDown ? across : down, y = kKeysDown ? down : across;
      const bool on = at.inside(rows.query(x), y) && unmasked(p, d, x, y, rows);
      four |= static_cast<uint32_t>(on) << c;
    }
    bits |= four << (4 * n);
  }
  return bits;
}

// What is added to a score for a bias `b` and a float key mask `k`: if both are finite, so is their
// sum.
AE_DEVICE float sum_of_biases(float b, float k) {
  const float sum = b + k;
  return is_finite(b) && is_finite(k) ? std::fmin(kMost, std::fmax(-kMost, sum)) : sum;
}
AE_DEVICE float alibi_slope(const AttentionParams& p, const Head& head, int64_t h) {
  return static_cast<const float*>(
      p.alibi_slopes)[head.problem.index * p.alibi_stride[0] + h * p.alibi_stride[1]];
}
// softcap * tanh(s / softcap), with tanh(x) = (1 - t) / (1 + t), t = exp(-2 |x|): an absolute error
// of 2^-21 softcap, far below what 16-bit factors leave of a score.
AE_DEVICE float capped(float s, float softcap, float inverse) {
  const float t = ptx::exp2_approx(-2.0f * kLog2E * std::fabs(s * inverse));
  const float size = softcap * (1.0f - t) * ptx::reciprocal_approx(1.0f + t);
  return s < 0.0f ? -size : size;
}

// Products of one slice become natural scores, in the contract's order: scale, softcap, ALiBi, bias
// and key mask. One pass for each that a call has.
template <bool kKeysDown, int kColumns, class Rows = HeadRows>
AE_DEVICE void adjust_scores(const AttentionParams& p, const Head& head, int64_t i0, int64_t j0,
                             int row, float (&s)[kColumns / 8][4], const Rows& rows = {}) {
  auto for_all = [&](auto&& change) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int down = row + fragment_row(0, c), across = fragment_column(n, c);
        change(s[n][c], kKeysDown ? across : down, kKeysDown ? down : across);
      }
      ptx::keep_order();
    }
  };
  const float scale = static_cast<float>(p.scale);
  if (p.softcap > 0) {
    const float softcap = static_cast<float>(p.softcap), inverse = 1.0f / softcap;
    for_all([&](float& x, int, int) { x = capped(x * scale, softcap, inverse); });
  } else {
    for_all([&](float& x, int, int) { x *= scale; });
  }
  if (p.alibi_slopes != nullptr) {
    const float slope = alibi_slope(p, head, head.h);
    const float diagonal = static_cast<float>(i0 + head.problem.query_offset - j0);
    for_all([&](float& value, int x, int y) {
      const float distance = std::fabs(diagonal + static_cast<float>(rows.query(x) - y));
      value -= distance * (Rows::kGrouped ? alibi_slope(p, head, head.h + rows.head(x)) : slope);
    });
  }
  if (!p.attn_bias.defined() && !has_key_bias(p)) return;
  const Place at = place_of(p, head, i0, j0);
  const Dense d = dense_of(p, head.problem, head.h, i0, j0);
  auto with_bias = [&](auto&& load) {
    if (has_key_bias(p)) {
      for_all([&](float& value, int x, int y) {
        if (rows.query(x) >= at.nq || y >= at.nk) return;
        const float k = load_value(d.key_mask, p.key_mask.type, y * p.key_mask.stride[3]);
        value += p.attn_bias.defined() ? sum_of_biases(load(x, y), k) : k;
      });
    } else {
      for_all([&](float& value, int x, int y) {
        if (rows.query(x) < at.nq && y < at.nk) value += load(x, y);
      });
    }
  };
  const int64_t down = p.attn_bias.stride[2], across = p.attn_bias.stride[3];
  // Not rows.offset() for one head, too: it costs a register that ptxas does not have.
  auto offset = [&](int x, int y) {
    return (Rows::kGrouped ? rows.offset(p.attn_bias, x) : x * down) + y * across;
  };
  if (p.attn_bias.type == ScalarType::kFloat32) {
    with_bias([&](int x, int y) { return reinterpret_cast<const float*>(d.bias)[offset(x, y)]; });
  } else {
    with_bias([&](int x, int y) { return load_value(d.bias, p.attn_bias.type, offset(x, y)); });
  }
}

template <int kColumns>
AE_DEVICE void hide(float (&s)[kColumns / 8][4], uint32_t visible, float with) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) s[n][c] = (visible >> (4 * n + c) & 1) != 0 ? s[n][c] : with;
  }
}

// Dropout: kept pairs of one slice. Eight keys share a call of Philox; the lanes that need its bits
// share it, too: each lane makes kColumns / 16 calls and hands out bytes.
template <bool kKeysDown, int kColumns, class Rows = HeadRows>
AE_DEVICE uint32_t kept_bits(const Head& head, int64_t i0, int64_t j0, int row,
                             const Rows& rows = {}) {
  constexpr int kBlocks = kColumns / 8;
  const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
  const DropoutParams& drop = head.dropout;
  const int64_t b = head.problem.index, first = drop.first_key + j0;
  uint32_t bits = 0;
  if ((first & 7) != 0) {  // a shard that begins inside a group: one call for each pair
#pragma unroll 1
    for (int e = 0; e < 4 * kBlocks; ++e) {
      const int down = row + fragment_row(0, e & 3), across = fragment_column(e >> 2, e & 3);
      const int x = kKeysDown ? across : down, y = kKeysDown ? down : across;
      const int64_t h = head.h + rows.head(x), i = i0 + rows.query(x);
      bits |= static_cast<uint32_t>(keep(drop, b, h, i, j0 + y)) << e;
    }
    return bits;
  }
  uint32_t bytes = 0;
  if constexpr (kKeysDown) {
    // Lane (g, t) calls for block g: its two columns 2 t, 2 t + 1, groups of keys 0..7 and 8..15.
    if (g < kBlocks) {
#pragma unroll 1
      for (int q = 0; q < 4; ++q) {
        const int64_t i = i0 + 8 * g + 2 * t + (q & 1);
        const int64_t group = (first + row) / 8 + (q >> 1);
        bytes |= keep_group(drop, b, head.h, i, group) << (8 * q);
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const uint32_t theirs = ptx::shuffle(bytes, 4 * n + t);
#pragma unroll
      for (int c = 0; c < 4; ++c) bits |= (theirs >> (8 * c + g) & 1u) << (4 * n + c);
    }
  } else {
    // Lane (g, t) calls for rows g and g + 8 and a quarter of the blocks.
    constexpr int kQuarter = kBlocks / 4;
#pragma unroll 1
    for (int q = 0; q < 2 * kQuarter; ++q) {
      const int x = row + g + 8 * (q & 1);
      const int64_t h = head.h + rows.head(x), i = i0 + rows.query(x);
      const int64_t group = first / 8 + kQuarter * t + (q >> 1);
      bytes |= keep_group(drop, b, h, i, group) << (8 * q);
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const uint32_t theirs = ptx::shuffle(bytes, (lane & ~3) + n / kQuarter);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int from = 8 * (2 * (n % kQuarter) + (c >> 1)) + 2 * t + (c & 1);
        bits |= (theirs >> from & 1u) << (4 * n + c);
      }
    }
  }
  return bits;
}

}  // namespace attention_ext::kernels::cuda::tensor
