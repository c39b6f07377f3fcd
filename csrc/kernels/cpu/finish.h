// The end of a forward query block: sinks, logsumexp and its residual, normalised output; and the
// joining of partial results where the keys were split.
#pragma once

#include "kernels/cpu/forward.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// Row statistics of `part` into the tensors; part.sum becomes the factor that normalises the
// output.
//   logsumexp = fl(m + log l), residual = (m - logsumexp) + log l: exp((s - logsumexp) - residual)
//   is then exact also where logsumexp alone is not (rows of finfo.min, large scores).
// A row that saw no key is dead: output 0, logsumexp -inf (or the sink). One that saw only scores
// of -inf is NaN, as softmax is.
template <class T>
void finish_statistics(const AttentionParams& p, const Problem& problem, int64_t h, int64_t i0,
                       int64_t nq, const Partial<T>& part) {
  constexpr int W = kLanes<T>;
  const T nan = std::numeric_limits<T>::quiet_NaN();
  const T rescale = static_cast<T>(p.dropout.rescale);
  T* const lse_rows = p.logsumexp.at<T>(problem.batch, h, problem.q_begin + i0, 0);
  T* const residual_rows = p.residual.at<T>(problem.batch, h, problem.q_begin + i0, 0);
  const bool together = p.logsumexp.stride[2] == 1 && p.residual.stride[2] == 1;
  const T sink = p.sinks != nullptr ? static_cast<const T*>(p.sinks)[h] : -kInfinity<T>;
  for (int64_t x = 0; x < nq; x += W) {
    Vec<T> m = load(part.maximum + x), l = load(part.sum + x), weight = broadcast(T{1});
    if (p.sinks != nullptr) {
      const Vec<T> most = max(m, broadcast(sink));
      const Vec<T> base = select(equal(most, broadcast(-kInfinity<T>)), Vec<T>{}, most);
      weight = exp_bounded<T>(m - base);
      l = fma(l, weight, exp_bounded<T>(broadcast(sink) - base));
      m = most;
    }
    const Vec<T> log_sum = log_vector<T>(l);
    const Vec<T> lse = m + log_sum;
    const Vec<T> residual = (m - lse) + log_sum;
    const Vec<T> factor = weight * rescale / l;
    // Rows that saw a key and have a positive sum need no decisions.
    const Mask<T> usual =
        mask_from_bytes<T>(part.seen + x) & less(broadcast(-kInfinity<T>), m) & less(Vec<T>{}, l);
    if (together && x + W <= nq && !any<T>(static_cast<Mask<T>>(~usual))) {
      store(lse_rows + x, lse);
      store(residual_rows + x, residual);
      store(part.sum + x, factor);
      continue;
    }
    for (int64_t lane = 0; lane < W && x + lane < nq; ++lane) {
      const int64_t i = problem.q_begin + i0 + x + lane;
      T row_lse = lse[lane], row_residual = residual[lane], row_factor = factor[lane];
      if (part.seen[x + lane] ==
          0) {  // dead, decided from the mask: the sink alone, whatever it is
        row_lse = sink;
        row_residual = row_factor = T{0};
      } else if (m[lane] == -kInfinity<T>) {  // nothing finite seen, no sink
        row_lse = -kInfinity<T>;
        row_residual = row_factor = nan;
      } else if (!(l[lane] > T{0})) {  // NaN: log_vector knows positive numbers only
        row_lse = row_residual = row_factor = nan;
      }
      *p.logsumexp.at<T>(problem.batch, h, i, 0) = row_lse;
      *p.residual.at<T>(problem.batch, h, i, 0) = row_residual;
      part.sum[x + lane] = row_factor;
    }
  }
}

// Where the result of some rows goes: the output and, if it has 16 bits, what its rounding took.
struct OutputRows {
  Rows output, rest;
  bool keep_rest;

  AE_INLINE OutputRows(const AttentionParams& p, const Problem& problem, int64_t h, int64_t i)
      : output(p.output, problem.batch, h, problem.q_begin + i, 0),
        rest(p.output_residual, problem.batch, h, problem.q_begin + i, 0),
        keep_rest(p.output_residual.defined()) {}
  AE_INLINE const Rows* rest_or_null() const { return keep_rest ? &rest : nullptr; }
};

// A query block whose keys were not split.
template <class T>
void finish(const AttentionParams& p, const Problem& problem, int64_t h, int64_t i0, int64_t nq,
            const Partial<T>& part) {
  finish_statistics(p, problem, h, i0, nq, part);
  const OutputRows to(p, problem, h, i0);
  transpose_out<T>(part.output, kBlock, part.sum, nq, p.v_size, to.output, to.rest_or_null());
}

// Layout of one split's result in the buffer between the two phases.
template <class T>
struct SplitResult {
  T* output;  // (L, Ev)
  T* maximum;
  T* sum;
  T* seen;

  AE_INLINE SplitResult(void* buffer, const AttentionParams& p, int64_t head_of_all,
                        int64_t split) {
    output = static_cast<T*>(buffer) +
             (head_of_all * forward_splits(p) + split) * forward_partial_elements(p);
    maximum = output + p.q_length * p.v_size;
    sum = maximum + p.q_length;
    seen = sum + p.q_length;
  }
};

template <class T>
AE_INLINE void save_statistics(int64_t nq, const Partial<T>& part, const SplitResult<T>& to) {
  for (int64_t x = 0; x < nq; ++x) {
    to.maximum[x] = part.maximum[x];
    to.sum[x] = part.sum[x];
    to.seen[x] = part.seen[x];
  }
}

template <class T>
void save_split(const AttentionParams& p, int64_t nq, const Partial<T>& part,
                const SplitResult<T>& to) {
  View rows;
  rows.data = reinterpret_cast<char*>(to.output);
  rows.type = sizeof(T) == 8 ? ScalarType::kFloat64 : ScalarType::kFloat32;
  rows.stride[2] = p.v_size;
  rows.stride[3] = 1;
  transpose_out<T>(part.output, kBlock, nullptr, nq, p.v_size, Rows(rows, 0, 0, 0, 0));
  save_statistics(nq, part, to);
}

// Second phase of a split head: its results joined in the order of the keys. `part` lends its row
// statistics.
template <class T>
void join_splits(const AttentionParams& p, const Problem& problem, int64_t h, void* buffer,
                 const Partial<T>& part) {
  constexpr int W = kLanes<T>;
  const int64_t splits = forward_splits(p), head = problem.index * p.heads + h;
  auto shrink = [&](int64_t split, int64_t i) {  // weight of a split's sums in row i
    const T most = part.maximum[i] == -kInfinity<T> ? T{0} : part.maximum[i];
    return exp_bounded<T>(broadcast(SplitResult<T>(buffer, p, head, split).maximum[i] - most))[0];
  };
  part.clear(0);
  for (int64_t i = 0; i < p.q_length; ++i) {
    for (int64_t split = 0; split < splits; ++split) {
      const SplitResult<T> from(buffer, p, head, split);
      part.maximum[i] = part.maximum[i] > from.maximum[i] ? part.maximum[i] : from.maximum[i];
      part.seen[i] |= from.seen[i] != T{0};
    }
    for (int64_t split = 0; split < splits; ++split) {
      part.sum[i] += SplitResult<T>(buffer, p, head, split).sum[i] * shrink(split, i);
    }
  }
  finish_statistics(p, problem, h, 0, p.q_length, part);
  for (int64_t i = 0; i < p.q_length; ++i) {
    const OutputRows to(p, problem, h, i);
    for (int64_t e = 0; e < p.v_size; e += W) {
      Vec<T> sum{};
      for (int64_t split = 0; split < splits; ++split) {
        const SplitResult<T> from(buffer, p, head, split);
        const char* const at = reinterpret_cast<const char*>(from.output + i * p.v_size + e);
        const auto type = sizeof(T) == 8 ? ScalarType::kFloat64 : ScalarType::kFloat32;
        sum = fma(load_piece<T>(at, type, 1, p.v_size - e), broadcast(shrink(split, i)), sum);
      }
      store_result<T>(to.output, to.rest_or_null(), 0, e, p.v_size - e, sum * part.sum[i]);
    }
  }
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
