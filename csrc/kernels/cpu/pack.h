// Between rows of tensors and the scratch of a kernel: transposing and natural copies of blocks.
#pragma once

#include "kernels/cpu/ahead.h"
#include "kernels/cpu/plan.h"
#include "kernels/cpu/rows.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// Calls f<N>() if the columns of the rows are adjacent, so that whole vectors of their numbers, of
// type N, need no decisions. Returns whether they are.
template <class T, class F>
AE_INLINE bool with_whole(const Rows& rows, F&& f) {
  return rows.column_stride == 1 && with_number<T>(rows.type, f);
}
template <class N>
AE_INLINE N* whole_rows(const Rows& rows, int64_t i0, int64_t j0) {
  return reinterpret_cast<N*>(rows.data) + i0 * rows.row_stride + j0;
}

// Squares of W x W elements of an n x columns block: whole(i0, j0) inside it, else part(i0, j0).
template <class T, class Whole, class Part>
AE_INLINE void for_squares(int64_t n, int64_t columns, Whole&& whole, Part&& part) {
  constexpr int W = kLanes<T>;
  for (int64_t i0 = 0; i0 < n; i0 += W) {
    for (int64_t j0 = 0; j0 < columns; j0 += W) {
      if (i0 + W <= n && j0 + W <= columns) {
        whole(i0, j0);
      } else {
        part(i0, j0);
      }
    }
  }
}
template <class T>
AE_INLINE void load_square(const Rows& rows, int64_t i0, int64_t n, int64_t j0, int64_t columns,
                           Vec<T> (&square)[kLanes<T>]) {
  for (int i = 0; i < kLanes<T>; ++i) {
    square[i] =
        i0 + i < n ? load_piece<T>(rows.at(i0 + i, j0), rows.type, rows.column_stride, columns - j0)
                   : Vec<T>{};
  }
}
template <class T>
AE_INLINE void store_square(const Rows& rows, int64_t i0, int64_t n, int64_t j0, int64_t columns,
                            const Vec<T> (&square)[kLanes<T>]) {
  for (int i = 0; i < kLanes<T> && i0 + i < n; ++i) {
    store_piece<T>(rows.at(i0 + i, j0), rows.type, rows.column_stride, columns - j0, square[i]);
  }
}
// The transpose of a square of scratch [column][ld], where whole vectors of rows may be read and
// only columns end.
template <class T>
AE_INLINE void load_columns(const T* in, int64_t ldi, int64_t rest, Vec<T> (&square)[kLanes<T>]) {
  AE_UNROLL for (int j = 0; j < kLanes<T>; ++j) square[j] =
      j < rest ? load(in + j * ldi) : Vec<T>{};
  transpose_square<T>(square);
}

// The transpose of a square of numbers of a tensor, rows `stride` apart.
template <class T, class N>
AE_INLINE void load_numbers_transposed(const N* at, int64_t stride, Vec<T> (&square)[kLanes<T>]) {
  if constexpr (std::is_same_v<T, N>) {
    load_transposed<T>(at, stride, square);
  } else {
    AE_UNROLL for (int i = 0; i < kLanes<T>; ++i, at += stride) square[i] = load_numbers(at);
    transpose_square<T>(square);
  }
}

// Asks for a block of rows that is wanted a little later: short pieces of rows far apart, which the
// hardware does not foresee.
template <bool kWrite>
AE_INLINE void prefetch_rows(Ahead& ahead, const Rows& rows, int64_t n, int64_t columns) {
  if (rows.column_stride != 1) return;
  const int64_t size = element_size(rows.type);
  ahead.add(rows.data, rows.row_stride * size, n, columns * size, kWrite);
}

// out[j][i] = f(rows[i][j]) for i < n, j < columns; lanes n.. up to a whole vector are f(0).
template <class T, class F>
AE_INLINE void transpose_with(const Rows& rows, int64_t n, int64_t columns, T* out, int64_t ldo,
                              F&& f) {
  constexpr int W = kLanes<T>;
  const auto part = [&](int64_t i0, int64_t j0) {
    Vec<T> square[W];
    load_square<T>(rows, i0, n, j0, columns, square);
    transpose_square<T>(square);
    AE_UNROLL for (int j = 0; j < W; ++j) {
      if (j < columns - j0) store(out + (j0 + j) * ldo + i0, f(square[j]));
    }
  };
  const auto squares = [&]<class N>() {
    const auto whole = [&](int64_t i0, int64_t j0) {
      Vec<T> square[W];
      load_numbers_transposed<T>(whole_rows<N>(rows, i0, j0), rows.row_stride, square);
      T* to = out + j0 * ldo + i0;
      AE_UNROLL for (int j = 0; j < W; ++j, to += ldo) store(to, f(square[j]));
    };
    for_squares<T>(n, columns, whole, part);
  };
  if (!with_whole<T>(rows, squares)) for_squares<T>(n, columns, part, part);
}
template <class T>
void transpose_in(const Rows& rows, int64_t n, int64_t columns, T factor, T* out, int64_t ldo) {
  transpose_with<T>(rows, n, columns, out, ldo, [=](Vec<T> x) { return x * factor; });
}

// out rows = in[j][i] * scale[i] for i < n, j < columns; into `rest`, what rounding took from them.
template <class T>
void transpose_out(const T* in, int64_t ldi, const T* scale, int64_t n, int64_t columns,
                   const Rows& out, const Rows* rest = nullptr) {
  constexpr int W = kLanes<T>;
  const auto factor = [&](int64_t i) { return scale != nullptr ? scale[i] : T{1}; };
  const auto part = [&](int64_t i0, int64_t j0) {
    Vec<T> square[W];
    load_columns<T>(in + j0 * ldi + i0, ldi, columns - j0, square);
    AE_UNROLL for (int i = 0; i < W; ++i) square[i] *= factor(i0 + i);
    if (rest == nullptr) return store_square<T>(out, i0, n, j0, columns, square);
    for (int i = 0; i < W && i0 + i < n; ++i) {
      store_result<T>(out, rest, i0 + i, j0, columns - j0, square[i]);
    }
  };
  const auto squares = [&]<class N>() {
    const auto whole = [&](int64_t i0, int64_t j0) {
      Vec<T> square[W];
      load_transposed<T>(in + j0 * ldi + i0, ldi, square);
      N* to = whole_rows<N>(out, i0, j0);
      N* left = rest == nullptr ? nullptr : whole_rows<N>(*rest, i0, j0);
      const int64_t stride = out.row_stride, rest_stride = rest == nullptr ? 0 : rest->row_stride;
      AE_UNROLL for (int i = 0; i < W; ++i, to += stride, left += rest_stride) {
        const Vec<T> x = square[i] * factor(i0 + i);
        store_numbers(to, x);
        if (left != nullptr) store_numbers(left, left_by_rounding(x, load_numbers(to)));
      }
    };
    for_squares<T>(n, columns, whole, part);
  };
  const bool alike = rest == nullptr || (rest->type == out.type && rest->column_stride == 1);
  if (!alike || !with_whole<T>(out, squares)) for_squares<T>(n, columns, part, part);
}

// out rows[i][j] += in[j][i].
template <class T>
void transpose_add(const T* in, int64_t ldi, int64_t n, int64_t columns, const Rows& out) {
  constexpr int W = kLanes<T>;
  const auto part = [&](int64_t i0, int64_t j0) {
    Vec<T> square[W], sums[W];
    load_columns<T>(in + j0 * ldi + i0, ldi, columns - j0, square);
    load_square<T>(out, i0, n, j0, columns, sums);
    AE_UNROLL for (int i = 0; i < W; ++i) sums[i] += square[i];
    store_square<T>(out, i0, n, j0, columns, sums);
  };
  const auto squares = [&]<class N>() {
    const auto whole = [&](int64_t i0, int64_t j0) {
      Vec<T> square[W];
      load_transposed<T>(in + j0 * ldi + i0, ldi, square);
      N* to = whole_rows<N>(out, i0, j0);
      const int64_t stride = out.row_stride;
      AE_UNROLL for (int i = 0; i < W; ++i, to += stride) {
        store_numbers(to, load_numbers(to) + square[i]);
      }
    };
    for_squares<T>(n, columns, whole, part);
  };
  if (!with_whole<T>(out, squares)) for_squares<T>(n, columns, part, part);
}

// out[i][j] = rows[i][j], columns padded with zeros up to ldo (a multiple of the vector).
template <class T>
void copy_in(const Rows& rows, int64_t n, int64_t columns, T* out, int64_t ldo) {
  constexpr int W = kLanes<T>;
  int64_t done = 0;  // columns
  const auto whole = [&]<class N>() {
    done = columns / W * W;
    for (int64_t i = 0; i < n; ++i) {
      const N* const from = whole_rows<N>(rows, i, 0);
      for (int64_t j = 0; j < done; j += W) store(out + i * ldo + j, load_numbers(from + j));
    }
  };
  with_whole<T>(rows, whole);
  for (int64_t j = done; j < ldo; j += W) {
    for (int64_t i = 0; i < n; ++i) {
      store(out + i * ldo + j,
            j < columns ? load_piece<T>(rows.at(i, j), rows.type, rows.column_stride, columns - j)
                        : Vec<T>{});
    }
  }
}

// out rows[i][j] = factor * in[i][j]; into `rest`, what rounding took from them.
template <class T>
void copy_out(const T* in, int64_t ldi, int64_t n, int64_t columns, T factor, const Rows& out,
              const Rows* rest = nullptr) {
  constexpr int W = kLanes<T>;
  int64_t done = 0;  // columns
  const auto whole = [&]<class N>() {
    done = columns / W * W;
    for (int64_t i = 0; i < n; ++i) {
      N* const to = whole_rows<N>(out, i, 0);
      for (int64_t j = 0; j < done; j += W) store_numbers(to + j, load(in + i * ldi + j) * factor);
    }
  };
  if (rest == nullptr) with_whole<T>(out, whole);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = done; j < columns; j += W) {
      store_result<T>(out, rest, i, j, columns - j, load(in + i * ldi + j) * factor);
    }
  }
}

// Whether n rows of whole vectors hold finite numbers only: 0 x is 0 for those alone.
template <class T>
bool all_finite(const T* in, int64_t n, int64_t columns, int64_t stride) {
  constexpr int W = kLanes<T>;
  Vec<T> sum{};
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < columns; j += W) {
      sum = fma(load(in + i * stride + j), Vec<T>{}, sum);
    }
  }
  return sum_lanes<T>(sum) == T{0};
}

// Bump allocator over a kernel's scratch; with no memory it only measures.
struct Arena {
  char* memory;
  int64_t used = 0;

  template <class U>
  AE_INLINE U* take(int64_t count) {
    U* p = reinterpret_cast<U*>(memory + used);
    used += round_up(count * static_cast<int64_t>(sizeof(U)), 64);
    return p;
  }
};

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
