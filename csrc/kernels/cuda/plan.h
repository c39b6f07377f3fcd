// The arithmetic of launches: how sequences are cut into tiles, and how many blocks a pass wants.
// Pure functions of the params, for the host and the device; everything in 64 bits.
#pragma once

#include "kernels/params.h"

namespace attention_ext::kernels::cuda {

AE_INLINE int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }
AE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
AE_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Tile slots over all problems. With packed sequences the host knows the total only: sequence n
// takes the slots from cu[n] / tile + n on, which leaves room for its ceil(length / tile) tiles,
// and some slots stay empty. A block finds its sequence by bisection; no table is needed.
AE_INLINE int64_t tile_slots(bool packed, int64_t problems, int64_t length, int64_t tile) {
  return packed ? length / tile + larger(problems, 1) : problems * blocks_of(length, tile);
}
AE_INLINE int64_t packed_slot(const int64_t* cu_seqlens, int64_t n, int64_t tile) {
  return cu_seqlens[n] / tile + n;
}

// Queries and keys of a tile of the SIMT kernels.
constexpr int64_t kSimtTile = 64;

// How the bias gradient is cut. A block owns one tile of the bias and adds up what the dimensions
// it broadcasts over contribute; where tiles are few, several blocks share that sum, each with a
// range of the contributions, and their parts are added in order.
struct BiasPlan {
  int64_t row_tiles, key_tiles;    // over L and S
  int64_t owned_rows, owned_keys;  // tiles of the bias itself: 1 where it broadcasts
  int64_t owned;                   // all of them
  int64_t terms;                   // (batch, head, row tile, key tile) summed into each
  int64_t splits;

  AE_INLINE BiasPlan(const BackwardParams& p, int64_t tile) {
    row_tiles = blocks_of(p.q_length, tile);
    key_tiles = blocks_of(p.k_length, tile);
    owned_rows = p.bias_size[2] == 1 ? 1 : row_tiles;
    owned_keys = p.bias_size[3] == 1 ? 1 : key_tiles;
    owned = p.bias_size[0] * p.bias_size[1] * owned_rows * owned_keys;
    terms = batch_terms(p) * (p.bias_size[1] == 1 ? p.heads : 1) *
            (p.bias_size[2] == 1 ? row_tiles : 1) * (p.bias_size[3] == 1 ? key_tiles : 1);
    // The number does not depend on the device, so that equal calls give equal bits everywhere.
    constexpr int64_t kEnoughBlocks = 256;
    splits = owned > 0 ? larger(1, smaller(terms, blocks_of(kEnoughBlocks, owned))) : 1;
  }
  // A bias of every batch element by itself has one term; else all elements are looked at.
  AE_INLINE static bool of_one_batch(const BackwardParams& p) {
    return p.bias_size[0] == p.problems && p.grad_bias.batch_offsets == nullptr;
  }
  AE_INLINE static int64_t batch_terms(const BackwardParams& p) {
    return of_one_batch(p) ? 1 : p.problems;
  }
};

// How the keys of few queries are shared out (tensor/split.cuh): the rows of a group's heads make
// tiles of 64, and several blocks share the keys that a tile sees, evenly. A function of L, S, the
// window and the group alone: equal bits on every device, and for a sample alone or in a batch.
constexpr int64_t kSplitTile = 64;

struct SplitPlan {
  int64_t rows;       // of the heads of a group
  int64_t row_tiles;  // of one (batch, key head)
  int64_t splits;     // parts of the keys; 1: not split

  AE_INLINE explicit SplitPlan(const AttentionParams& p)
      : rows(p.group() * p.q_length), row_tiles(blocks_of(rows, kSplitTile)), splits(1) {
    constexpr int64_t kFewRows = 2 * kSplitTile;  // more make enough blocks of their own
    if (p.packed() || rows == 0 || rows > kFewRows) return;
    int64_t keys = p.k_length;  // at most so many are seen by a tile
    if (p.window_left < kUnbounded && p.window_right < kUnbounded) {
      keys = smaller(keys, larger(0, p.q_length + p.window_left + p.window_right));
    }
    // A part's sums are written and read once, 8 bytes a number, beside the keys and values read,
    // 4 bytes a number: 256 keys for each 16 rows keep that below an eighth.
    const int64_t least = 256 * blocks_of(smaller(rows, kSplitTile), 16);
    // Blocks that share one (batch, key head), on devices of up to 148 multiprocessors.
    constexpr int64_t kEnoughBlocks = 256;
    splits = larger(1, smaller(keys / least, kEnoughBlocks / row_tiles));
  }
  AE_INLINE int64_t blocks(const AttentionParams& p) const {
    return p.problems * p.kv_heads * row_tiles * splits;
  }
  // Bytes of workspace: for every part and row its sums in float32, and 16 of statistics.
  AE_INLINE int64_t workspace(const AttentionParams& p) const {
    return splits == 1 ? 0 : splits * p.problems * p.heads * p.q_length * (4 * p.v_size + 16);
  }
};

// True if no dimension of the bias broadcasts.
AE_INLINE bool bias_is_full(const BackwardParams& p) {
  return BiasPlan::of_one_batch(p) && p.bias_size[1] == p.heads && p.bias_size[2] == p.q_length &&
         p.bias_size[3] == p.k_length;
}

}  // namespace attention_ext::kernels::cuda
