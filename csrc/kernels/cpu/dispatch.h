// Which tier this machine runs. Chosen once per process.
#pragma once

#include "kernels/cpu/kernels.h"

namespace attention_ext::kernels {

// The best tier that was built, that the processor has and that the environment allows: the last
// of baseline, avx2, avx512, and avx512_bf16 where that is faster (dispatch.cpp).
// ATTENTION_EXT_CPU_CAPABILITY (baseline, avx2, avx512, avx512_bf16) forces a tier.
// ATEN_CPU_CAPABILITY (default, avx2, avx512), torch's own variable, only limits it; torch has no
// name for avx512_bf16 and multiplies bfloat16 under avx512, so that is within the limit avx512.
// Returns null and an explanation if the forced tier cannot run here.
const CpuKernels* select_kernels(const char* forced, const char* aten_limit, const char** why);

}  // namespace attention_ext::kernels
