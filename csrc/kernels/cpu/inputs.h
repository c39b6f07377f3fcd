// The two products of inputs, S^T = K Q^T and dP^T = V dO^T. Their packed side (Q, dO) lies in
// columns [..][kBlock], the other (K, V) is read row by row. Inputs are numbers of the accumulation
// type, and the factor of the product is folded into the packed side; or, in the tier that
// multiplies bfloat16, the pairs that the tensors hold, and the factor multiplies the result.
//
// Products of a computed factor (P, dS) stay in float there too: rounded to 16 bits they would be
// less accurate than dense attention, and as sums of two bfloat16 numbers cost what float costs.
#pragma once

#include "kernels/cpu/tile.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

template <class In>
struct Input {
  AE_INLINE static int64_t depth(int64_t size) { return size; }
  // Columns of a copy.
  AE_INLINE static int64_t padded(int64_t size) { return round_up(size, kLanes<In>); }
  AE_INLINE static bool in_place(const View& view, int64_t) { return readable_in_place<In>(view); }
  AE_INLINE static void pack(const Rows& rows, int64_t n, int64_t size, In factor, In* out) {
    transpose_in<In>(rows, n, size, factor, out, kBlock);
  }
  AE_INLINE static Operand<In> operand(const Rows& rows, bool in_place, int64_t n, int64_t size,
                                       In* copy) {
    return operand_of<In>(rows, in_place, n, size, copy);
  }
};

#if defined(__AVX512BF16__)
template <>
struct Input<BFloat16Pair> {
  static constexpr int W = kLanes<BFloat16Pair>;
  typedef Vec<BFloat16Pair> Pairs;

  // An odd last number pairs with a zero.
  AE_INLINE static int64_t depth(int64_t size) { return (size + 1) / 2; }
  AE_INLINE static int64_t padded(int64_t size) { return round_up(depth(size), W); }
  AE_INLINE static bool in_place(const View& view, int64_t size) {
    return view.stride[3] == 1 && size % 2 == 0 && view.stride[2] % 2 == 0;
  }

  // A vector of pairs of row i from column j on, zeros behind the last column.
  AE_INLINE static Pairs load_pairs(const Rows& rows, int64_t i, int64_t j, int64_t size) {
    const char* const at = rows.at(i, j);
    const int64_t count = smaller(size - j, 2 * W);
    if (rows.column_stride == 1 && count == 2 * W) {
      return load(reinterpret_cast<const BFloat16Pair*>(at));
    }
    BFloat16Pair pairs[W] = {};
    if (rows.column_stride == 1) {
      __builtin_memcpy(pairs, at, 2 * count);
    } else {
      for (int64_t k = 0; k < count; ++k) {
        __builtin_memcpy(reinterpret_cast<char*>(pairs) + 2 * k, rows.at(i, j + k), 2);
      }
    }
    return load(pairs);
  }

  static void pack(const Rows& rows, int64_t n, int64_t size, float, BFloat16Pair* out) {
    for (int64_t i0 = 0; i0 < n; i0 += W) {
      for (int64_t k0 = 0; k0 < depth(size); k0 += W) {
        Pairs square[W];
        for (int i = 0; i < W; ++i) {
          square[i] = i0 + i < n ? load_pairs(rows, i0 + i, 2 * k0, size) : Pairs{};
        }
        transpose_square<uint32_t>(square);
        const int64_t last = depth(size) - k0;
        AE_UNROLL for (int k = 0; k < W; ++k) {
          if (k < last) store(out + (k0 + k) * kBlock + i0, square[k]);
        }
      }
    }
  }

  static Operand<BFloat16Pair> operand(const Rows& rows, bool in_place, int64_t n, int64_t size,
                                       BFloat16Pair* copy) {
    if (in_place) {
      return {reinterpret_cast<const BFloat16Pair*>(rows.data), rows.row_stride / 2};
    }
    const int64_t stride = padded(size);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t k = 0; k < depth(size); k += W) {
        store(copy + i * stride + k, load_pairs(rows, i, 2 * k, size));
      }
    }
    return {copy, stride};
  }
};
#endif

// A tile's rows of K or V, as products read them.
template <class U, class T>
AE_INLINE Operand<U> tile_operand(const AttentionParams& p, const View& view, bool in_place,
                                  const Problem& problem, int64_t h, const Tile<T>& tile,
                                  int64_t size, U* copy) {
  const Rows rows(view, problem.batch, h / p.group(), problem.k_begin + tile.j0, 0);
  return Input<U>::operand(rows, in_place, tile.nk, size, copy);
}

// C = factor * A B for `rows` rows of A and NV vectors of B's columns.
template <class T, int NV, class In>
AE_INLINE void multiply_inputs(const In* a, int64_t lda, const In* b, T* c, int64_t rows,
                               int64_t size, [[maybe_unused]] T factor, Ahead* ahead = nullptr) {
  constexpr auto multiply = multiply_panel<T, NV, Start::kZero, Read::kRows, In>;
  const int64_t depth = Input<In>::depth(size);
  if constexpr (std::is_same_v<T, In>) {
    multiply(a, lda, b, kBlock, c, kBlock, rows, depth, nullptr, Band{}, ahead);
  } else {
    const Vec<T> scale = broadcast(factor);
    multiply(a, lda, b, kBlock, c, kBlock, rows, depth, &scale, Band{}, ahead);
  }
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
