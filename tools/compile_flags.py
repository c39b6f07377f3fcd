"""Compiler flags of the CPU kernels: for setup.py, the kernel tests and benchmarks."""

from __future__ import annotations

import platform

# -ffp-contract=off: a product is fused where the source says fma and nowhere else.
# -fno-ivopts: otherwise gcc keeps a pointer per row of a register tile and spills.
# -Wno-...: gcc 12 warns about its own intrinsics headers, and about the ABI of vector arguments
# that never leave a tier's object.
KERNEL_FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-ivopts"]
KERNEL_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi"]

AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512_FLAGS += ["-mprefer-vector-width=512"]

# One set of kernels for each instruction set; which one runs is decided at run time.
TIER_FLAGS: dict[str, list[str]] = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    TIER_FLAGS |= {"avx2": AVX2_FLAGS, "avx512": AVX512_FLAGS}
