#include "kernels/cpu/dispatch.h"

#include <cstring>

namespace attention_ext::kernels {

namespace baseline {
extern const CpuKernels kKernels;
}
#if defined(ATTENTION_EXT_HAVE_AVX2)
namespace avx2 {
extern const CpuKernels kKernels;
}
#endif
#if defined(ATTENTION_EXT_HAVE_AVX512)
namespace avx512 {
extern const CpuKernels kKernels;
}
#endif
#if defined(ATTENTION_EXT_HAVE_AVX512_BF16)
namespace avx512_bf16 {
extern const CpuKernels kKernels;
}
#endif

namespace {

struct Tier {
  const char* name;
  const char* aten_name;  // torch's name of such a processor
  const CpuKernels* kernels;
  bool runs;
  bool worthwhile = true;  // chosen without being asked for
};

bool processor_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool processor_has_avx512() {
#if defined(__x86_64__)
  return processor_has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

bool processor_has_avx512_bf16() {
#if defined(__x86_64__)
  return processor_has_avx512() && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// vdpbf16ps does the work of two fused multiply-adds. AMD's processors (Zen 4 and later) issue both
// equally often, so it halves the time of a product; Intel's issue four fused multiply-adds for one
// of it. Measured on Emerald Rapids, one thread: 86 GFLOP/s of it, 176 of fused multiply-adds; two
// threads, B2 H8 S1024 D64 in bfloat16: forward 23.1 ms against avx512's 17.9, backward 51.7
// against 41.0. AMD's rate is from public measurements (github.com/iree-org/iree/pull/15089).
bool products_of_pairs_are_fast() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

}  // namespace

const CpuKernels* select_kernels(const char* forced, const char* aten_limit, const char** why) {
  const Tier tiers[] = {
      {"baseline", "default", &baseline::kKernels, true},
#if defined(ATTENTION_EXT_HAVE_AVX2)
      {"avx2", "avx2", &avx2::kKernels, processor_has_avx2()},
#endif
#if defined(ATTENTION_EXT_HAVE_AVX512)
      {"avx512", "avx512", &avx512::kKernels, processor_has_avx512()},
#endif
#if defined(ATTENTION_EXT_HAVE_AVX512_BF16)
      {"avx512_bf16", "avx512", &avx512_bf16::kKernels, processor_has_avx512_bf16(),
       products_of_pairs_are_fast()},
#endif
  };
  *why = nullptr;
  if (forced != nullptr && *forced != '\0') {
    for (const Tier& tier : tiers) {
      if (std::strcmp(tier.name, forced) != 0) continue;
      if (!tier.runs) *why = "this processor does not have its instructions";
      return tier.runs ? tier.kernels : nullptr;
    }
    *why = "no such tier was built (x86-64 has baseline, avx2, avx512 and avx512_bf16)";
    return nullptr;
  }
  const char* const limit = aten_limit == nullptr ? "" : aten_limit;
  const CpuKernels* best = nullptr;
  bool at_limit = false;
  for (const Tier& tier : tiers) {
    const bool is_limit = std::strcmp(limit, tier.aten_name) == 0;
    if (at_limit && !is_limit) break;
    at_limit = is_limit;
    if (tier.runs && tier.worthwhile) best = tier.kernels;
  }
  return best;
}

}  // namespace attention_ext::kernels
