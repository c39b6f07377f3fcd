"""python -m benchmarks.microkernels: each register-tile instance in percent of the peak, by tier.

Compiles benchmarks/microkernels.cpp with the very flags of the kernels and runs it in every tier
that this machine has, so that a compiler which spoils one instance is seen.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tiers import machine_tiers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from compile_flags import KERNEL_FLAGS, TIER_FLAGS  # noqa: E402

SOURCES = ("benchmarks/microkernels.cpp", "csrc/kernels/cpu/tiers/peak.cpp")


def run_tier(tier: str, folder: Path) -> str:
    """What the program printed, compiled for this tier."""
    program = folder / tier
    command = [os.environ.get("CXX", "g++"), "-std=c++20", *KERNEL_FLAGS, *TIER_FLAGS[tier]]
    command += [f"-DATTENTION_EXT_TIER={tier}", f"-I{ROOT / 'csrc'}"]
    command += [*(str(ROOT / source) for source in SOURCES), "-o", str(program)]
    subprocess.run(command, check=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.microkernels", description=__doc__)
    parser.add_argument("--tier", choices=machine_tiers(), help="one tier only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for tier in [arguments.tier] if arguments.tier else machine_tiers():
            print(f"{tier}\n{run_tier(tier, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
