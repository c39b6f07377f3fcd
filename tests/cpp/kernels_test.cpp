// The CPU kernels without torch: every option, forward, backward, bias gradient, sinks and weights,
// on plain threads, against the dense formula. Built with sanitizers by tests/test_cpp.py, which
// also says which tier (ATTENTION_EXT_TIER).
#include "kernels/cpu/kernels.h"

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "dense.h"
#include "kernels/cpu/vector_math.h"

namespace attention_ext::kernels::ATTENTION_EXT_TIER {
extern const CpuKernels kKernels;
}

namespace {

using namespace attention_ext::kernels;
using dense::Accumulation;
using dense::BFloat16;
using dense::Call;
using dense::Shape;
const CpuKernels& kernels() { return ATTENTION_EXT_TIER::kKernels; }

constexpr int kThreads = 3;
int failures = 0;

void on_threads(int64_t items, int64_t scratch_bytes,
                const std::function<void(WorkQueue&, void*)>& run) {
  WorkQueue queue;
  queue.count = items;
  queue.takers = kThreads;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      // Exactly as much as was asked for, so that a step too far is seen.
      void* const scratch =
          std::aligned_alloc(64, static_cast<size_t>(round_up(scratch_bytes + 1, 64)));
      run(queue, scratch);
      std::free(scratch);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

template <class T>
View view(std::vector<T>& data, int64_t heads, int64_t rows, int64_t columns) {
  View v;
  v.data = reinterpret_cast<char*>(data.data());
  v.type = sizeof(T) == 8   ? ScalarType::kFloat64
           : sizeof(T) == 4 ? ScalarType::kFloat32
           : sizeof(T) == 2 ? ScalarType::kBFloat16
                            : ScalarType::kBool;
  v.stride[0] = heads * rows * columns;
  v.stride[1] = rows * columns;
  v.stride[2] = columns;
  v.stride[3] = 1;
  return v;
}
template <class T>
View row_view(std::vector<T>& data, int64_t heads, int64_t rows) {
  View v = view(data, heads, rows, 1);
  v.stride[3] = 0;
  return v;
}

template <class T>
void compare(const std::string& name, const std::vector<T>& got, const std::vector<double>& want) {
  double most = 1e-3, error = 0;
  for (double x : want) most = std::isfinite(x) ? std::max(most, std::fabs(x)) : most;
  for (size_t k = 0; k < want.size(); ++k) {
    const bool same = got[k] == want[k] || (std::isnan(double(got[k])) && std::isnan(want[k]));
    if (!same) error = std::max(error, std::fabs(double(got[k]) - want[k]) / most);
    if (!same && !std::isfinite(double(got[k]) - want[k])) error = 1e9;
  }
  const double tolerance = sizeof(T) == 8 ? 1e-12 : sizeof(T) == 4 ? 3e-5 : 4e-3;
  if (error < tolerance && got.size() == want.size()) return;
  std::printf("%s: error %g (relative to %g)\n", name.c_str(), error, most);
  ++failures;
}

template <class T>
struct Options {
  bool mask = false, bias = false, key_mask = false, key_bias = false, sinks = false, alibi = false;
  int64_t left = kUnbounded, right = kUnbounded, offset = 0;
  double softcap = 0, dropout = 0;
};

template <class T>
Call<T> make(const Shape& s, const Options<T>& o, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  auto fill = [&](auto& x, int64_t n) {
    x.resize(n);
    for (auto& value : x) value = std::decay_t<decltype(value)>(normal(random));
  };
  Call<T> c;
  c.shape = s;
  fill(c.query, s.batch * s.heads * s.rows * s.size);
  fill(c.key, s.batch * s.kv_heads * s.keys * s.size);
  fill(c.value, s.batch * s.kv_heads * s.keys * s.value_size);
  fill(c.grad, s.batch * s.heads * s.rows * s.value_size);
  if (o.bias) {
    fill(c.bias, s.heads * s.rows * s.keys);
    for (T& x : c.bias) x = random() % 7 == 0 ? T(-std::numeric_limits<double>::infinity()) : x;
  }
  if (o.key_bias) fill(c.key_bias, s.batch * s.keys);
  if (o.sinks) fill(c.sinks, s.heads);
  if (o.alibi) fill(c.slopes, s.heads);
  if (o.mask) {
    c.mask.resize(s.batch * s.rows * s.keys);
    for (uint8_t& x : c.mask) x = random() % 3 != 0;
    for (int64_t j = 0; j < s.keys && s.rows > 1; ++j) c.mask[s.keys + j] = 0;  // a dead row
  }
  if (o.key_mask) {
    c.key_mask.resize(s.batch * s.keys);
    for (uint8_t& x : c.key_mask) x = random() % 3 != 0;
  }
  BackwardParams& p = c.params;
  p.type = view(c.query, 1, 1, 1).type;
  p.problems = s.batch;
  p.heads = s.heads;
  p.kv_heads = s.kv_heads;
  p.q_length = s.rows;
  p.k_length = s.keys;
  p.qk_size = s.size;
  p.v_size = s.value_size;
  p.query = view(c.query, s.heads, s.rows, s.size);
  p.key = view(c.key, s.kv_heads, s.keys, s.size);
  p.value = view(c.value, s.kv_heads, s.keys, s.value_size);
  p.grad_output = view(c.grad, s.heads, s.rows, s.value_size);
  if (o.bias) p.attn_bias = view(c.bias, s.heads, s.rows, s.keys);
  p.attn_bias.stride[0] = 0;
  if (o.mask) p.attn_mask = view(c.mask, 1, s.rows, s.keys);
  p.attn_mask.stride[1] = 0;
  if (o.key_mask) p.key_mask = view(c.key_mask, 1, 1, s.keys);
  if (o.key_bias) p.key_mask = view(c.key_bias, 1, 1, s.keys);
  p.key_mask_is_bool = o.key_mask;
  if (o.sinks) p.sinks = c.sinks.data();
  if (o.alibi) p.alibi_slopes = c.slopes.data();
  p.alibi_stride[1] = 1;
  p.window_left = o.left;
  p.window_right = o.right;
  p.query_offset = o.offset;
  p.scale = 0.3;
  p.softcap = o.softcap;
  p.dropout.threshold = static_cast<uint32_t>(o.dropout * 65536);
  p.dropout.rescale = 65536.0 / (65536.0 - p.dropout.threshold);
  p.dropout.seed = 0x123456789abcdef0;
  p.dropout.offset = 77;
  p.dropout.heads_total = s.heads;
  return c;
}

template <class T>
void check(const std::string& name, const Shape& s, const Options<T>& o) {
  Call<T> c = make<T>(s, o, 5);
  BackwardParams& p = c.params;
  const dense::Result want = dense::run(c);

  const int64_t rows = s.batch * s.heads * s.rows;
  std::vector<T> output(rows * s.value_size), rest(sizeof(T) == 2 ? output.size() : 0);
  std::vector<Accumulation<T>> lse(rows), residual(rows);
  p.output = view(output, s.heads, s.rows, s.value_size);
  if (sizeof(T) == 2) p.output_residual = view(rest, s.heads, s.rows, s.value_size);
  p.logsumexp = row_view(lse, s.heads, s.rows);
  p.residual = row_view(residual, s.heads, s.rows);
  std::vector<Accumulation<T>> partials(s.batch * s.heads * forward_splits(p) *
                                        forward_partial_elements(p));
  const int64_t scratch = kernels().forward_scratch(p);
  on_threads(kernels().forward_items(p), scratch, [&](WorkQueue& queue, void* memory) {
    kernels().forward(p, partials.data(), queue, memory);
  });
  if (forward_splits(p) > 1) {
    on_threads(s.batch * s.heads, scratch, [&](WorkQueue& queue, void* memory) {
      kernels().forward_join(p, partials.data(), queue, memory);
    });
  }
  compare(name + " output", output, want.output);
  compare(name + " logsumexp", lse, want.lse);

  WeightsParams w;
  static_cast<AttentionParams&>(w) = p;
  std::vector<T> weights(rows * s.keys);
  w.weights = view(weights, s.heads, s.rows, s.keys);
  on_threads(kernels().weights_items(w), kernels().weights_scratch(w),
             [&](WorkQueue& queue, void* memory) { kernels().weights(w, queue, memory); });
  compare(name + " weights", weights, want.weights);

  std::vector<T> grad_query(c.query.size()), grad_key(c.key.size()), grad_value(c.value.size());
  p.grad_query = view(grad_query, s.heads, s.rows, s.size);
  p.grad_key = view(grad_key, s.kv_heads, s.keys, s.size);
  p.grad_value = view(grad_value, s.kv_heads, s.keys, s.value_size);
  std::vector<Accumulation<T>> grad_bias(c.bias.size());
  std::unique_ptr<std::atomic<int32_t>[]> turns;
  BackwardState state;
  if (o.bias) {
    p.grad_bias = view(grad_bias, s.heads, s.rows, s.keys);
    p.grad_bias.stride[0] = 0;
    const int64_t sizes[4] = {1, s.heads, s.rows, s.keys};
    std::copy(sizes, sizes + 4, p.bias_size);
    turns = std::make_unique<std::atomic<int32_t>[]>(bias_turns(p));
    state.bias_added = turns.get();
  }
  auto added = std::make_unique<std::atomic<int32_t>[]>(query_blocks(p) * p.heads);
  state.added = added.get();
  auto sums = std::make_unique<std::atomic<void*>[]>(p.problems * p.heads);
  auto remaining = std::make_unique<std::atomic<int32_t>[]>(p.problems * p.kv_heads);
  state.sums = sums.get();
  state.remaining = remaining.get();
  on_threads(kernels().backward_items(p), kernels().backward_scratch(p),
             [&](WorkQueue& queue, void* memory) { kernels().backward(p, state, queue, memory); });
  if (o.bias && !bias_with_keys(p)) {
    on_threads(kernels().bias_gradient_items(p), kernels().bias_gradient_scratch(p),
               [&](WorkQueue& queue, void* memory) { kernels().bias_gradient(p, queue, memory); });
  }
  compare(name + " grad_query", grad_query, want.grad_query);
  compare(name + " grad_key", grad_key, want.grad_key);
  compare(name + " grad_value", grad_value, want.grad_value);
  compare(name + " grad_bias", grad_bias, want.grad_bias);
  if (o.sinks) {
    std::vector<Accumulation<T>> grad_sinks(s.heads);
    p.grad_sinks = grad_sinks.data();
    on_threads(s.heads, 0, [&](WorkQueue& queue, void*) { kernels().sink_gradient(p, queue); });
    compare(name + " grad_sinks", grad_sinks, want.grad_sinks);
  }
}

// The vector functions against the C library's in long double, over the ranges that kernels use.
template <class T>
void check_math(const std::string& type) {
  namespace tier = attention_ext::kernels::ATTENTION_EXT_TIER;
  std::mt19937_64 random(3);
  const double lowest = sizeof(T) == 8 ? -700 : -86, ulp = std::numeric_limits<T>::epsilon();
  double exp_error = 0, log_error = 0, tanh_error = 0;
  for (int n = 0; n < 200000; ++n) {
    const double unit = static_cast<double>(random() >> 11) * 0x1p-53;
    const T x = static_cast<T>(unit * (n % 2 != 0 ? lowest : -10)),
            y = static_cast<T>(1 + 3000 * unit);
    const T z = static_cast<T>((unit - 0.5) * (n % 2 != 0 ? 1 : 60));
    auto error = [&](T got, long double want) { return std::fabs(double(got / want - 1)); };
    exp_error = std::max(
        exp_error, error(tier::exp_vector<T>(tier::broadcast(x))[0], std::exp((long double)x)));
    log_error = std::max(log_error, error(T(1) + tier::log_vector<T>(tier::broadcast(y))[0],
                                          1 + std::log((long double)y)));
    tanh_error = std::max(
        tanh_error, error(tier::tanh_vector<T>(tier::broadcast(z))[0], std::tanh((long double)z)));
  }
  if (exp_error < 1.5 * ulp && log_error < 2 * ulp && tanh_error < 4 * ulp) return;
  std::printf("%s: errors of exp, log, tanh: %g %g %g\n", type.c_str(), exp_error, log_error,
              tanh_error);
  ++failures;
}

// Minus infinity, and NaN with any payload: the bits of 2^n must not be added to one.
template <class T>
void check_special_exp(const std::string& type) {
  namespace tier = attention_ext::kernels::ATTENTION_EXT_TIER;
  auto exps = [](T t) {
    const auto x = tier::broadcast(t);
    return std::pair{T(tier::exp_bounded<T>(x)[0]), T(tier::exp_vector<T>(x)[0])};
  };
  bool right = exps(-std::numeric_limits<T>::infinity()) == std::pair{T(0), T(0)} &&
               exps(T(-3e38)) == std::pair{T(0), T(0)} && exps(T(0)) == std::pair{T(1), T(1)};
  for (const int payload : {0, 1, 2, 255, 511}) {
    const auto [bounded, any] = exps(std::nan(std::to_string(payload).c_str()));
    right &= std::isnan(bounded) && std::isnan(any);
    using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    const Bits bits = std::bit_cast<Bits>(std::numeric_limits<T>::quiet_NaN()) + payload;
    right &= std::isnan(exps(std::bit_cast<T>(bits)).first);
  }
  if (right) return;
  std::printf("%s: exp of infinities and NaN\n", type.c_str());
  ++failures;
}

// Every item once, in runs that get shorter; a queue without items gives none.
void check_queue() {
  for (const int64_t items : {0, 1, 7, 1000}) {
    std::vector<std::atomic<int>> taken(items);
    for (auto& count : taken) count = 0;
    on_threads(items, 0, [&](WorkQueue& queue, void*) {
      queue.for_each([&](int64_t item) { ++taken[item]; });
    });
    if (std::all_of(taken.begin(), taken.end(), [](const auto& n) { return n == 1; })) continue;
    std::printf("items of a queue of %ld are not taken once each\n", long{items});
    ++failures;
  }
}

template <class T>
void check_all(const char* type) {
  const Shape odd{2, 2, 1, 101, 203, 19, 23}, tiny{1, 1, 1, 1, 1, 1, 1},
      blocks{1, 4, 2, 130, 600, 16, 32};
  const Shape decode{1, 4, 2, 2, 1100, 16, 33}, many_heads{1, 40, 1, 3, 100, 8, 8},
      short_query{1, 2, 2, 20, 1100, 8, 8};
  const std::string t = type;
  if constexpr (sizeof(T) > 2) {
    check_math<T>(t);
    check_special_exp<T>(t);
  }
  for (const Shape& s : {odd, tiny, blocks, decode, many_heads, short_query}) {
    const std::string at = t + " L" + std::to_string(s.rows) + " S" + std::to_string(s.keys) + " ";
    check<T>(at + "plain", s, {});
    check<T>(at + "mask", s, {.mask = true, .sinks = true});
    check<T>(at + "bias", s, {.bias = true});
    check<T>(at + "causal bias", s, {.bias = true, .right = 0, .offset = 3});
    check<T>(at + "window", s, {.key_mask = true, .left = 30, .right = 7, .offset = 11});
    check<T>(at + "capped", s, {.bias = true, .key_bias = true, .alibi = true, .softcap = 1.5});
    check<T>(at + "dropout", s, {.mask = true, .key_mask = true, .dropout = 0.25});
  }
}

// Forward scratch stays within 256 KiB at head size 128 in float, whatever the lengths, the group
// and the options.
void check_scratch() {
  for (const int64_t rows : {1, 2, 3, 4, 5, 97, 200}) {
    for (const int64_t heads : {1, 64}) {
      for (const bool all : {false, true}) {
        Options<float> options;
        if (all)
          options = {.mask = true, .bias = true, .key_bias = true, .softcap = 1, .dropout = 0.5};
        const auto call = make<float>({1, heads, 1, rows, 200, 128, 128}, options, 5);
        const int64_t bytes = kernels().forward_scratch(call.params);
        if (bytes <= 256 * 1024) continue;
        std::printf("%ld heads of %ld rows take %ld bytes of scratch\n", long{heads}, long{rows},
                    long{bytes});
        ++failures;
      }
    }
  }
}

}  // namespace

int main() {
  check_scratch();
  check_queue();
  check_all<float>("float");
#if !defined(__SANITIZE_THREAD__)  // threads share the same things whatever the type
  check_all<double>("double");
  check_all<BFloat16>("bfloat16");
#endif
  std::printf("%d failures in tier %s\n", failures, kernels().name);
  return failures == 0 ? 0 : 1;
}
