// Which tiles a block visits. Windows are arithmetic; where a bool mask, a key mask or a bias may
// hide pairs, the block reads them a chunk of tiles ahead and classifies every tile exactly: hidden
// tiles are skipped before anything of K and V is loaded, fully visible ones need no mask again.
#pragma once

#include "kernels/cuda/tensor/scores.cuh"

namespace attention_ext::kernels::cuda::tensor {

enum class TileKind : uint8_t { kHidden, kMixed, kVisible };

constexpr int kChunk = 16;  // tiles classified together: their bias is still in L2 when it is used

// Whether rows or keys are missing from a tile. Rows missing from a group's stand for the last one.
template <int kRows, int kKeys, class Rows>
AE_DEVICE bool tile_has_tail(int rows, int keys) {
  return (!Rows::kGrouped && rows < kRows) || keys < kKeys;
}

// One warp: the kind of a kRows x kKeys tile, by looking at every pair until both sorts were seen.
template <int kRows, int kKeys, class Rows>
AE_DEVICE TileKind classify_by_warp(const AttentionParams& p, const Head& head, const Place& at,
                                    const Rows& tile) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const Dense d = dense_of(p, head.problem, head.h, at.i0, at.j0);
  const int queries = at.nq < kRows ? at.nq : kRows, keys = at.nk < kKeys ? at.nk : kKeys;
  const bool window = queries - 1 + at.low > 0 || at.high < keys - 1;
  // Rows that are alike need one look.
  auto repeats = [&](const View& view) {
    return !view.defined() || (view.stride[2] == 0 && (!Rows::kGrouped || view.stride[1] == 0));
  };
  const bool alike = !window && repeats(p.attn_mask) && repeats(p.attn_bias);
  bool some = false, hidden = tile_has_tail<kRows, kKeys, Rows>(queries, keys);
  int rows = queries;
  if constexpr (Rows::kGrouped) rows = tile.count - tile.first;
  rows = rows < kRows ? rows : kRows;
  for (int x = 0; x < (alike ? 1 : rows); ++x) {
    for (int y = lane; y < keys; y += 32) {
      const bool on = at.inside(tile.query(x), y) && unmasked(p, d, x, y, tile);
      some = some || on;
      hidden = hidden || !on;
    }
    if ((x & 7) == 7 && ptx::any(some) && ptx::any(hidden)) break;
  }
  if (!ptx::any(some)) return TileKind::kHidden;
  return ptx::any(hidden) ? TileKind::kMixed : TileKind::kVisible;
}

template <int kRows, int kKeys, class Rows>
AE_DEVICE TileKind classify_by_window(const Place& at) {
  const int rows = at.nq < kRows ? at.nq : kRows, keys = at.nk < kKeys ? at.nk : kKeys;
  if (rows <= 0 || keys <= 0 || at.low > keys - 1 || rows - 1 + at.high < 0) {
    return TileKind::kHidden;
  }
  const bool whole = !tile_has_tail<kRows, kKeys, Rows>(rows, keys) && rows - 1 + at.low <= 0 &&
                     at.high >= keys - 1;
  return whole ? TileKind::kVisible : TileKind::kMixed;
}

// Walks over the visible tiles [begin, end) of one head, in order: key tiles of one query tile
// (kOverKeys) or query tiles of one key tile. All threads of the block call next() together.
template <bool kOverKeys, int kRows, int kKeys, class Rows = HeadRows>
struct Walk {
  const AttentionParams& p;
  const Head* head;
  int64_t fixed;         // i0 or j0 of the tile that stays
  int tile, end, chunk;  // 32 bits count tiles of 64
  TileKind* kinds;       // [kChunk], shared
  TileKind kind;
  Rows layout;  // of the query rows

  static constexpr int kStep = kOverKeys ? kKeys : kRows;

  AE_DEVICE Walk(const AttentionParams& params, const Head& of_head, int64_t fixed_at,
                 TileKind* shared_kinds, const Rows& rows = {})
      : p(params),
        head(&of_head),
        fixed(fixed_at),
        kinds(shared_kinds),
        kind(TileKind::kHidden),
        layout(rows) {
    restart(of_head);
  }

  // The same tile's walk for another head.
  AE_DEVICE void restart(const Head& of_head) {
    head = &of_head;
    constexpr int kFixed = kOverKeys ? kRows : kKeys;
    const int64_t length = kOverKeys ? head->problem.q_length : head->problem.k_length;
    const int64_t last = (fixed + kFixed < length ? fixed + kFixed : length) - 1;
    int64_t first, behind;
    if constexpr (kOverKeys) {
      const KeyRange hull = window_hull(p, head->problem, fixed, last);
      first = hull.begin;
      behind = hull.end;
    } else {
      const RowRange rows = window_rows(p, head->problem, fixed, last);
      first = rows.begin;
      behind = rows.end;
    }
    tile = static_cast<int>(first / kStep) - 1;
    end = first < behind ? static_cast<int>((behind + kStep - 1) / kStep) : tile;
    chunk = tile - kChunk;
  }

  // Part n of `parts`: the tiles are shared out evenly.
  AE_DEVICE void keep_part(int n, int parts) {
    const int before = tile, count = end - tile - 1;
    if (count <= 0) return;
    tile = before + static_cast<int>(int64_t{count} * n / parts);
    end = before + 1 + static_cast<int>(int64_t{count} * (n + 1) / parts);
    chunk = tile - kChunk;
  }

  AE_DEVICE int64_t position() const { return int64_t{tile} * kStep; }
  AE_DEVICE Place place(int64_t of_tile) const {
    return kOverKeys ? place_of(p, *head, fixed, of_tile * kStep)
                     : place_of(p, *head, of_tile * kStep, fixed);
  }

  // Moves to the next visible tile; false behind the last one.
  AE_DEVICE bool next() {
    for (++tile; tile < end; ++tile) {
      if (has_dense_mask(p)) {
        if (tile >= chunk + kChunk) classify_chunk();
        kind = kinds[tile - chunk];
      } else {
        kind = classify_by_window<kRows, kKeys, Rows>(place(tile));
      }
      if (kind != TileKind::kHidden) return true;
    }
    return false;
  }

 private:
  AE_DEVICE void classify_chunk() {
    chunk = tile;
    __syncthreads();  // nobody reads the kinds of the last chunk any more
    const int warp = static_cast<int>(threadIdx.x) >> 5;
#pragma unroll 1
    for (int n = warp; n < kChunk && chunk + n < end; n += kWarps) {
      const Place at = place(chunk + n);
      TileKind found = classify_by_window<kRows, kKeys, Rows>(at);
      if (found != TileKind::kHidden) found = classify_by_warp<kRows, kKeys>(p, *head, at, layout);
      if ((threadIdx.x & 31) == 0) kinds[n] = found;
    }
    __syncthreads();
  }
};

// The budget of a block. Registers: at most 255 a thread, so that two blocks of four warps fit the
// 65,536 of a multiprocessor (__launch_bounds__ says so to the compiler). Shared memory: two blocks
// within the 164 KiB of compute capability 8.0, each with its 1 KiB of the system, for head sizes
// up to 128; one within the 99 KiB that 8.6, 8.9 and 12.0 allow a block for the larger ones.
constexpr bool fits_budget(int size, int shared_memory) {
  return size <= 128 ? 2 * (shared_memory + 1024) <= 164 * 1024 : shared_memory <= 99 * 1024;
}

// What a block shares beside its tiles.
struct BlockState {
  Head head;
  TileKind kinds[kChunk];
};

}  // namespace attention_ext::kernels::cuda::tensor
