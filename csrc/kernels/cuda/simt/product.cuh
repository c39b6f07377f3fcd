// The two kinds of product of a tile, for rows of any type and stride:
//   multiply     C[row][key] = sum over e of left[row][e] * right[key][e]     (Q K^T, dO V^T)
//   accumulate   C[row][column] += sum over keys of pairs[row][key] * factor[key][column]  (P V, dS
//   K)
//             or C[key][column] += sum over rows of pairs[row][key] * factor[row][column] (P^T dO
//             ...)
// Every product is an explicit fma in a fixed order, so that scores are rebuilt with the very bits
// they had (the files are compiled with -fmad=false).
//
// Counted for float (no device has run it yet): multiply reads 8 four-wide words of shared memory
// for 64 fma of a thread, 12 cycles of the shared-memory pipe beside 16 of the arithmetic ones.
#pragma once

#include "kernels/cuda/simt/tile.cuh"

namespace attention_ext::kernels::cuda::simt_kernels {

// `count` rows of a tensor, starting at the one that `data` points at.
template <class T>
struct Rows {
  const T* data;
  int64_t row_stride, column_stride;
  int count;
  AE_DEVICE Rows(const View& view, int64_t b, int64_t h, int64_t i, int rows)
      : data(view.at<const T>(b, h, i, 0)),
        row_stride(view.stride[2]),
        column_stride(view.stride[3]),
        count(rows) {}
  AE_DEVICE Accumulation<T> at(int row, int64_t column) const {
    return widen(data[row * row_stride + column * column_stride]);
  }
};

// kDepth columns from e0 on into shared memory; zeros behind the last row and column.
template <class T, class A>
AE_DEVICE void load_operand(const Rows<T>& rows, int64_t e0, int64_t depth,
                            A (&to)[kTile][kDepth<A> + kPad<A>]) {
  // A thread keeps its column and steps through the rows.
  constexpr int kStep = kThreads / kDepth<A>;
  const int e = static_cast<int>(threadIdx.x) % kDepth<A>;
  const bool inside = e0 + e < depth;
  int row = static_cast<int>(threadIdx.x) / kDepth<A>;
  const T* from = rows.data + row * rows.row_stride + (e0 + e) * rows.column_stride;
#pragma unroll 2
  for (int k = 0; k < kTile / kStep; ++k) {
    to[row][e] = inside && row < rows.count ? widen(*from) : A{0};
    from += kStep * rows.row_stride;
    row += kStep;
  }
}

// Every thread of the block calls it. Starts with a barrier, also when depth is 0.
template <class T, class A>
AE_DEVICE void multiply(const Rows<T>& left, const Rows<T>& right, int64_t depth, Shared<A>& shared,
                        A (&c)[kPer][kPer]) {
  const Lane lane;
  auto& operands = shared.operands;
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
#pragma unroll
    for (int n = 0; n < kPer; ++n) c[r][n] = A{0};
  }
  __syncthreads();
  for (int64_t e0 = 0; e0 < depth; e0 += kDepth<A>) {
    if (e0 > 0) __syncthreads();
    load_operand(left, e0, depth, operands.left);
    load_operand(right, e0, depth, operands.right);
    __syncthreads();
    const int count = static_cast<int>(smaller(kDepth<A>, depth - e0));
#pragma unroll 1
    for (int e = 0; e < count; e += 4) {  // what lies between count and a multiple of 4 is zero
      Four<A> a[kPer];
#pragma unroll
      for (int r = 0; r < kPer; ++r) a[r] = load_four(&operands.left[lane.row(r)][e]);
#pragma unroll
      for (int n = 0; n < kPer; ++n) {
        const Four<A> b = load_four(&operands.right[lane.key(n)][e]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int r = 0; r < kPer; ++r) c[r][n] = std::fma(a[r].x[k], b.x[k], c[r][n]);
        }
      }
    }
  }
}

// Whose rows the result has: the tile's query rows, or its keys.
enum class Along { kRows, kKeys };

// This thread's pairs into shared memory. A barrier must come before they are read.
template <class A>
AE_DEVICE void store_pairs(const A (&values)[kPer][kPer], Shared<A>& shared) {
  const Lane lane;
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
#pragma unroll
    for (int n = 0; n < kPer; ++n) shared.pairs[lane.row(r)][lane.key(n)] = values[r][n];
  }
}

template <class A>
AE_DEVICE void store_visible(uint32_t visible, Shared<A>& shared) {
  const Lane lane;
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
#pragma unroll
    for (int n = 0; n < kPer; ++n) {
      shared.visible[lane.row(r)][lane.key(n)] = (visible & pair_bit(r, n)) != 0;
    }
  }
}

// kFactorRows rows from k0 on, `used` groups of 16 columns from `column` on. Returns whether this
// thread met a number that is not finite.
template <class T, class A>
AE_DEVICE bool load_factor(const Rows<T>& rows, int k0, int64_t column, int64_t size, int used,
                           Shared<A>& shared) {
  static_assert(kFactorRows == 2 * kSide);
  const Lane lane;
  const bool first = k0 + lane.y < rows.count, second = k0 + lane.y + kSide < rows.count;
  const T* from =
      rows.data + (k0 + lane.y) * rows.row_stride + (column + lane.x) * rows.column_stride;
  bool odd = false;
#pragma unroll 2
  for (int n = 0; n < used; ++n) {
    const bool inside = column + lane.key(n) < size;
    const A x = inside && first ? widen(*from) : A{0};
    const A y = inside && second ? widen(from[kSide * rows.row_stride]) : A{0};
    odd = odd || !is_finite(x) || !is_finite(y);
    shared.factor[lane.y][lane.key(n)] = x;
    shared.factor[lane.y + kSide][lane.key(n)] = y;
    from += kSide * rows.column_stride;
  }
  return odd;
}

// c += the sum over `count` rows of the factor in shared memory; `used` groups of columns matter.
template <Along kAlong, class A, int kCount>
AE_DEVICE void add_products(int k0, int count, int used, const Shared<A>& shared,
                            A (&c)[kPer][kCount]) {
  const Lane lane;
#pragma unroll 1
  for (int k = 0; k < count; k += 4) {  // pairs and factor are zero behind the last row
    Four<A> a[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      a[r] = kAlong == Along::kRows ? load_four(&shared.pairs[lane.row(r)][k0 + k])
                                    : load_four(&shared.pairs[k0 + k + r][lane.row(0)]);
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        if (n >= used) break;
        const A b = shared.factor[k + t][lane.key(n)];
#pragma unroll
        for (int r = 0; r < kPer; ++r) {
          c[r][n] = std::fma(kAlong == Along::kRows ? a[r].x[t] : a[t].x[r], b, c[r][n]);
        }
      }
    }
  }
}

// The same where the factor has numbers that are not finite: pairs that are not visible are left
// out, since 0 times infinity would show.
template <Along kAlong, class A, int kCount>
AE_DEVICE void add_visible_products(int k0, int count, int used, const Shared<A>& shared,
                                    A (&c)[kPer][kCount]) {
  const Lane lane;
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
#pragma unroll
    for (int r = 0; r < kPer; ++r) {
      const int row = kAlong == Along::kRows ? lane.row(r) : k0 + k;
      const int key = kAlong == Along::kRows ? k0 + k : lane.row(r);
      if (shared.visible[row][key] == 0) continue;
      const A a = shared.pairs[row][key];
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        if (n < used) c[r][n] = std::fma(a, shared.factor[k][lane.key(n)], c[r][n]);
      }
    }
  }
}

// c += the product of shared.pairs (just stored, or stored and synchronised) with `columns` columns
// of `factor` from `column` on. Every thread of the block calls it; a barrier must come between it
// and the next change of shared.pairs.
template <Along kAlong, class T, class A, int kCount>
AE_DEVICE void accumulate(const Rows<T>& factor, int64_t column, int64_t size, uint32_t visible,
                          Shared<A>& shared, A (&c)[kPer][kCount]) {
  const int used = static_cast<int>(smaller(kCount, blocks_of(size - column, kSide)));
  for (int k0 = 0; k0 < factor.count; k0 += kFactorRows) {
    __syncthreads();
    const bool odd = load_factor(factor, k0, column, size, used, shared);
    const int count = factor.count - k0 < kFactorRows ? factor.count - k0 : kFactorRows;
    if (__syncthreads_or(odd) == 0) {
      add_products<kAlong>(k0, count, used, shared, c);
    } else {
      store_visible(visible, shared);
      __syncthreads();
      add_visible_products<kAlong>(k0, count, used, shared, c);
    }
  }
}

template <class A, int kCount>
AE_DEVICE void clear(A (&c)[kPer][kCount]) {
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) c[r][n] = A{0};
  }
}

// Rows of an accumulated product to a tensor, times `factor`; NaN if the block stands for nothing.
template <class T, class A, int kCount>
AE_DEVICE void write_columns(const View& to, int64_t b, int64_t h, int64_t i, int count,
                             int64_t column, int64_t size, A factor, bool bad,
                             const A (&c)[kPer][kCount]) {
  const Lane lane;
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
    if (lane.row(r) >= count) break;
    T* const row = to.at<T>(b, h, i + lane.row(r), 0);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int64_t e = column + lane.key(n);
      if (e < size) row[e * to.stride[3]] = narrow<T>(bad ? kNan<A> : c[r][n] * factor);
    }
  }
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
