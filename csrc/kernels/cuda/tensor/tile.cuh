// Tiles of 16-bit rows in shared memory: their layout, how cp.async fills them and how ldmatrix
// reads them as operands of m16n8k16. Used by all tensor-core kernels.
//
// A row of kSize numbers is kSize / 8 chunks of 16 bytes. Chunks are stored permuted within their
// row, so that the eight rows that one phase of ldmatrix reads at one column, and the chunks that
// neighbouring threads write, fall into different banks:
//   rows of a multiple of 128 bytes   chunk ^ (row & 7)
//   rows of 64 or 192 bytes           chunk ^ (row >> 1 & 3): two rows share 128 bytes there
#pragma once

#include <cmath>
#include <type_traits>

#include "kernels/cuda/ptx.cuh"

namespace attention_ext::kernels::cuda::tensor {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

// Bits of a 16-bit number; the type travels as a template argument.
using Bits = uint16_t;

template <int kSize>
AE_DEVICE int swizzled(int row, int chunk) {
  return kSize % 64 == 0 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
}

// Rows of one head in global memory, columns adjacent, every row 16-byte aligned.
struct GlobalRows {
  const Bits* data;
  int64_t stride;  // elements between rows

  AE_DEVICE int64_t offset(int row) const { return row * stride; }
};

AE_DEVICE GlobalRows rows_of(const View& view, int64_t b, int64_t h, int64_t row) {
  return {view.at<Bits>(b, h, row, 0), view.stride[2]};
}

// Starts the copies of rows [0, rows) x columns [0, size) into a tile of kRows x kSize, zeros
// around them: a product may meet what lies there. All threads of the block take part; size % 8 ==
// 0. A thread steps down the rows by a fixed number; few copies are unrolled, since the addresses
// of all of them would be kept in registers through the loop over tiles.
template <int kRows, int kSize, int kUnrolled = 4, class Rows>
AE_DEVICE void copy_tile(Bits* tile, const Rows& from, int64_t rows, int size) {
  constexpr int kChunks = kSize / 8, kCopies = kRows * kChunks / kThreads;
  static_assert(kRows * kChunks % kThreads == 0);
#pragma unroll kUnrolled
  for (int n = 0; n < kCopies; ++n) {
    const int index = n * kThreads + static_cast<int>(threadIdx.x);
    const int row = index / kChunks, chunk = index % kChunks;
    const bool take = row < rows && chunk * 8 < size;
    const Bits* const source = from.data + (take ? from.offset(row) + chunk * 8 : 0);
    ptx::copy_async(tile + row * kSize + swizzled<kSize>(row, chunk) * 8, source, take);
  }
}

// Byte offset, from the first row of 16, of the chunk 2 k + high of row `row` in 0..15: what
// depends on k is an exclusive or with a constant and the addition of one, so that few addresses
// are alive.
template <int kSize>
AE_DEVICE int lane_offset(int row, int high, int k) {
  constexpr int kGroup = kSize % 64 == 0 ? 8 : 4;  // chunks permuted among themselves
  const int start = row * kSize * 2 + (swizzled<kSize>(row, high) << 4);
  return (start ^ (2 * k % kGroup << 4)) + 2 * k / kGroup * kGroup * 16;
}
template <int kSize>
AE_DEVICE const Bits* lane_address(const Bits* tile, int first, int row, int high, int k) {
  return reinterpret_cast<const Bits*>(reinterpret_cast<const char*>(tile) + first * kSize * 2 +
                                       lane_offset<kSize>(row, high, k));
}

// Operand A (16 rows from `row` on, 16 columns from 16 k on) of a tile's rows; row % 16 == 0.
template <int kSize>
AE_DEVICE void load_a(uint32_t (&a)[4], const Bits* tile, int row, int k) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  ptx::load_matrices(a, lane_address<kSize>(tile, row, lane & 15, lane >> 4, k));
}

// Operand B of a product over columns (scores): 16 rows from `row` on become 16 output columns.
// b[0], b[1] belong to the first eight, b[2], b[3] to the others.
template <int kSize>
AE_DEVICE void load_b(uint32_t (&b)[4], const Bits* tile, int row, int k) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int r = (lane & 7) + (lane >> 4 << 3);
  ptx::load_matrices(b, lane_address<kSize>(tile, row, r, lane >> 3 & 1, k));
}

// Operand B of a product over rows (values): 16 rows from `row` on are summed over, 16 columns from
// 16 n on are output columns.
template <int kSize>
AE_DEVICE void load_b_transposed(uint32_t (&b)[4], const Bits* tile, int row, int n) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  ptx::load_matrices_transposed(b, lane_address<kSize>(tile, row, lane & 15, lane >> 4, n));
}

// Fragments of a float32 tile, 16 * kSlices rows a warp: element c of block n of slice m lies in
//   row    16 m + lane / 4 + 8 (c / 2)        column  8 n + 2 (lane % 4) + c % 2
template <int kSlices, int kColumns>
using Fragments = float[kSlices][kColumns / 8][4];

AE_DEVICE int fragment_row(int m, int c) {
  return 16 * m + ((static_cast<int>(threadIdx.x) & 31) >> 2) + 8 * (c >> 1);
}
AE_DEVICE int fragment_column(int n, int c) {
  return 8 * n + 2 * (static_cast<int>(threadIdx.x) & 3) + (c & 1);
}

template <int kSlices, int kColumns>
AE_DEVICE void clear(Fragments<kSlices, kColumns>& x) {
#pragma unroll
  for (int m = 0; m < kSlices; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[m][n][c] = 0.0f;
    }
  }
}

// Sum and maximum over the four lanes that share a row.
AE_DEVICE float quad_max(float x) {
  x = std::fmax(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return std::fmax(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
AE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The left operand of a product over columns: rows of this warp, read from shared memory at every
// use, or once.
template <int kSize, int kSlices>
struct SharedLeft {
  const Bits* tile;
  int row;
  AE_DEVICE void get(uint32_t (&to)[4], int m, int k) const {
    load_a<kSize>(to, tile, row + 16 * m, k);
  }
};
template <int kSize, int kSlices>
struct RegisterLeft {
  uint32_t a[kSlices][kSize / 16][4];

  AE_DEVICE void load(const Bits* tile, int row) {
#pragma unroll
    for (int m = 0; m < kSlices; ++m) {
#pragma unroll
      for (int k = 0; k < kSize / 16; ++k) load_a<kSize>(a[m][k], tile, row + 16 * m, k);
    }
  }
  AE_DEVICE void get(uint32_t (&to)[4], int m, int k) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) to[q] = a[m][k][q];
  }
};

// scores = left times right^T, over kSize columns.
template <ScalarType kType, int kSize, int kSlices, int kColumns, class Left>
AE_DEVICE void multiply_columns(Fragments<kSlices, kColumns>& scores, const Left& left,
                                const Bits* right) {
  clear<kSlices, kColumns>(scores);
#pragma unroll
  for (int k = 0; k < kSize / 16; ++k) {
    uint32_t a[kSlices][4];
#pragma unroll
    for (int m = 0; m < kSlices; ++m) left.get(a[m], m, k);
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t b[4];
      load_b<kSize>(b, right, 16 * n, k);
#pragma unroll
      for (int m = 0; m < kSlices; ++m) {
        ptx::multiply<kType>(scores[m][2 * n], a[m], b[0], b[1]);
        ptx::multiply<kType>(scores[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// sums += left times right, over the rows of `right`: `left` is a float32 tile of this warp,
// rounded to 16 bits on the way. The accumulator layout of one product is the operand layout of the
// next. Columns [first, first + kColumns) of right.
template <ScalarType kType, int kSize, int kSlices, int kInner, int kColumns>
AE_DEVICE void multiply_rows(Fragments<kSlices, kColumns>& sums,
                             const Fragments<kSlices, kInner>& left, const Bits* right, int first) {
#pragma unroll
  for (int k = 0; k < kInner / 16; ++k) {
    uint32_t a[kSlices][4];
#pragma unroll
    for (int m = 0; m < kSlices; ++m) {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float* const from = &left[m][2 * k + (q >> 1)][2 * (q & 1)];
        a[m][q] = ptx::pack<kType>(from[0], from[1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t b[4];
      load_b_transposed<kSize>(b, right, 16 * k, first / 16 + n);
#pragma unroll
      for (int m = 0; m < kSlices; ++m) {
        ptx::multiply<kType>(sums[m][2 * n], a[m], b[0], b[1]);
        ptx::multiply<kType>(sums[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

}  // namespace attention_ext::kernels::cuda::tensor
