"""The kernels alone, without torch, under sanitizers: tests/cpp/kernels_test.cpp."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from compile_flags import TIER_FLAGS

from tiers import TIERS

ROOT = Path(__file__).resolve().parent.parent

SOURCES = ["forward", "backward", "weights", "peak", "table"]
SANITIZERS = {
    "address,undefined": ["-fno-sanitize-recover=all"],
    "thread": [],
}

# Of the tiers of this machine that differ most; the others compile the same sources.
RUNS = [
    ("address,undefined", "avx2" if "avx2" in TIERS else "baseline"),
    *(("address,undefined", tier) for tier in TIERS if tier == "avx512_bf16"),
    ("thread", "baseline"),
]


def build(folder: Path, tier: str, sanitizer: str) -> Path:
    """Compiles the tier's kernels and the test, two files at a time."""
    compiler = os.environ.get("CXX", "g++")
    common = [
        *("-std=c++20", "-O1", "-g1", "-ffp-contract=off", "-pthread", "-w"),
        *(f"-fsanitize={sanitizer}", *SANITIZERS[sanitizer]),
        *(f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'cpp'}"),
    ]
    kernels = [ROOT / "csrc" / "kernels" / "cpu" / "tiers" / f"{name}.cpp" for name in SOURCES]
    files = [(tier, ROOT / "tests" / "cpp" / "kernels_test.cpp")]
    # avx512_bf16 calls avx512's kernels for all types but bfloat16.
    for one in ("avx512", tier) if tier == "avx512_bf16" else (tier,):
        files += [(one, file) for file in kernels]
    running: list[subprocess.Popen[str]] = []
    objects = []
    for one, file in files:
        objects.append(folder / f"{file.stem}.{one}.o")
        flags = [*common, *TIER_FLAGS[one], f"-DATTENTION_EXT_TIER={one}"]
        command = [compiler, *flags, "-c", str(file), "-o", str(objects[-1])]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        if len(running) == 2:
            finish(running.pop(0))
    for process in running:
        finish(process)
    program = folder / "kernels_test"
    subprocess.run([compiler, *common, *map(str, objects), "-o", str(program)], check=True)
    return program


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate()
    assert process.returncode == 0, errors[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags are for x86-64")
@pytest.mark.parametrize(("sanitizer", "tier"), RUNS)
def test_kernels_are_right_and_clean_under_sanitizers(
    sanitizer: str, tier: str, tmp_path: Path
) -> None:
    program = build(tmp_path, tier, sanitizer)
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert ran.stdout.endswith(f"0 failures in tier {tier}\n")
