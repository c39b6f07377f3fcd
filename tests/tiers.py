"""The instruction-set tiers of this machine, and how to run a piece of the suite in each.

The op library picks its kernels once per process (ATTENTION_EXT_CPU_CAPABILITY forces a tier), so
another tier always means another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_ext import _build_info
from attention_ext._ops import cpu_capability

ROOT = Path(__file__).resolve().parent.parent
TIER_VARIABLE = "ATTENTION_EXT_CPU_CAPABILITY"
# What tests import beside the package; conftest.py has the same for pytest itself.
OWN_PATHS = [ROOT / "tests", ROOT / "tools"]


def machine_tiers() -> list[str]:
    """The tiers that were built and that this processor can run, weakest first."""
    runs = {
        "baseline": True,
        "avx2": torch.cpu._is_avx2_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
    }
    return [tier for tier in _build_info.TIERS if runs[tier]]


TIERS: list[str] = machine_tiers()
OTHER_TIERS = [tier for tier in TIERS if tier != cpu_capability()]
# For tests of all of them: the one of this process, and the others.
TIER_GROUPS: list[Any] = [[cpu_capability()]]
if OTHER_TIERS:
    TIER_GROUPS.append(pytest.param(OTHER_TIERS, marks=pytest.mark.slow))


def run_python(
    code: str,
    *,
    tier: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float = 300.0,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter that finds attention_ext in cwd, tests/ and tools/.

    Output is captured. With check=True a failure raises AssertionError that shows what it wrote.
    """
    return _run([sys.executable, "-c", code], tier, env, cwd, timeout, check)


def run_pytest(
    *arguments: str,
    tier: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> subprocess.CompletedProcess[str]:
    """Runs `pytest arguments...` in a fresh interpreter, and fails with its output if it fails.

    No test collected is a failure too: pytest's exit status 5.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return _run(command, tier, env, ROOT, timeout, True)


def _run(
    command: list[str],
    tier: str | None,
    env: Mapping[str, str] | None,
    cwd: Path,
    timeout: float,
    check: bool,
) -> subprocess.CompletedProcess[str]:
    full_env = {**os.environ, **(env or {})}
    paths = [str(cwd), *map(str, OWN_PATHS), full_env.get("PYTHONPATH", "")]
    full_env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if tier is not None:
        full_env[TIER_VARIABLE] = tier
    done = subprocess.run(
        command, env=full_env, cwd=cwd, timeout=timeout, capture_output=True, text=True
    )
    if check and done.returncode != 0:
        raise AssertionError(
            f"exit status {done.returncode} of {' '.join(command[:4])} (tier {tier})\n"
            f"{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
        )
    return done
