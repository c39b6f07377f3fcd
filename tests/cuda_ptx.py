"""The PTX that nvcc emits for the CUDA kernels, run by an interpreter (tests/cuda/ptx).

    device = interpreter(["tensor/instances/forward_float16.cu"])
    out = device.attention(q, k, v, **options)      # as the emulator of cuda_emulation.py
    device.report()                                 # instructions, bank conflicts, ... since reset

The launching code is the product's own, compiled for the host; kernels are found by their mangled
names. Compiled files are kept in build/cuda_ptx, by the state of the sources.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_build import NVCC_FLAGS, CudaBuildError, find_nvcc, find_toolkit

from cuda_emulation import (
    CSRC,
    CXX,
    NO_COMPILER,
    ROOT,
    SHIM,
    Call,
    Emulator,
    Library,
    Test,
    can_compile,
)
from cuda_emulation import _run_two_at_a_time as run_two_at_a_time

CUDA = CSRC / "kernels" / "cuda"
INTERPRETER = ROOT / "tests" / "cuda" / "ptx"
BUILD = ROOT / "build" / "cuda_ptx"
REPORT = (
    "instructions",
    "matrix_loads",
    "matrix_conflicts",
    "copies",
    "copy_conflicts",
    "products",
    "barriers",
    "shared_accesses",
    "shared_conflicts",
)
# -frounding-math: instructions with a rounding of their own change the mode.
FLAGS = ["-std=c++20", "-fPIC", "-w", f"-I{CSRC}", f"-I{SHIM}", f"-I{INTERPRETER}"]
INTERPRETER_FLAGS = ["-O2", "-ffp-contract=off", "-frounding-math"]
HOST_FLAGS = ["-O0", "-DAE_CUDA_SHIM", "-DAE_CUDA_PTX", "-x", "c++"]


# The compiler driver that the build would take, or why there is none.
NVCC: str | None
try:
    NVCC, NO_NVCC = find_nvcc(), "nvcc is there"
except CudaBuildError as error:
    NVCC, NO_NVCC = None, str(error)


def needs_nvcc(test: Test) -> Test:
    """Marks a test of what nvcc makes of the kernels."""
    marked: Test = pytest.mark.skipif(NVCC is None, reason=NO_NVCC)(test)
    return pytest.mark.cuda_check(marked)


def why_not() -> str:
    """Why PTX cannot be interpreted here; empty if it can."""
    if NVCC is None:
        return NO_NVCC
    return "" if can_compile() else NO_COMPILER


def state_of(files: Iterable[Path], *words: str) -> str:
    """A name for the contents of files."""
    digest = hashlib.sha256(" ".join(words).encode())
    for file in sorted(files):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def kernel_files(csrc: Path = CSRC) -> list[Path]:
    """Everything that a kernel file may include."""
    kernels = csrc / "kernels"
    return [*kernels.glob("*.h"), *(f for f in (kernels / "cuda").rglob("*") if f.is_file())]


def _once(results: Sequence[Path], commands: Sequence[Sequence[str]]) -> None:
    """Runs the commands whose result is missing, two at a time; what they say goes beside it."""
    todo = []
    for result, command in zip(results, commands, strict=True):
        if not result.is_file():
            words = " ".join(f"'{word}'" for word in [*command, "-o", f"{result}.part"])
            log = f"{result}.log"
            script = f"{words} >'{log}' 2>&1 || {{ cat '{log}' >&2; exit 1; }}"
            todo.append(["sh", "-c", f"{script}; mv '{result}.part' '{result}'"])
    run_two_at_a_time(todo)


def compile_ptx(
    sources: Sequence[Path], arch: str = "80", csrc: Path = CSRC, more: Sequence[str] = ()
) -> list[Path]:
    """The PTX of .cu files, kept by the state of the sources."""
    assert NVCC is not None
    flags = [*NVCC_FLAGS, "-gencode", f"arch=compute_{arch},code=compute_{arch}", *more]
    folder = BUILD / state_of([*kernel_files(csrc), *sources], *flags)
    folder.mkdir(parents=True, exist_ok=True)
    names = ["_".join(source.parts[-3:]).replace(".cu", "") for source in sources]
    results = [folder / f"{name}.ptx" for name in names]
    commands = [[NVCC, *flags, f"-I{csrc}", "-ptx", str(source)] for source in sources]
    _once(results, commands)
    return results


def assemble(modules: Sequence[Path], arch: str = "80") -> list[tuple[Path, str]]:
    """(cubin, what ptxas -v said) of PTX files."""
    ptxas = str(find_toolkit().root / "bin" / "ptxas")
    results = [module.with_suffix(".cubin") for module in modules]
    commands = [[ptxas, f"-arch=sm_{arch}", "-O3", "-v", str(module)] for module in modules]
    _once(results, commands)
    return [(result, Path(f"{result}.log").read_text()) for result in results]


def build_interpreter(sources: Sequence[Path] = (), csrc: Path = CSRC) -> Path:
    """The interpreter with the product's launching code for these kernels, a shared library."""
    own = [*INTERPRETER.glob("*.cpp"), *INTERPRETER.glob("*.h"), *SHIM.iterdir()]
    folder = BUILD / state_of([*own, *kernel_files(csrc)], CXX, *map(str, sources), *FLAGS)
    result = folder / "interpreter.so"
    if result.is_file():
        return result
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as name:
        work = Path(name)
        commands = []
        flags = [f if f != f"-I{CSRC}" else f"-I{csrc}" for f in FLAGS]
        host = [*sources, csrc / "kernels" / "cuda" / "launch.cpp", SHIM / "call.cpp"]
        files = [(f, INTERPRETER_FLAGS) for f in sorted(INTERPRETER.glob("*.cpp"))]
        if sources:
            files += [(f, HOST_FLAGS) for f in host]
            files.append((SHIM / "simt.cpp", ["-O0"]))
        for k, (file, more) in enumerate(files):
            commands.append([CXX, *flags, *more, "-c", str(file), "-o", str(work / f"{k}.o")])
        run_two_at_a_time(commands)
        objects = [str(work / f"{k}.o") for k in range(len(files))]
        run_two_at_a_time([[CXX, "-shared", *objects, "-ldl", "-o", str(work / result.name)]])
        folder.mkdir(exist_ok=True)
        os.replace(work / result.name, result)
    return result


class Interpreter(Library):
    """Follows commands; every launch runs PTX. Memory of the call's tensors is all there is."""

    def __init__(self, so: Path, modules: Sequence[Path]) -> None:
        if b"ae_call_new" in so.read_bytes():
            super().__init__(so)
        else:
            self.so = ctypes.CDLL(str(so))
        for name in ("ae_ptx_load", "ae_ptx_run", "ae_ptx_last_entry"):
            getattr(self.so, name).restype = ctypes.c_char_p
        self.so.ae_ptx_report.restype = ctypes.POINTER(ctypes.c_uint64)
        self.reverse = False  # the order of warps
        self.reset()
        for module in modules:
            self.load(module.read_text())

    def load(self, text: str) -> None:
        error = self.so.ae_ptx_load(text.encode())
        if error is not None:
            raise RuntimeError(error.decode())

    def reset(self) -> None:
        self.so.ae_ptx_reset(int(self.reverse))

    def allow(self, x: torch.Tensor, writable: bool = True) -> None:
        storage = x.untyped_storage()
        start = storage.data_ptr()
        self.so.ae_ptx_range(
            ctypes.c_uint64(start), ctypes.c_uint64(start + storage.nbytes()), int(writable)
        )

    def report(self) -> dict[str, int]:
        numbers = self.so.ae_ptx_report()
        return {name: numbers[k] for k, name in enumerate(REPORT)}

    def last_entry(self) -> str:
        entry: bytes = self.so.ae_ptx_last_entry()
        return entry.decode()

    def run(self, entry: str, blocks: int, threads: int, shared: int, *words: Any) -> None:
        """An entry whose parameters are pointers and 64-bit integers, by a part of its name."""
        numbers = [w.data_ptr() if isinstance(w, torch.Tensor) else w for w in words]
        error = self.so.ae_ptx_run(
            entry.encode(),
            blocks,
            threads,
            shared,
            (ctypes.c_uint64 * len(words))(*numbers),
            len(words),
        )
        if error is not None:
            raise RuntimeError(error.decode())

    def _follow(self, handle: Any, call: Call, verb: str, name: bytes, values: list[Any]) -> None:
        if verb != "run":
            return super()._follow(handle, call, verb, name, values)
        size = self.so.ae_call_workspace(handle, name)
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
        self.allow(workspace)
        error = self.so.ae_call_run(handle, name, ctypes.c_void_p(workspace.data_ptr()))
        if error is not None:
            raise RuntimeError(error.decode())
        return None

    def __call__(self, call: Call) -> None:
        self.reset()
        for x in call.buffers:
            self.allow(x)
        super().__call__(call)


class Device(Emulator):
    """An emulator whose kernels are PTX."""

    def __init__(self, follow: Interpreter, **limits: int) -> None:
        super().__init__(follow, **limits)
        self.interpreter = follow

    def report(self) -> dict[str, int]:
        return self.interpreter.report()


@functools.cache
def interpreter(sources: tuple[str, ...], arch: str = "80", **limits: int) -> Device:
    """A device for the kernels of some files, named relative to csrc/kernels/cuda."""
    paths = [CUDA / name for name in sources]
    modules = compile_ptx(paths, arch)
    every = sorted(CUDA.glob("*/instances/*.cu"))
    return Device(Interpreter(build_interpreter(every), modules), **limits)
