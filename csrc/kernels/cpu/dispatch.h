// Which tier this machine runs. Chosen once per process.
#pragma once

#include "kernels/cpu/kernels.h"

namespace attention_ext::kernels {

// The widest tier that was built, that the processor has and that the environment allows.
// ATTENTION_EXT_CPU_CAPABILITY (baseline, avx2, avx512) forces a tier; ATEN_CPU_CAPABILITY
// (default, avx2, avx512), torch's own variable, only limits it. Returns null and an explanation if
// the forced tier cannot run here.
const CpuKernels* select_kernels(const char* forced, const char* aten_limit, const char** why);

}  // namespace attention_ext::kernels
