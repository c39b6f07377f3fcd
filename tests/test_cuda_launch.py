"""How the CUDA kernels are launched, and what nvcc makes of those without tensor cores."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from cuda_build import kernel_flags

from cuda_emulation import CSRC, CXX, NO_COMPILER, ROOT, SHIM, can_compile
from cuda_ptx import NVCC, needs_nvcc

INSTANCES = sorted((CSRC / "kernels" / "cuda" / "simt" / "instances").glob("*.cu"))
ARCHITECTURES = ("80", "90")


@pytest.mark.skipif(not can_compile(), reason=NO_COMPILER)
def test_the_arithmetic_of_launches(tmp_path: Path) -> None:
    """Grids, pieces of grids, packed slots, bias plans, workspaces, shared memory, offsets."""
    program = tmp_path / "launch_test"
    command = [
        *(CXX, "-std=c++20", "-O1", "-w", "-fno-pie", "-no-pie", "-DAE_CUDA_SHIM"),
        *("-fsanitize=undefined", "-fno-sanitize-recover=all", f"-I{CSRC}", f"-I{SHIM}"),
        str(ROOT / "tests" / "cuda" / "launch" / "launch_test.cpp"),
        str(CSRC / "kernels" / "cuda" / "launch.cpp"),
        # Kernels are planned, not run.
        *("-Wl,--unresolved-symbols=ignore-all", "-o", str(program)),
    ]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[-3000:]
    ran = subprocess.run([str(program)], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "0 failures\n"), ran.stdout + ran.stderr


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel for one architecture."""

    file: str
    architecture: str
    name: str
    registers: int
    spills: int  # bytes, stores and loads together


@cache
def kernels() -> list[Kernel]:
    """Every file compiled for every architecture, two at a time."""
    found = []
    running: list[tuple[Path, subprocess.Popen[str]]] = []

    def finish() -> None:
        file, process = running.pop(0)
        _, said = process.communicate()
        assert process.returncode == 0, said[-3000:]
        assert "warning" not in said, said[-3000:]
        parts = re.split(r"Compiling entry function ", said)[1:]
        for part in parts:
            named = re.match(r"'(\w+)' for 'sm_(\w+)'", part)
            spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
            used = re.search(r"Used (\d+) registers", part)
            assert named and spilled and used, part
            bytes_ = int(spilled[1]) + int(spilled[2])
            found.append(Kernel(file.stem, named[2], named[1], int(used[1]), bytes_))

    for file in INSTANCES:
        targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
        command = [
            str(NVCC),
            *kernel_flags(file),
            f"-I{CSRC}",
            *targets,
            "-Xptxas",
            "-v",
            "-c",
            str(file),
        ]
        command += ["-o", os.devnull]
        running.append((file, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
        if len(running) == 2:
            finish()
    while running:
        finish()
    return found


@needs_nvcc
def test_nvcc_compiles_every_file_for_every_architecture() -> None:
    assert len(INSTANCES) == 24  # six passes of four types
    for file in INSTANCES:
        for architecture in ARCHITECTURES:
            assert any((k.file, k.architecture) == (file.stem, architecture) for k in kernels())


@needs_nvcc
def test_two_blocks_fit_beside_each_other_without_spills() -> None:
    """128 registers a thread leave room for two blocks of 256; float64 has one block."""
    for kernel in kernels():
        double = kernel.file.endswith("float64")
        assert kernel.registers <= (255 if double else 128), kernel
        # On sm_90 ptxas keeps up to two registers of the backward kernels' loops in local memory.
        backward = kernel.file.startswith(("keys", "queries")) and kernel.architecture == "90"
        allowed = 24 if backward else 0
        assert kernel.spills <= allowed or double, kernel
