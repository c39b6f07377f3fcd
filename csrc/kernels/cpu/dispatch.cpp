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

namespace {

struct Tier {
  const char* name;
  const CpuKernels* kernels;
  bool runs;
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

}  // namespace

const CpuKernels* select_kernels(const char* forced, const char* aten_limit, const char** why) {
  const Tier tiers[] = {
      {"baseline", &baseline::kKernels, true},
#if defined(ATTENTION_EXT_HAVE_AVX2)
      {"avx2", &avx2::kKernels, processor_has_avx2()},
#endif
#if defined(ATTENTION_EXT_HAVE_AVX512)
      {"avx512", &avx512::kKernels, processor_has_avx512()},
#endif
  };
  *why = nullptr;
  if (forced != nullptr && *forced != '\0') {
    for (const Tier& tier : tiers) {
      if (std::strcmp(tier.name, forced) != 0) continue;
      if (!tier.runs) *why = "this processor does not have its instructions";
      return tier.runs ? tier.kernels : nullptr;
    }
    *why = "no such tier was built (baseline, avx2 and avx512 exist on x86-64)";
    return nullptr;
  }
  const char* const limit = aten_limit == nullptr ? "" : aten_limit;
  const CpuKernels* best = nullptr;
  for (const Tier& tier : tiers) {
    if (tier.runs) best = tier.kernels;
    if (std::strcmp(limit, "default") == 0) break;
    if (std::strcmp(limit, tier.name) == 0) break;
  }
  return best;
}

}  // namespace attention_ext::kernels
