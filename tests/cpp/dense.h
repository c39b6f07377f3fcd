// The formula of attention and of its gradients, pair by pair in double: what the kernels are
// compared with. Nothing here is shared with them but the params struct and dropout's scalar
// function.
#pragma once

#include <cmath>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "kernels/half.h"
#include "kernels/params.h"
#include "kernels/philox.h"

namespace dense {

using attention_ext::kernels::BackwardParams;
using attention_ext::kernels::Problem;

struct Shape {
  int64_t batch, heads, kv_heads, rows, keys, size, value_size;
};

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(double x)
      : bits(attention_ext::kernels::bfloat16_from_float(static_cast<float>(x))) {}
  operator float() const { return attention_ext::kernels::bfloat16_to_float(bits); }
};

// What kernels of tensors of T compute in.
template <class T>
using Accumulation = std::conditional_t<sizeof(T) == 8, double, float>;

// One call: every tensor contiguous (B, H, L, E) in exactly as much memory as it needs, so that a
// sanitizer sees a step too far.
template <class T>
struct Call {
  Shape shape;
  std::vector<T> query, key, value, bias, key_bias, grad;
  std::vector<Accumulation<T>> sinks, slopes;
  std::vector<uint8_t> mask, key_mask;
  BackwardParams params;
};

template <class T>
T at(const std::vector<T>& x, int64_t h, int64_t i, int64_t rows, int64_t e, int64_t size) {
  return x[(h * rows + i) * size + e];
}

struct Result {
  std::vector<double> output, lse, grad_query, grad_key, grad_value, grad_bias, grad_sinks, weights;
};

template <class T>
struct Row {  // scores of one query row
  const Call<T>& c;
  int64_t b, h, i;
  std::vector<double> score, slope, prob;
  double lse = -std::numeric_limits<double>::infinity(), sink_prob = 0;

  Row(const Call<T>& call, int64_t batch, int64_t head, int64_t row)
      : c(call), b(batch), h(head), i(row) {
    const Shape& s = c.shape;
    const auto& p = c.params;
    const double infinity = std::numeric_limits<double>::infinity();
    const int64_t kv = b * s.kv_heads + h / (s.heads / s.kv_heads), q = b * s.heads + h;
    score.assign(s.keys, -infinity);
    slope.assign(s.keys, 1);
    prob.assign(s.keys, 0);
    double most = c.sinks.empty() ? -infinity : c.sinks[h];
    for (int64_t j = 0; j < s.keys; ++j) {
      if (!visible(j)) continue;
      double x = 0;
      for (int64_t e = 0; e < s.size; ++e) {
        x += double(at(c.query, q, i, s.rows, e, s.size)) * at(c.key, kv, j, s.keys, e, s.size);
      }
      x *= p.scale;
      if (p.softcap > 0) {
        const double t = std::tanh(x / p.softcap);
        x = p.softcap * t;
        slope[j] = 1 - t * t;
      }
      if (!c.slopes.empty()) x -= c.slopes[h] * std::fabs(double(i + p.query_offset - j));
      if (!c.bias.empty()) x += bias(j);
      if (!c.key_bias.empty()) x += c.key_bias[b * s.keys + j];
      score[j] = x;
      most = std::max(most, x);
    }
    if (most == -infinity) return;
    double sum = c.sinks.empty() ? 0 : std::exp(c.sinks[h] - most);
    for (double x : score) sum += std::exp(x - most);
    lse = most + std::log(sum);
    for (int64_t j = 0; j < s.keys; ++j) prob[j] = std::exp(score[j] - lse);
    if (!c.sinks.empty()) sink_prob = std::exp(c.sinks[h] - lse);
  }
  double bias(int64_t j) const { return c.bias[(h * c.shape.rows + i) * c.shape.keys + j]; }
  bool visible(int64_t j) const {
    const auto& p = c.params;
    const int64_t position = i + p.query_offset;
    if (j > position + p.window_right || j < position - p.window_left) return false;
    if (!c.mask.empty() && c.mask[(b * c.shape.rows + i) * c.shape.keys + j] == 0) return false;
    if (!c.key_mask.empty() && c.key_mask[b * c.shape.keys + j] == 0) return false;
    return c.bias.empty() || bias(j) != -std::numeric_limits<double>::infinity();
  }
  double dropped(int64_t j) const {  // what a probability is multiplied with
    const auto& d = c.params.dropout;
    if (d.threshold == 0) return 1;
    return attention_ext::kernels::keep(d, b, h, i, j) ? d.rescale : 0;
  }
};

template <class T>
Result run(const Call<T>& c) {
  const Shape& s = c.shape;
  Result r;
  r.output.assign(s.batch * s.heads * s.rows * s.value_size, 0);
  r.lse.assign(s.batch * s.heads * s.rows, 0);
  r.weights.assign(s.batch * s.heads * s.rows * s.keys, 0);
  r.grad_query.assign(c.query.size(), 0);
  r.grad_key.assign(c.key.size(), 0);
  r.grad_value.assign(c.value.size(), 0);
  r.grad_bias.assign(c.bias.size(), 0);
  r.grad_sinks.assign(c.sinks.size(), 0);
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      const int64_t kv = b * s.kv_heads + h / (s.heads / s.kv_heads), q = b * s.heads + h;
      for (int64_t i = 0; i < s.rows; ++i) {
        const Row<T> row(c, b, h, i);
        r.lse[q * s.rows + i] = row.lse;
        double delta = 0;
        std::vector<double> grad_prob(s.keys, 0);
        for (int64_t j = 0; j < s.keys; ++j) {
          const double weight = row.prob[j] * row.dropped(j);
          r.weights[(q * s.rows + i) * s.keys + j] = weight;
          for (int64_t e = 0; e < s.value_size; ++e) {
            const double v = at(c.value, kv, j, s.keys, e, s.value_size);
            const double g = at(c.grad, q, i, s.rows, e, s.value_size);
            r.output[(q * s.rows + i) * s.value_size + e] += weight * v;
            r.grad_value[(kv * s.keys + j) * s.value_size + e] += weight * g;
            grad_prob[j] += row.dropped(j) * v * g;
          }
          delta += row.prob[j] * grad_prob[j];
        }
        for (int64_t j = 0; j < s.keys; ++j) {
          const double ds = row.prob[j] * (grad_prob[j] - delta);
          if (!c.bias.empty()) r.grad_bias[(h * s.rows + i) * s.keys + j] += ds;
          for (int64_t e = 0; e < s.size; ++e) {
            const double factor = ds * row.slope[j] * c.params.scale;
            r.grad_query[(q * s.rows + i) * s.size + e] +=
                factor * at(c.key, kv, j, s.keys, e, s.size);
            r.grad_key[(kv * s.keys + j) * s.size + e] +=
                factor * at(c.query, q, i, s.rows, e, s.size);
          }
        }
        if (!c.sinks.empty()) r.grad_sinks[h] -= row.sink_prob * delta;
      }
    }
  }
  return r;
}

}  // namespace dense
