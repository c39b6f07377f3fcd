// Between tensors of any stride and type and the scratch of a kernel: transposing and natural
// copies of blocks of rows, in the accumulation type T (float for 16-bit and float tensors, double
// for double ones).
#pragma once

#include "kernels/cpu/ahead.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/plan.h"
#include "kernels/cpu/simd.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

AE_INLINE int64_t element_size(ScalarType type) {
  switch (type) {
    case ScalarType::kFloat64:
      return 8;
    case ScalarType::kFloat32:
      return 4;
    case ScalarType::kBool:
      return 1;
    default:
      return 2;
  }
}

template <class T>
AE_INLINE T load_scalar(const char* p, ScalarType type) {
  switch (type) {
    case ScalarType::kFloat64: {
      double x;
      __builtin_memcpy(&x, p, 8);
      return static_cast<T>(x);
    }
    case ScalarType::kFloat32: {
      float x;
      __builtin_memcpy(&x, p, 4);
      return static_cast<T>(x);
    }
    default: {
      uint16_t x;
      __builtin_memcpy(&x, p, 2);
      return static_cast<T>(type == ScalarType::kBFloat16 ? bfloat16_to_float(x)
                                                          : float16_to_float(x));
    }
  }
}

template <class T>
AE_INLINE void store_scalar(char* p, ScalarType type, T x) {
  switch (type) {
    case ScalarType::kFloat64: {
      const double y = static_cast<double>(x);
      __builtin_memcpy(p, &y, 8);
      return;
    }
    case ScalarType::kFloat32: {
      const float y = static_cast<float>(x);
      __builtin_memcpy(p, &y, 4);
      return;
    }
    default: {
      const float y = static_cast<float>(x);
      const uint16_t bits =
          type == ScalarType::kBFloat16 ? bfloat16_from_float(y) : float16_from_float(y);
      __builtin_memcpy(p, &bits, 2);
    }
  }
}

// Up to one vector of elements, `stride` elements apart, zeros behind `count`.
template <class T>
AE_INLINE Vec<T> load_piece(const char* p, ScalarType type, int64_t stride, int64_t count) {
  constexpr int W = kLanes<T>;
  if (stride == 1 && count >= W) {
    if constexpr (sizeof(T) == 8) {
      if (type == ScalarType::kFloat64) return load(reinterpret_cast<const double*>(p));
    } else {
      if (type == ScalarType::kFloat32) return load(reinterpret_cast<const float*>(p));
      if (type == ScalarType::kBFloat16) return load_bfloat16(reinterpret_cast<const uint16_t*>(p));
      if (type == ScalarType::kFloat16) return load_float16(reinterpret_cast<const uint16_t*>(p));
    }
  }
  T buffer[W] = {};
  const int64_t step = stride * element_size(type);
  const int64_t n = count < W ? count : W;
  for (int64_t i = 0; i < n; ++i) buffer[i] = load_scalar<T>(p + i * step, type);
  return load(buffer);
}

template <class T>
AE_INLINE void store_piece(char* p, ScalarType type, int64_t stride, int64_t count, Vec<T> x) {
  constexpr int W = kLanes<T>;
  if (stride == 1 && count >= W) {
    if constexpr (sizeof(T) == 8) {
      if (type == ScalarType::kFloat64) return store(reinterpret_cast<double*>(p), x);
    } else {
      if (type == ScalarType::kFloat32) return store(reinterpret_cast<float*>(p), x);
      if (type == ScalarType::kBFloat16) return store_bfloat16(reinterpret_cast<uint16_t*>(p), x);
      if (type == ScalarType::kFloat16) return store_float16(reinterpret_cast<uint16_t*>(p), x);
    }
  }
  T buffer[W];
  store(buffer, x);
  const int64_t step = stride * element_size(type);
  const int64_t n = count < W ? count : W;
  for (int64_t i = 0; i < n; ++i) store_scalar(p + i * step, type, buffer[i]);
}

// A block of rows inside a view: `data` at its first row and column.
struct Rows {
  char* data;
  ScalarType type;
  int64_t row_stride;  // elements
  int64_t column_stride;

  AE_INLINE Rows(const View& view, int64_t b, int64_t h, int64_t i, int64_t j)
      : data(view.data + view.offset(b, h, i, j) * element_size(view.type)),
        type(view.type),
        row_stride(view.stride[2]),
        column_stride(view.stride[3]) {}
  AE_INLINE char* at(int64_t i, int64_t j) const {
    return data + (i * row_stride + j * column_stride) * element_size(type);
  }
};

// Stores x at (i, j) and, into `rest`, what rounding took from it: nothing where it is not finite.
template <class T>
AE_INLINE void store_result(const Rows& out, const Rows* rest, int64_t i, int64_t j, int64_t count,
                            Vec<T> x) {
  store_piece<T>(out.at(i, j), out.type, out.column_stride, count, x);
  if (rest == nullptr) return;
  x -= load_piece<T>(out.at(i, j), out.type, out.column_stride, count);
  x = select(equal(x - x, Vec<T>{}), x, Vec<T>{});
  store_piece<T>(rest->at(i, j), rest->type, rest->column_stride, count, x);
}

// Read in place by the products: the accumulation type with adjacent columns.
template <class T>
AE_INLINE bool readable_in_place(const View& view) {
  return view.stride[3] == 1 &&
         view.type == (sizeof(T) == 8 ? ScalarType::kFloat64 : ScalarType::kFloat32);
}

// Squares of W x W elements of an n x columns block. Inside it, and where `direct` rows have the
// accumulation type and adjacent columns, a square needs no decisions: whole(i0, j0); else part.
template <class T>
AE_INLINE bool direct_rows(const Rows& rows) {
  return rows.column_stride == 1 &&
         rows.type == (sizeof(T) == 8 ? ScalarType::kFloat64 : ScalarType::kFloat32);
}
template <class T, class Whole, class Part>
AE_INLINE void for_squares(bool direct, int64_t n, int64_t columns, Whole&& whole, Part&& part) {
  constexpr int W = kLanes<T>;
  for (int64_t i0 = 0; i0 < n; i0 += W) {
    for (int64_t j0 = 0; j0 < columns; j0 += W) {
      if (direct && i0 + W <= n && j0 + W <= columns) {
        whole(i0, j0);
      } else {
        part(i0, j0);
      }
    }
  }
}
template <class T>
AE_INLINE T* whole_rows(const Rows& rows, int64_t i0, int64_t j0) {
  return reinterpret_cast<T*>(rows.data) + i0 * rows.row_stride + j0;
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
  const auto whole = [&](int64_t i0, int64_t j0) {
    Vec<T> square[W];
    load_transposed<T>(whole_rows<T>(rows, i0, j0), rows.row_stride, square);
    T* to = out + j0 * ldo + i0;
    AE_UNROLL for (int j = 0; j < W; ++j, to += ldo) store(to, f(square[j]));
  };
  const auto part = [&](int64_t i0, int64_t j0) {
    Vec<T> square[W];
    load_square<T>(rows, i0, n, j0, columns, square);
    transpose_square<T>(square);
    AE_UNROLL for (int j = 0; j < W; ++j) {
      if (j < columns - j0) store(out + (j0 + j) * ldo + i0, f(square[j]));
    }
  };
  for_squares<T>(direct_rows<T>(rows), n, columns, whole, part);
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
  const auto whole = [&](int64_t i0, int64_t j0) {
    Vec<T> square[W];
    load_transposed<T>(in + j0 * ldi + i0, ldi, square);
    T* to = whole_rows<T>(out, i0, j0);
    const int64_t stride = out.row_stride;
    AE_UNROLL for (int i = 0; i < W; ++i, to += stride) store(to, square[i] * factor(i0 + i));
  };
  const auto part = [&](int64_t i0, int64_t j0) {
    Vec<T> square[W];
    load_columns<T>(in + j0 * ldi + i0, ldi, columns - j0, square);
    AE_UNROLL for (int i = 0; i < W; ++i) square[i] *= factor(i0 + i);
    if (rest == nullptr) return store_square<T>(out, i0, n, j0, columns, square);
    for (int i = 0; i < W && i0 + i < n; ++i) {
      store_result<T>(out, rest, i0 + i, j0, columns - j0, square[i]);
    }
  };
  for_squares<T>(direct_rows<T>(out) && rest == nullptr, n, columns, whole, part);
}

// out rows[i][j] += in[j][i].
template <class T>
void transpose_add(const T* in, int64_t ldi, int64_t n, int64_t columns, const Rows& out) {
  constexpr int W = kLanes<T>;
  const auto whole = [&](int64_t i0, int64_t j0) {
    Vec<T> square[W];
    load_transposed<T>(in + j0 * ldi + i0, ldi, square);
    T* to = whole_rows<T>(out, i0, j0);
    const int64_t stride = out.row_stride;
    AE_UNROLL for (int i = 0; i < W; ++i, to += stride) store(to, load(to) + square[i]);
  };
  const auto part = [&](int64_t i0, int64_t j0) {
    Vec<T> square[W], sums[W];
    load_columns<T>(in + j0 * ldi + i0, ldi, columns - j0, square);
    load_square<T>(out, i0, n, j0, columns, sums);
    AE_UNROLL for (int i = 0; i < W; ++i) sums[i] += square[i];
    store_square<T>(out, i0, n, j0, columns, sums);
  };
  for_squares<T>(direct_rows<T>(out), n, columns, whole, part);
}

// out[i][j] = rows[i][j], columns padded with zeros up to ldo (a multiple of the vector).
template <class T>
void copy_in(const Rows& rows, int64_t n, int64_t columns, T* out, int64_t ldo) {
  constexpr int W = kLanes<T>;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < ldo; j += W) {
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
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < columns; j += W) {
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
