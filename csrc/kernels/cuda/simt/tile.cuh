// One tile of the SIMT kernels: 64 query rows by 64 keys, 256 threads in a square of 16 by 16.
// Thread (x, y) owns the pairs of rows 4 y + r and keys x + 16 n, r and n below 4: a row belongs to
// 16 neighbouring lanes of one warp. Element types, shared memory, where a block stands, and which
// of its pairs are visible. Shared by all passes.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/plan.h"
#include "kernels/cuda/simt/entries.h"
#include "kernels/half.h"
#include "kernels/mask.h"
#include "kernels/philox.h"

namespace attention_ext::kernels::cuda::simt_kernels {

constexpr int kTile = static_cast<int>(kSimtTile);
constexpr int kSide = 16;
constexpr int kPer = 4;
constexpr int kThreads = kSide * kSide;
constexpr uint32_t kWholeWarp = 0xffffffffu;

// ---- Element types -------------------------------------------------------------------------

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class T>
struct AccumulationOf {
  using type = float;
};
template <>
struct AccumulationOf<double> {
  using type = double;
};
template <class T>
using Accumulation = typename AccumulationOf<T>::type;

AE_DEVICE double widen(double x) { return x; }
AE_DEVICE float widen(float x) { return x; }
AE_DEVICE float widen(BFloat16 x) { return bfloat16_to_float(x.bits); }
AE_DEVICE float widen(Float16 x) { return float16_to_float(x.bits); }

template <class T>
AE_DEVICE T narrow(Accumulation<T> x) {
  if constexpr (sizeof(T) > 2) {
    return x;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return {bfloat16_from_float(x)};
  } else {
    return {float16_from_float(x)};
  }
}

// A number of a type known at run time: biases may be wider than the query.
template <class A>
AE_DEVICE A load_any(const View& view, int64_t offset) {
  switch (view.type) {
    case ScalarType::kFloat64:
      return static_cast<A>(reinterpret_cast<const double*>(view.data)[offset]);
    case ScalarType::kBFloat16:
      return widen(reinterpret_cast<const BFloat16*>(view.data)[offset]);
    case ScalarType::kFloat16:
      return widen(reinterpret_cast<const Float16*>(view.data)[offset]);
    default:
      return static_cast<A>(reinterpret_cast<const float*>(view.data)[offset]);
  }
}

template <class A>
constexpr A kInfinity = std::numeric_limits<A>::infinity();
template <class A>
constexpr A kLargest = std::numeric_limits<A>::max();
template <class A>
constexpr A kNan = std::numeric_limits<A>::quiet_NaN();

template <class A>
AE_DEVICE bool is_finite(A x) {
  return x - x == A{0};
}

// Blocks on one multiprocessor: two leave 128 registers to a thread, enough for float's kernels
// without a spill (tests/test_cuda_launch.py); double's need more.
template <class A>
constexpr int kBlocks = sizeof(A) == 4 ? 2 : 1;

// ---- Shared memory -------------------------------------------------------------------------

// Elements of a product's depth that lie in shared memory at a time, columns of an accumulated
// product that one block owns, and rows of its factor at a time. Rows are padded so that they stay
// 16-byte aligned and that neighbouring rows start in different banks.
template <class A>
constexpr int kDepth = 128 / sizeof(A);
template <class A>
constexpr int kColumns = 512 / sizeof(A);
template <class A>
constexpr int kKeyColumns = kColumns<A> / 2;  // of dK and of dV, which one block owns together
template <class A>
constexpr int kColumnsPer = kColumns<A> / kSide;
constexpr int kFactorRows = 32;
template <class A>
constexpr int kPad = 16 / sizeof(A);

template <class A>
struct Shared {
  struct Operands {
    A left[kTile][kDepth<A> + kPad<A>];
    A right[kTile][kDepth<A> + kPad<A>];
  };
  union {
    Operands operands;                           // of multiply()
    A factor[kFactorRows][kColumns<A> + kSide];  // of accumulate()
    A slopes[kTile][kTile];                      // of softcap, between the two
  };
  A pairs[kTile][kTile + kPad<A>];  // P or dS, [row][key]
  uint8_t visible[kTile][kTile];    // written only when a factor is not finite
  uint8_t keep[kTile][16];          // dropout, a bit for each key of a group
  A sums[kTile][kSide];             // of rows over a walk, each lane's own part
  Problem problem;                  // the block's; here, it costs no registers
  unsigned long long visited;       // tiles with a visible pair, counted by thread 0
};

static_assert(sizeof(Shared<float>) == shared_bytes(4));
static_assert(sizeof(Shared<double>) == shared_bytes(8));

// Four neighbours in shared memory, read at once.
template <class A>
struct alignas(16) Four {
  A x[4];
};
template <class A>
AE_DEVICE Four<A> load_four(const A* from) {
  return *reinterpret_cast<const Four<A>*>(from);
}

// ---- Where a block and a thread stand ----------------------------------------------------------

struct Lane {
  int x, y;
  AE_DEVICE Lane()
      : x(static_cast<int>(threadIdx.x) % kSide), y(static_cast<int>(threadIdx.x) / kSide) {}
  AE_DEVICE int row(int r) const { return y * kPer + r; }
  AE_DEVICE int key(int n) const { return x + kSide * n; }
};

// A tile of one problem, along queries or along keys. `bad`: cu_seqlens are no borders; the block
// then stands for 64 rows of the whole batch, sees no keys, and writes NaN.
struct Slot {
  Problem problem;
  int64_t tile;
  bool bad;
  bool empty;  // one of the slots that no sequence needs
};

// Every thread of a block calls it (it synchronises when packed).
AE_DEVICE Slot find_slot(const AttentionParams& p, int64_t slot, bool along_keys) {
  Slot s;
  s.bad = s.empty = false;
  if (!p.packed()) {
    const int64_t tiles = blocks_of(along_keys ? p.k_length : p.q_length, kTile);
    s.problem = p.problem(slot / tiles);
    s.tile = slot % tiles;
    return s;
  }
  bool wrong = false;
  if (threadIdx.x == 0) {
    wrong = p.cu_seqlens_q[0] != 0 || p.cu_seqlens_k[0] != 0 ||
            p.cu_seqlens_q[p.problems] != p.q_length || p.cu_seqlens_k[p.problems] != p.k_length;
  }
  for (int64_t n = threadIdx.x; n < p.problems; n += blockDim.x) {
    wrong = wrong || p.cu_seqlens_q[n] > p.cu_seqlens_q[n + 1] ||
            p.cu_seqlens_k[n] > p.cu_seqlens_k[n + 1];
  }
  s.bad = __syncthreads_or(wrong) != 0;
  if (s.bad) {
    s.problem = {0, 0, 0, p.q_length, 0, p.k_length, 0};
    s.tile = slot;
  } else {
    const int64_t* const borders = along_keys ? p.cu_seqlens_k : p.cu_seqlens_q;
    int64_t low = 0, high = p.problems;  // the last sequence whose first slot is not behind ours
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (packed_slot(borders, middle, kTile) <= slot ? low : high) = middle;
    }
    if (p.problems == 0) {
      s.empty = true;
      return s;
    }
    s.problem = p.problem(low);
    s.tile = slot - packed_slot(borders, low, kTile);
  }
  s.empty = s.tile * kTile >= (along_keys ? s.problem.k_length : s.problem.q_length);
  return s;
}

// Every thread of the block calls it.
template <class A>
AE_DEVICE const Problem& share_problem(const Problem& problem, Shared<A>& shared) {
  if (threadIdx.x == 0) {
    shared.problem = problem;
    shared.visited = 0;
  }
  __syncthreads();
  return shared.problem;
}

template <class A>
AE_DEVICE void report_visited(const AttentionParams& p, const Shared<A>& shared) {
  if (p.visited == nullptr || threadIdx.x != 0 || shared.visited == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(p.visited), shared.visited);
}

// The tile at query row i0 and key j0 of a problem.
struct TileAt {
  int64_t i0, j0;
  int rows, keys;  // how many are real
  AE_DEVICE TileAt(const Problem& problem, int64_t first_row, int64_t first_key)
      : i0(first_row),
        j0(first_key),
        rows(static_cast<int>(smaller(kTile, problem.q_length - first_row))),
        keys(static_cast<int>(smaller(kTile, problem.k_length - first_key))) {}
};

// ---- Visibility ----------------------------------------------------------------------------

AE_DEVICE constexpr uint32_t pair_bit(int r, int n) { return 1u << (r * kPer + n); }

template <class A>
AE_DEVICE A float_key_mask(const AttentionParams& p, const Problem& problem, int64_t j) {
  return *p.key_mask.at<const A>(problem.batch, 0, 0, problem.k_begin + j);
}

template <class A>
AE_DEVICE bool key_is_masked(const AttentionParams& p, const Problem& problem, int64_t j) {
  if (p.key_mask_is_bool) {
    return *p.key_mask.at<const uint8_t>(problem.batch, 0, 0, problem.k_begin + j) == 0;
  }
  return float_key_mask<A>(p, problem, j) == -kInfinity<A>;
}

// Bit pair_bit(r, n): this thread's pair is real and visible. Cheap reasons first; memory is read
// only for pairs that the cheaper ones show.
template <class A>
AE_DEVICE uint32_t visible_pairs(const AttentionParams& p, const Problem& problem, int64_t h,
                                 const TileAt& at) {
  const Lane lane;
  // Key y is inside the window of row x iff low <= y - x <= high; further than a tile is far
  // enough.
  const WindowBounds window = window_bounds(p, problem, at.i0, at.j0);
  const int low = static_cast<int>(larger(-kTile, smaller(kTile, window.low)));
  const int high = static_cast<int>(larger(-kTile, smaller(kTile, window.high)));
  uint32_t bits = 0;
#pragma unroll 1
  for (int n = 0; n < kPer; ++n) {
    const int key = lane.key(n);
    if (key >= at.keys) continue;
    if (p.key_mask.defined() && key_is_masked<A>(p, problem, at.j0 + key)) continue;
#pragma unroll
    for (int r = 0; r < kPer; ++r) {
      const int row = lane.row(r);
      if (row < at.rows && key - row >= low && key - row <= high) bits |= pair_bit(r, n);
    }
  }
  if (bits == 0 || (!p.attn_mask.defined() && !p.attn_bias.defined())) return bits;
#pragma unroll 1
  for (int r = 0; r < kPer; ++r) {
#pragma unroll
    for (int n = 0; n < kPer; ++n) {
      if ((bits & pair_bit(r, n)) == 0) continue;
      const int64_t i = at.i0 + lane.row(r), j = at.j0 + lane.key(n);
      bool seen = true;
      if (p.attn_mask.defined()) seen = *p.attn_mask.at<const uint8_t>(problem.batch, h, i, j) != 0;
      if (seen && p.attn_bias.defined()) {
        seen =
            load_any<A>(p.attn_bias, p.attn_bias.offset(problem.batch, h, i, j)) != -kInfinity<A>;
      }
      if (!seen) bits &= ~pair_bit(r, n);
    }
  }
  return bits;
}

// ---- Dropout -------------------------------------------------------------------------------

// The keep bits of a tile into shared memory. A barrier must come before they are read.
template <class A>
AE_DEVICE void fill_keep(const AttentionParams& p, const Problem& problem, int64_t h,
                         const TileAt& at, Shared<A>& shared) {
  const DropoutParams d = with_state(p.dropout, p.heads);
  const int64_t first_group = (d.first_key + at.j0) >> 3;
  const int row = static_cast<int>(threadIdx.x) / 4;
  // Nine groups only if the tile does not start with one.
  const int groups = ((d.first_key + at.j0) & 7) == 0 ? kTile / 8 : kTile / 8 + 1;
#pragma unroll 1
  for (int group = static_cast<int>(threadIdx.x) % 4; group < groups; group += 4) {
    shared.keep[row][group] =
        static_cast<uint8_t>(keep_group(d, problem.index, h, at.i0 + row, first_group + group));
  }
}

// Where a tile's first key lies inside its first group of eight.
AE_DEVICE int keep_shift(const AttentionParams& p, const TileAt& at) {
  const int64_t first = p.dropout.state != nullptr ? p.dropout.state[5] : p.dropout.first_key;
  return static_cast<int>((first + at.j0) & 7);
}
template <class A>
AE_DEVICE bool is_kept(const Shared<A>& shared, int shift, int row, int key) {
  const int k = key + shift;
  return (shared.keep[row][k >> 3] >> (k & 7) & 1) != 0;
}

}  // namespace attention_ext::kernels::cuda::simt_kernels
