"""Builds for CUDA in an environment of its own, beside the usual build; tests what needs no GPU.

    python tools/cuda_check.py [--torch torch==2.14.1] [--archs 80]

Makes build/cuda_check: an environment with a CUDA build of torch (5.5 GB), a copy of this tree, and
in it the library, which links and loads; then runs the tests that concern such a build, and some of
the CPU's in the same library. Prints why and ends well where nvcc or the disk's room is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import cuda_build

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "cuda_check"
NEEDED_BYTES = 12 << 30
PACKAGES = ["setuptools>=77", "ninja", "nlohmann_json", "numpy", "pytest>=8"]
PACKAGES += ["hypothesis", "expecttest"]
CUDA_TESTS = ["tests/test_cuda_build.py", "tests/test_cuda_device.py"]
CPU_TESTS = ["tests/test_errors.py", "tests/test_opcheck.py", "tests/test_dropout.py"]


def why_not() -> str:
    """Why the check cannot run here; empty if it can."""
    try:
        cuda_build.find_toolkit()
    except cuda_build.CudaBuildError as error:
        return str(error)
    if (FOLDER / "env").is_dir():
        return ""
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        return f"{free >> 30} GB are free on the disk, {NEEDED_BYTES >> 30} are needed"
    return ""


def run(what: str, *command: str, cwd: Path = ROOT, **env: str) -> None:
    """Runs a step, and says how long it took."""
    print(f"cuda-check: {what}", flush=True)
    start = time.monotonic()
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env})
    print(f"cuda-check: {time.monotonic() - start:.0f} s", flush=True)
    if done.returncode:
        raise SystemExit(f"cuda-check: failed: {what}")


def make_environment(torch: str) -> Path:
    """The environment's Python; installs what a stamp does not say is there."""
    python = FOLDER / "env" / "bin" / "python"
    stamp = FOLDER / "env" / "installed.txt"
    wanted = "\n".join([torch, *PACKAGES])
    if not stamp.is_file() or stamp.read_text() != wanted:
        run("making the environment", sys.executable, "-m", "venv", str(FOLDER / "env"))
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        run(f"installing {torch}", *pip, torch, *PACKAGES)
        stamp.write_text(wanted)
    return python


def copy_tree() -> Path:
    """A copy of the files that git knows or would add; unchanged ones keep their dates."""
    tree = FOLDER / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    names = {name for name in listed if name and (ROOT / name).is_file()}
    for name in names:
        source, target = ROOT / name, tree / name
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    for path in (tree / "csrc").rglob("*"):
        if path.is_file() and path.relative_to(tree).as_posix() not in names:
            path.unlink()
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="torch==2.14.1", help="a CUDA build of torch")
    parser.add_argument(
        "--archs", default="80", help="devices to compile for (few: this is a check)"
    )
    arguments = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"cuda-check: not run: {reason}")
        return
    python = str(make_environment(arguments.torch))
    tree = copy_tree()
    run(
        f"building for {arguments.torch} and devices {arguments.archs}",
        *(python, "setup.py", "-q", "build_ext", "--inplace"),
        cwd=tree,
        ATTENTION_EXT_CUDA="on",
        ATTENTION_EXT_CUDA_ARCHS=arguments.archs,
    )
    pytest = [python, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    run("testing the CUDA build", *pytest, *CUDA_TESTS, cwd=tree)
    run("testing the CPU half", *pytest, *CPU_TESTS, cwd=tree)


if __name__ == "__main__":
    main()
