// Every instance of the products that the kernels use (kernels/cpu/microkernel.h; row_scores.h and
// row_values.h, for decoding), alone and in the caches, in percent of the tier's multiply-add peak.
// Run by benchmarks/microkernels.py.
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/cpu/row_values.h"
#include "kernels/cpu/tiers/entries.h"

namespace tier = attention_ext::kernels::ATTENTION_EXT_TIER;
using namespace attention_ext::kernels;
using tier::Band;
using tier::Read;
using tier::Start;

namespace {

constexpr int kRounds = 15;

// Of this thread: other processes on the machine do not count.
double now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Operations a second of the best of several rounds of about half a millisecond.
template <class Run>
double best_rate(double operations, Run&& run) {
  int repeats = 1;
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const double start = now();
    for (int n = 0; n < repeats; ++n) run();
    const double seconds = now() - start;
    if (seconds < 5e-4) {
      repeats *= 2;
      --round;
      continue;
    }
    const double rate = operations * repeats / seconds;
    best = rate > best ? rate : best;
  }
  return best;
}

template <class T>
T* numbers(int64_t count) {
  auto* const memory = static_cast<T*>(std::aligned_alloc(64, round_up(count * sizeof(T), 64)));
  for (int64_t n = 0; n < count; ++n) {
    if constexpr (std::is_arithmetic_v<T>) {
      memory[n] = static_cast<T>(n % 7) / 8;
    } else {
      memory[n] = {0x3f80, 0x3f00};  // a pair: 1, 0.5
    }
  }
  return memory;
}

template <class T>
const char* type_name() {
  return sizeof(T) == 8 ? "float64" : "float32";
}

void print_rate(const char* type, const char* name, int tile_rows, int tile_columns, int64_t rows,
                int64_t depth, double rate, double peak) {
  std::printf("%-8s %-30s %dx%d  rows %3ld depth %3ld %7.1f GF/s %6.1f %%\n", type, name, tile_rows,
              tile_columns, static_cast<long>(rows), static_cast<long>(depth), rate / 1e9,
              100 * rate / peak);
}

// rows x (NV vectors) results over `depth` numbers of type In, operands strided as the kernels
// stride theirs.
template <class T, int NV, Start kStart, Read kRead, class In = T>
void instance(const char* name, double peak, int64_t rows, int64_t depth, int64_t lda, int64_t ldb,
              int64_t ldc) {
  constexpr int W = tier::kLanes<T>;
  In* const a = numbers<In>((kRead == Read::kRows ? rows : depth) * lda);
  In* const b = numbers<In>(depth * ldb);
  T* const c = numbers<T>(rows * ldc);
  tier::Vec<T> scale[NV];
  for (int v = 0; v < NV; ++v) scale[v] = tier::broadcast(T(0.5));
  constexpr bool kPairs = !std::is_same_v<T, In>;
  const double operations = (kPairs ? 4.0 : 2.0) * static_cast<double>(rows * depth * NV * W);
  const double rate = best_rate(operations, [&] {
    tier::multiply_panel<T, NV, kStart, kRead>(a, lda, b, ldb, c, ldc, rows, depth, scale, Band{});
  });
  print_rate(kPairs ? "bfloat16" : type_name<T>(), name, tier::kTileRows<NV>, NV, rows, depth, rate,
             peak);
  std::free(a);
  std::free(b);
  std::free(c);
}

template <class T, int NV>
void strip(double peak) {
  for (const int64_t size : {64, 128}) {
    instance<T, NV, Start::kZero, Read::kRows>("scores = K Q^T", peak, kBlock, size, size, kBlock,
                                               kBlock);
    instance<T, NV, Start::kScale, Read::kColumns>("output = r output + V^T P", peak, size, kBlock,
                                                   size, kBlock, kBlock);
    instance<T, NV, Start::kAdd, Read::kRows>("dK += dS^T Q", peak, kBlock, kBlock, kBlock, size,
                                              size);
    instance<T, NV, Start::kAdd, Read::kColumns>("dQ += dS K", peak, kBlock, kBlock, kBlock, size,
                                                 size);
  }
}

// Decoding: NR query rows with a tile's keys, head sizes in lanes.
template <class T, int NR>
void rows(double peak) {
  for (const int64_t size : {64, 128}) {
    T* const q = numbers<T>(NR * size);
    T* const keys = numbers<T>(kBlock * size);
    T* const lines = numbers<T>(NR * kBlock);
    T* const sums = numbers<T>(NR * size);
    T shrink[NR];
    for (T& factor : shrink) factor = T(0.5);
    const tier::Operand<T> operand{keys, size};
    const double operations = 2.0 * NR * static_cast<double>(kBlock * size);
    const double scores =
        best_rate(operations, [&] { tier::row_scores<T, NR>(q, size, operand, kBlock, lines); });
    print_rate(type_name<T>(), "decode: scores = Q K^T", NR, tier::kKeysAtOnce<T, NR>, NR, size,
               scores, peak);
    const KeyRange all_keys{0, tier::quarter_of(kBlock)};
    const double values = best_rate(operations, [&] {
      tier::row_values<T, NR>(operand, kBlock, all_keys, size, lines, shrink, sums,
                              [](int64_t) { return true; });
    });
    print_rate(type_name<T>(), "decode: output = r output + P V", NR, tier::kMostVectors<NR>, NR,
               size, values, peak);
    for (T* memory : {q, keys, lines, sums}) std::free(memory);
  }
}

template <class T>
void all() {
  const bool is_double = sizeof(T) == 8;
  const double peak =
      best_rate(tier::fma_loop(is_double, 1000), [&] { tier::fma_loop(is_double, 1000); });
  std::printf("%-8s peak of bare multiply-adds %36.1f GF/s\n", type_name<T>(), peak / 1e9);
  strip<T, 1>(peak);
  strip<T, 2>(peak);
  strip<T, 3>(peak);
  strip<T, 4>(peak);
  rows<T, 1>(peak);
  rows<T, 2>(peak);
  rows<T, 4>(peak);
  if constexpr (tier::kRegisters == 32) rows<T, 8>(peak);
}

// Products of two inputs in the tier that multiplies pairs of bfloat16.
void pairs() {
#if defined(__AVX512BF16__)
  const double peak = best_rate(tier::pair_loop(1000), [] { tier::pair_loop(1000); });
  std::printf("%-8s peak of bare products of pairs %32.1f GF/s\n", "bfloat16", peak / 1e9);
  const auto strip = [&]<int NV>() {
    for (const int64_t depth : {32, 64}) {
      instance<float, NV, Start::kZero, Read::kRows, tier::BFloat16Pair>(
          "scores = K Q^T", peak, kBlock, depth, depth, kBlock, kBlock);
    }
  };
  strip.template operator()<1>();
  strip.template operator()<2>();
  strip.template operator()<3>();
#endif
}

}  // namespace

int main() {
  all<float>();
  all<double>();
  pairs();
  return 0;
}
