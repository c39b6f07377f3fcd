// Windows (causal included) as bounds on positions, shared by both devices. Dense masks, key masks
// and -inf biases are classified tile by tile on top of these bounds (cpu/tile.h).
#pragma once

#include "kernels/params.h"

namespace attention_ext::kernels {

// A half-open range of keys.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// Keys of [0, k_length) that at least one of the query rows [first, last] may see through the
// window.
AE_INLINE KeyRange window_hull(const AttentionParams& p, const Problem& problem, int64_t first,
                               int64_t last) {
  int64_t begin = first + problem.query_offset - p.window_left;
  int64_t end = last + problem.query_offset + p.window_right + 1;
  begin = begin < 0 ? 0 : begin;
  end = end > problem.k_length ? problem.k_length : end;
  return {begin, end < begin ? begin : end};
}

// The rows of [0, q_length) that may see at least one of the keys [first, last] through the window.
struct RowRange {
  int64_t begin;
  int64_t end;
};
AE_INLINE RowRange window_rows(const AttentionParams& p, const Problem& problem, int64_t first,
                               int64_t last) {
  int64_t begin = first - problem.query_offset - p.window_right;
  int64_t end = last - problem.query_offset + p.window_left + 1;
  begin = begin < 0 ? 0 : begin;
  end = end > problem.q_length ? problem.q_length : end;
  return {begin, end < begin ? begin : end};
}

// The bounds of one tile in its own coordinates: key j0 + y is inside the window of row i0 + x iff
// x + low <= y <= x + high.
struct WindowBounds {
  int64_t low;
  int64_t high;
};

AE_INLINE WindowBounds window_bounds(const AttentionParams& p, const Problem& problem, int64_t i0,
                                     int64_t j0) {
  const int64_t diagonal = i0 + problem.query_offset - j0;
  return {diagonal - p.window_left, diagonal + p.window_right};
}

}  // namespace attention_ext::kernels
