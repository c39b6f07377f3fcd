// What a kernel is told: raw pointers, strides in elements, sizes and scalars, shared by CPU and
// CUDA kernels. Filled by the glue (csrc/common/make_params.cpp); includes nothing of torch.
// Letters: B batch (or packed sequences), H query heads, Hkv key/value heads, L query rows, S keys,
// E query/key size, Ev value size; i is a query row, j a key. All sizes, strides and positions are
// int64.
#pragma once

#include <atomic>
#include <cstdint>

// Members of shared headers are forced inline: one of them kept out of line in an object compiled
// for AVX-512 could be the copy that the linker keeps for every tier.
// nvcc compiles them for the host and for the device.
#if defined(__CUDACC__)
#define AE_INLINE __host__ __device__ __forceinline__
#else
#define AE_INLINE __attribute__((always_inline)) inline
#endif

namespace attention_ext::kernels {

enum class ScalarType : int32_t { kFloat64, kFloat32, kBFloat16, kFloat16, kBool };

// "No bound" for windows; small enough that sums of three positions cannot overflow.
constexpr int64_t kUnbounded = int64_t{1} << 60;

// A strided view (batch, head, row, column). A broadcast dimension has stride 0. Where several
// leading batch dimensions do not fold into one stride, `batch_offsets` holds the offset of every
// batch index.
struct View {
  char* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};  // elements
  const int64_t* batch_offsets = nullptr;
  ScalarType type = ScalarType::kFloat32;

  AE_INLINE bool defined() const { return data != nullptr; }
  AE_INLINE int64_t offset(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t base = batch_offsets != nullptr ? batch_offsets[b] : b * stride[0];
    return base + h * stride[1] + i * stride[2] + j * stride[3];
  }
  template <class T>
  AE_INLINE T* at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return reinterpret_cast<T*>(data) + offset(b, h, i, j);
  }
};

// One batch element, or one sequence of a packed batch, as every kernel sees it.
struct Problem {
  int64_t index;    // n: batch element or sequence; the b of dropout, offsets and masks
  int64_t batch;    // batch index of the tensors (0 when packed)
  int64_t q_begin;  // first row of this problem inside the tensors
  int64_t q_length;
  int64_t k_begin;
  int64_t k_length;
  int64_t query_offset;  // key position of query row 0
};

struct DropoutParams {
  uint32_t threshold = 0;  // keep iff lane >= threshold; 0 = no dropout, 65536 = drop everything
  double rescale = 1.0;    // 65536 / (65536 - threshold)
  uint64_t seed = 0;
  uint64_t offset = 0;
  int64_t heads_total = 0;
  int64_t first_head = 0;
  int64_t first_row = 0;
  int64_t first_key = 0;
  const int64_t* state = nullptr;  // CUDA: rng_state on the device, read there (philox.h)
};

struct AttentionParams {
  ScalarType type = ScalarType::kFloat32;  // of query, key, value, output and their gradients

  int64_t problems = 0;  // B, or the number of packed sequences
  int64_t heads = 0;     // H
  int64_t kv_heads = 0;  // Hkv
  int64_t q_length = 0;  // L (packed: the longest sequence; on CUDA the total)
  int64_t k_length = 0;  // S (likewise)
  int64_t qk_size = 0;   // E
  int64_t v_size = 0;    // Ev

  View query, key, value;
  View attn_mask;  // bool
  View attn_bias;  // any floating type
  View key_mask;   // bool, or the accumulation type; uses batch and column strides only
  bool key_mask_is_bool = false;
  const void* sinks = nullptr;             // (H), accumulation type
  const void* alibi_slopes = nullptr;      // accumulation type, (batch, head) strides below
  int64_t alibi_stride[2] = {0, 0};        // (problem, head)
  const int64_t* query_offsets = nullptr;  // (problems), else query_offset for all
  int64_t query_offset = 0;
  const int64_t* cu_seqlens_q = nullptr;  // (problems + 1) when packed
  const int64_t* cu_seqlens_k = nullptr;
  const int64_t* q_block_starts =
      nullptr;  // packed: (problems + 1), blocks of queries before each sequence
  int64_t window_left = kUnbounded;
  int64_t window_right = kUnbounded;
  double scale = 1.0;
  double softcap = 0.0;
  DropoutParams dropout;

  View output;               // forward: written; backward: read for delta
  View output_residual;      // 16-bit types: what rounding took from output; backward: optional
  View logsumexp, residual;  // accumulation type; (batch, head, row), the column stride is unused
  std::atomic<int64_t>* visited = nullptr;  // counts (query block, key block) pairs computed

  AE_INLINE int64_t group() const { return kv_heads > 0 ? heads / kv_heads : 0; }
  AE_INLINE bool packed() const { return cu_seqlens_q != nullptr; }
  AE_INLINE bool windowed() const { return window_left < kUnbounded || window_right < kUnbounded; }

  AE_INLINE Problem problem(int64_t n) const {
    Problem p;
    p.index = n;
    // Further away than any key is far enough; beyond kUnbounded an open window would seem closed.
    constexpr int64_t kFar = kUnbounded / 2;
    const int64_t offset = query_offsets != nullptr ? query_offsets[n] : query_offset;
    p.query_offset = offset < -kFar ? -kFar : offset > kFar ? kFar : offset;
    if (packed()) {
      p.batch = 0;
      p.q_begin = cu_seqlens_q[n];
      p.q_length = cu_seqlens_q[n + 1] - p.q_begin;
      p.k_begin = cu_seqlens_k[n];
      p.k_length = cu_seqlens_k[n + 1] - p.k_begin;
    } else {
      p.batch = n;
      p.q_begin = 0;
      p.q_length = q_length;
      p.k_begin = 0;
      p.k_length = k_length;
    }
    return p;
  }
};

// Inputs and outputs of the backward pass. grad_output feeds attention_backward; grad_weights (B, H
// or 1, L, S) feeds attention_weights_backward, where there is no value. Undefined views are not
// wanted.
struct BackwardParams : AttentionParams {
  View grad_output;
  View grad_logsumexp;              // accumulation type, optional
  View grad_weights;                // instead of grad_output and value
  double grad_weights_scale = 1.0;  // 1/H for averaged weights
  // Sums over keys of P dP, less grad_logsumexp, in the accumulation type: new_delta of a pass of
  // its own, then delta of the others. On the CPU for weights alone.
  View new_delta, delta;
  View grad_query, grad_key, grad_value;  // type
  View grad_bias;                         // accumulation type, the bias's own broadcast shape
  int64_t bias_size[4] = {0, 0, 0, 0};    // (problems or 1, H or 1, L or 1, S or 1)
  void* grad_sinks = nullptr;             // (H), accumulation type
};

// Rebuilds weights: (B, H, L, S), or (B, 1, L, S) averaged over the heads.
struct WeightsParams : AttentionParams {
  View weights;
  bool average = false;
};

// Hands out work items in order, to any number of threads. `failed` stops those who wait for
// another's item.
struct WorkQueue {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  int64_t count = 0;
  int64_t takers = 1;

  // Calls f(item) until all are taken. Neighbours read the same or adjacent rows, so a thread takes
  // several, the fewer the fewer are left: short heads one by one made each thread's prefetcher
  // fetch the other's rows.
  template <class F>
  void for_each(F&& f) {
    for (int64_t first = next.load(); first < count;) {
      const int64_t share = (count - first) / (4 * takers);
      const int64_t end = first + (share > 1 ? share : 1);
      if (!next.compare_exchange_weak(first, end)) continue;
      for (; first < end; ++first) f(first);
      first = next.load();
    }
  }
  // The same, one by one: for items that wait for those before them.
  template <class F>
  void for_each_in_turn(F&& f) {
    for (int64_t item; (item = next.fetch_add(1)) < count;) f(item);
  }
};

}  // namespace attention_ext::kernels
