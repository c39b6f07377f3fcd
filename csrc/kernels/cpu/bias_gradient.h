// The gradient of attn_bias in the bias's own shape: an item owns a tile of the bias and sums dS
// over everything that the bias broadcasts over (batch, heads, rows, keys), in a fixed order, so
// that nothing of size B x H x L x S exists. S and dP are computed once more for it (two products),
// which only happens if the bias wants a gradient.
#pragma once

#include "kernels/cpu/gradient_tile.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// Keys of a bias tile: enough to share the packing of the queries, few enough for scratch.
constexpr int64_t kBiasKeyBlocks = 4;

struct BiasPlan {
  int64_t rows, keys;              // of a tile
  int64_t row_tiles, key_tiles;    // over L and S
  int64_t owned_rows, owned_keys;  // tiles of the bias itself: 1 where it broadcasts
  AE_INLINE explicit BiasPlan(const BackwardParams& p) {
    rows = query_block(p.q_length);
    keys = key_block(p.k_length) * kBiasKeyBlocks;
    row_tiles = blocks_of(p.q_length, rows);
    key_tiles = blocks_of(p.k_length, keys);
    owned_rows = p.bias_size[2] == 1 ? 1 : row_tiles;
    owned_keys = p.bias_size[3] == 1 ? 1 : key_tiles;
  }
  AE_INLINE int64_t items(const BackwardParams& p) const {
    return p.bias_size[0] * p.bias_size[1] * owned_rows * owned_keys;
  }
};

template <class T, class In = T>
struct BiasGradient {
  static constexpr int W = kLanes<T>;
  const BackwardParams& p;
  const BiasPlan plan;
  GradientTile<T, In> gradient;
  QueryBlock<T, In> packed;
  In *key, *value;  // copies where K or V cannot be read in place
  T* sums;          // [key of the tile][kBlock]

  AE_INLINE BiasGradient(const BackwardParams& params, Arena& arena) : p(params), plan(params) {
    gradient.allocate(arena, p);
    packed.allocate(arena, p);
    key = arena.take<In>(kBlock * Input<In>::padded(p.qk_size));
    value = arena.take<In>(kBlock * Input<In>::padded(p.v_size));
    sums = arena.take<T>(kBlock * kBiasKeyBlocks * kBlock);
  }

  void item(int64_t index) {
    const int64_t key_tile = index % plan.owned_keys;
    const int64_t row_tile = index / plan.owned_keys % plan.owned_rows;
    const int64_t h_bias = index / (plan.owned_keys * plan.owned_rows) % p.bias_size[1];
    const int64_t b_bias = index / (plan.owned_keys * plan.owned_rows * p.bias_size[1]);
    const bool all_rows = p.bias_size[2] == 1, all_keys = p.bias_size[3] == 1;
    __builtin_memset(sums, 0, kBlock * kBiasKeyBlocks * kBlock * sizeof(T));
    // Every batch element whose bias lies where ours does shares it (several batch dimensions may
    // broadcast one by one).
    const int64_t shared = bias_offset(b_bias);
    for (int64_t b = 0; b < p.problems; ++b) {
      if (batch_offset(b) != shared) continue;
      for (int64_t h = 0; h < p.heads; ++h) {
        if (p.bias_size[1] != 1 && h != h_bias) continue;
        for (int64_t x = all_rows ? 0 : row_tile; x < (all_rows ? plan.row_tiles : row_tile + 1);
             ++x) {
          for (int64_t y = all_keys ? 0 : key_tile; y < (all_keys ? plan.key_tiles : key_tile + 1);
               ++y) {
            add(p.problem(b), h, x, y);
          }
        }
      }
    }
    write(b_bias, h_bias, row_tile, key_tile);
  }

  // Offsets inside grad_bias: of batch element b of the call, and of the k-th distinct batch slice
  // of the bias.
  AE_INLINE int64_t batch_offset(int64_t b) const { return p.grad_bias.offset(b, 0, 0, 0); }
  AE_INLINE int64_t bias_offset(int64_t k) const {
    return k * p.bias_size[1] * p.bias_size[2] * p.bias_size[3];
  }

  void add(const Problem& problem, int64_t h, int64_t row_tile, int64_t key_tile) {
    Tile<T>& tile = gradient.tile;
    tile.i0 = row_tile * plan.rows;
    tile.nq = smaller(plan.rows, p.q_length - tile.i0);
    tile.ahead.forget();
    const int64_t begin = key_tile * plan.keys, end = smaller(p.k_length, begin + plan.keys);
    const int64_t step = key_block(p.k_length);
    bool have_queries = false;
    for (int64_t j0 = begin; j0 < end; j0 += step) {
      tile.j0 = j0;
      tile.nk = smaller(step, p.k_length - j0);
      if (classify<T>(p, problem, h, tile) == Visibility::kHidden) continue;
      if (!have_queries) packed.pack(p, problem, h, tile.i0, tile.nq, T{1});
      have_queries = true;
      const Operand<In> k = operand(p.key, problem, h, p.qk_size, key);
      const Operand<In> v = p.value.defined() ? operand(p.value, problem, h, p.v_size, value)
                                              : Operand<In>{nullptr, 0};
      gradient.compute(p, problem, h, packed, k, v, /*want_grad=*/true, /*with_cap=*/false,
                       nullptr);
      T* const to = sums + (p.bias_size[3] == 1 ? 0 : (j0 - begin) * kBlock);
      for (int64_t y = 0; y < tile.nk; ++y) {
        for (int64_t x = 0; x < tile.lanes; x += W) {
          T* const at = to + y * kBlock + x;
          store(at, load(at) + load(gradient.scores_grad + y * kBlock + x));
        }
      }
    }
  }

  AE_INLINE Operand<In> operand(const View& view, const Problem& problem, int64_t h, int64_t size,
                                In* copy) {
    // Decoding rows read whole vectors of K.
    const bool in_place = decoding(p) ? in_lanes<T>(view, size) : Input<In>::in_place(view, size);
    return tile_operand(p, view, in_place, problem, h, gradient.tile, size, copy);
  }

  void write(int64_t b, int64_t h, int64_t row_tile, int64_t key_tile) {
    const bool all_rows = p.bias_size[2] == 1, all_keys = p.bias_size[3] == 1;
    const int64_t i0 = row_tile * plan.rows, j0 = key_tile * plan.keys;
    int64_t nq = all_rows ? smaller(plan.rows, p.q_length) : smaller(plan.rows, p.q_length - i0);
    int64_t nk = all_keys ? key_block(p.k_length) : smaller(plan.keys, p.k_length - j0);
    if (all_rows) {  // down to one lane
      for (int64_t y = 0; y < nk; ++y) {
        T total{};
        for (int64_t x = 0; x < nq; ++x) total += sums[y * kBlock + x];
        sums[y * kBlock] = total;
      }
      nq = 1;
    }
    if (all_keys) {  // down to one row
      for (int64_t y = 1; y < nk; ++y) {
        for (int64_t x = 0; x < nq; ++x) sums[x] += sums[y * kBlock + x];
      }
      nk = 1;
    }
    View to = p.grad_bias;
    to.batch_offsets = nullptr;
    to.data += bias_offset(b) * int64_t{sizeof(T)};
    transpose_out<T>(
        sums, kBlock, nullptr, nq, nk,
        Rows(to, 0, p.bias_size[1] == 1 ? 0 : h, all_rows ? 0 : i0, all_keys ? 0 : j0));
  }
};

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
