// Rows of tensors of any stride and type, read and written in the accumulation type T (float for
// 16-bit and float tensors, double for double ones): single numbers, and pieces of a vector.
#pragma once

#include "kernels/cpu/half.h"

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

// Calls f<N>() with the type N of the numbers, where vectors of T are loaded from and stored to it.
// Returns whether they are.
template <class T, class F>
AE_INLINE bool with_number(ScalarType type, F&& f) {
  if constexpr (sizeof(T) == 8) {
    if (type != ScalarType::kFloat64) return false;
    f.template operator()<double>();
  } else if (type == ScalarType::kFloat32) {
    f.template operator()<float>();
  } else if (type == ScalarType::kBFloat16) {
    f.template operator()<BFloat16>();
  } else if (type == ScalarType::kFloat16) {
    f.template operator()<Float16>();
  } else {
    return false;
  }
  return true;
}

// Up to one vector of elements, `stride` elements apart, zeros behind `count`.
template <class T>
AE_INLINE Vec<T> load_piece(const char* p, ScalarType type, int64_t stride, int64_t count) {
  constexpr int W = kLanes<T>;
  if (stride == 1 && count >= W) {
    Vec<T> x{};
    const auto whole = [&]<class N>() { x = load_numbers(reinterpret_cast<const N*>(p)); };
    if (with_number<T>(type, whole)) return x;
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
    const auto whole = [&]<class N>() { store_numbers(reinterpret_cast<N*>(p), x); };
    if (with_number<T>(type, whole)) return;
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

// What rounding took from x when it was stored: nothing where it is not finite.
template <class V>
AE_INLINE V left_by_rounding(V x, V stored) {
  x -= stored;
  return select(equal(x - x, V{}), x, V{});
}

// Stores x at (i, j) and, into `rest`, what rounding took from it.
template <class T>
AE_INLINE void store_result(const Rows& out, const Rows* rest, int64_t i, int64_t j, int64_t count,
                            Vec<T> x) {
  store_piece<T>(out.at(i, j), out.type, out.column_stride, count, x);
  if (rest == nullptr) return;
  x = left_by_rounding(x, load_piece<T>(out.at(i, j), out.type, out.column_stride, count));
  store_piece<T>(rest->at(i, j), rest->type, rest->column_stride, count, x);
}

// Read in place by the products: the accumulation type with adjacent columns.
template <class T>
AE_INLINE bool readable_in_place(const View& view) {
  return view.stride[3] == 1 &&
         view.type == (sizeof(T) == 8 ? ScalarType::kFloat64 : ScalarType::kFloat32);
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
