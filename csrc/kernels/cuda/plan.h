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

// True if no dimension of the bias broadcasts.
AE_INLINE bool bias_is_full(const BackwardParams& p) {
  return BiasPlan::of_one_batch(p) && p.bias_size[1] == p.heads && p.bias_size[2] == p.q_length &&
         p.bias_size[3] == p.k_length;
}

}  // namespace attention_ext::kernels::cuda
