"""The CUDA glue on a machine without a GPU.

`emulated_library` compiles csrc/cuda against stand-ins for torch's CUDA headers (tests/cuda/glue)
and links it with the emulated kernels: a process that loads it after attention_ext runs every call
on CPU tensors through that glue and those kernels (`run_emulated`).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch

from cuda_emulation import CSRC, CXX, NO_COMPILER, can_compile
from cuda_emulation import build as build_kernels
from tiers import ROOT, run_python

STAND_INS = ROOT / "tests" / "cuda" / "glue"
OBJECTS = ROOT / "build" / "ninja" / "common"
TORCH = Path(torch.__file__).resolve().parent
TORCH_INCLUDES = [TORCH / "include", TORCH / "include" / "torch" / "csrc" / "api" / "include"]
GLUE_FLAGS = ["-std=c++20", "-fPIC", "-O1", "-Wall", "-Wextra", "-fvisibility=hidden", f"-I{CSRC}"]
GLUE_FLAGS.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")

NO_OBJECTS = "the package was not built in this tree: build/ninja has no objects"


def why_not() -> str:
    """Why the emulated library cannot be made here; empty if it can."""
    if not can_compile():
        return NO_COMPILER
    return "" if common_objects() else NO_OBJECTS


def common_objects() -> list[Path]:
    """The product's own objects that the glue calls; none if one is missing."""
    names = ("checks", "checks_options", "make_params", "prepare")
    objects = [OBJECTS / f"{name}.cpp.o" for name in names]
    return objects if all(path.is_file() for path in objects) else []


def sources() -> list[Path]:
    return sorted((CSRC / "cuda").glob("*.cpp"))


def compile_glue(source: Path, target: Path, includes: Sequence[Path]) -> str:
    """Compiles one file of glue; returns what the compiler said."""
    words = [CXX, *GLUE_FLAGS, *(f"-I{path}" for path in includes)]
    for path in [*TORCH_INCLUDES, Path(sysconfig.get_path("include"))]:
        words += ["-isystem", str(path)]
    done = subprocess.run(
        [*words, "-c", str(source), "-o", str(target)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def _state() -> str:
    digest = hashlib.sha256(f"{CXX} {GLUE_FLAGS} {torch.__version__}".encode())
    own = [f for f in STAND_INS.rglob("*") if f.is_file()]
    shared = [*CSRC.glob("common/*.h"), *CSRC.glob("ops/*.h"), *CSRC.glob("kernels/*.h")]
    for file in [*sources(), *CSRC.glob("cuda/*.h"), *own, *sorted(shared), *common_objects()]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@cache
def emulated_library() -> Path:
    """csrc/cuda, the stand-ins and the emulated kernels, in one file that is kept."""
    kernels = build_kernels()
    folder = ROOT / "build" / "cuda_glue" / f"{_state()}-{kernels.parent.name}"
    result = folder / "glue.so"
    if result.is_file():
        return result
    folder.mkdir(parents=True, exist_ok=True)
    files = [*sources(), STAND_INS / "register.cpp"]
    objects = [folder / f"{source.name}.o" for source in files]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(compile_glue, includes=[STAND_INS]), files, objects))
    made = result.with_suffix(f".{os.getpid()}")
    link = [CXX, "-shared", *objects, *common_objects(), kernels, "-o", made]
    link += [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-Wl,-z,defs", f"-Wl,-rpath,{folder}"]
    link += [f"-Wl,-rpath,{kernels.parent}"]
    subprocess.run([str(word) for word in link], check=True)
    os.replace(made, result)
    return result


def run_emulated(
    code: str, *, env: Mapping[str, str] | None = None, check: bool = True, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Runs Python whose calls on CPU tensors take the CUDA glue and the emulated kernels."""
    # Loading it puts other functions in the place of registered ones, which torch reports.
    load = f"import torch, attention_ext\ntorch.ops.load_library({str(emulated_library())!r})\n"
    return run_python(load + code, env=env, check=check, timeout=timeout)
