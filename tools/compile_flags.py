"""What is compiled, and with which flags: for setup.py, CMake, the kernel tests and benchmarks.

`python tools/compile_flags.py` prints the same as CMake commands, which csrc/CMakeLists.txt
includes; it needs no torch.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PUBLIC_HEADERS = ROOT / "attention_ext" / "include"

COMMON_FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
GLUE_FLAGS = ["-O2", "-fopenmp"]  # without -fopenmp at::parallel_for silently runs on one thread

# -ffp-contract=off: a product is fused where the source says fma and nowhere else.
# -falign-loops: a hot loop is longer than a line; where it begins is worth a percent or two.
# -fno-ivopts: otherwise gcc keeps a pointer per row of a register tile and spills.
# -Wno-...: gcc 12 warns about its own intrinsics headers, and about the ABI of vector arguments
# that never leave a tier's object.
KERNEL_FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-ivopts", "-falign-loops=64"]
KERNEL_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi"]

AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512_FLAGS += ["-mprefer-vector-width=512"]
AVX512_BF16_FLAGS = [*AVX512_FLAGS, "-mavx512bf16"]

# One set of kernels for each instruction set; which one runs is decided at run time.
TIER_FLAGS: dict[str, list[str]] = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    TIER_FLAGS |= {"avx2": AVX2_FLAGS, "avx512": AVX512_FLAGS, "avx512_bf16": AVX512_BF16_FLAGS}

TIER_MACROS = [f"-DATTENTION_EXT_HAVE_{tier.upper()}" for tier in TIER_FLAGS if tier != "baseline"]


class Group(NamedTuple):
    """Sources that are compiled with the same flags."""

    name: str
    sources: list[Path]
    flags: list[str]
    suffix: str = ""  # of the object's name, for sources that are compiled more than once
    torch: bool = True  # whether torch's headers are needed
    cuda: bool = False  # only in builds with CUDA


def _kind(source: Path, csrc: Path) -> str:
    folder = source.parent.relative_to(csrc).as_posix()
    if folder == "kernels/cpu/tiers":
        return "tiers"
    kind = next((name for name in ("kernels", "api") if folder.startswith(name)), "glue")
    of_cuda = "cuda" in folder.split("/") or source.name == "register_cuda.cpp"
    return f"cuda_{kind}" if of_cuda else kind


def groups(csrc: Path = CSRC, for_all: Sequence[str] = ()) -> list[Group]:
    """Every .cpp file of a source tree, sorted into groups; `for_all` are flags that all get."""
    found: dict[str, list[Path]] = {}
    for source in sorted(csrc.rglob("*.cpp")):
        found.setdefault(_kind(source, csrc), []).append(source)
    common = [*COMMON_FLAGS, f"-I{csrc}", *TIER_MACROS, *for_all]
    kernel, glue = [*common, *KERNEL_FLAGS], [*common, *GLUE_FLAGS]
    result = []
    for tier, tier_flags in TIER_FLAGS.items():
        flags = [*kernel, *tier_flags, f"-DATTENTION_EXT_TIER={tier}"]
        result.append(
            Group(f"tier_{tier}", found.get("tiers", []), flags, suffix=f".{tier}", torch=False)
        )
    for kind, flags in (
        ("kernels", kernel),
        ("cuda_kernels", kernel),
        ("glue", glue),
        ("cuda_glue", glue),
        ("api", [*glue, f"-I{PUBLIC_HEADERS}"]),
    ):
        of_torch, of_cuda = not kind.endswith("kernels"), kind.startswith("cuda")
        result.append(Group(kind, found.get(kind, []), flags, torch=of_torch, cuda=of_cuda))
    return result


def cmake_text() -> str:
    """The CPU groups without module.cpp, which is Python's, as CMake's set commands."""
    chosen = [group for group in groups() if not group.cuda]
    lines = [f"set(ATTENTION_EXT_GROUPS {' '.join(group.name for group in chosen)})"]
    for group in chosen:
        sources = [path.as_posix() for path in group.sources if path.name != "module.cpp"]
        for name, values in (("SOURCES", sources), ("FLAGS", group.flags)):
            quoted = " ".join(f'"{value}"' for value in values)
            lines.append(f"set(ATTENTION_EXT_{name}_{group.name} {quoted})")
        lines.append(f"set(ATTENTION_EXT_TORCH_{group.name} {'ON' if group.torch else 'OFF'})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(cmake_text(), end="")
