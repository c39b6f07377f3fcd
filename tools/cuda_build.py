"""Everything setup.py knows of CUDA: whether it is built, with which toolkit, for what devices.

Nothing here asks for a device, so that a machine without one builds for those that have.
Environment:
    ATTENTION_EXT_CUDA        auto (the default): if torch is a CUDA build and its toolkit is there;
                              on: else end with the reason; off: never
    ATTENTION_EXT_CUDA_ARCHS  devices, "80 90+PTX" by default; +PTX serves newer ones, too
    NVCC                      the compiler driver; else $CUDA_HOME/bin/nvcc, then the PATH's
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

# sm_80 runs on every device of compute capability 8.x, sm_90 on 9.0; PTX of 9.0 is compiled by the
# driver for what comes later.
DEFAULT_ARCHS = "80 90+PTX"

# The flags that give the kernels' code; the tests' PTX and cubins are made with the same.
NVCC_FLAGS = ["-std=c++20", "-O3"]
# SIMT kernels fuse a product where the source says fma and nowhere else, so that every pass
# rebuilds the same bits.
SIMT_FLAGS = ["-fmad=false"]


class CudaBuildError(Exception):
    """CUDA cannot be built; the message is the reason."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its compiler driver, its root folder, its version."""

    nvcc: str
    root: Path
    version: str  # "13.0"

    @property
    def include_dir(self) -> Path:
        return self.root / "include"

    @property
    def runtime(self) -> Path:
        """The runtime library, the shared one: torch's copy of it must serve both."""
        places = ("lib64", "lib", "targets/*/lib")
        matches = [m for place in places for m in self.root.glob(f"{place}/libcudart.so")]
        if not matches:
            raise CudaBuildError(f"{self.root} has no libcudart.so")
        return matches[0]


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise CudaBuildError(f"{command[0]} cannot be run: {error}") from error
    return done.stdout + done.stderr


def find_nvcc() -> str:
    """The path of nvcc."""
    wish = os.environ.get("NVCC")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [wish] if wish else [f"{home}/bin/nvcc"] if home else ["nvcc"]
    found = [path for path in map(shutil.which, places) if path is not None]
    if not found and not wish and not home:
        found = [path for path in [shutil.which("/usr/local/cuda/bin/nvcc")] if path is not None]
    if not found:
        raise CudaBuildError(f"no nvcc: {places[0]} is not found")
    return found[0]


def find_toolkit() -> Toolkit:
    """The toolkit that nvcc itself says it belongs to: links and wrappers don't mislead it."""
    nvcc = find_nvcc()
    # The file is not read: nvcc only says what it would do.
    top = re.search(r"^#\$ TOP=(.+)$", _output(nvcc, "--dryrun", "none.cu"), re.MULTILINE)
    version = re.search(r"release (\d+\.\d+)", _output(nvcc, "--version"))
    if top is None or version is None:
        raise CudaBuildError(f"{nvcc} does not say where its toolkit is")
    return Toolkit(nvcc, Path(top.group(1).strip()).resolve(), version.group(1))


def decide(torch_cuda: str | None) -> tuple[Toolkit | None, str]:
    """(the toolkit to build with, "") or (None, why CUDA is not built).

    torch_cuda is torch.version.cuda. Raises CudaBuildError with ATTENTION_EXT_CUDA=on.
    """
    wish = os.environ.get("ATTENTION_EXT_CUDA", "auto")
    if wish not in ("auto", "on", "off"):
        raise CudaBuildError(f"ATTENTION_EXT_CUDA must be auto, on or off, got {wish!r}")
    if wish == "off":
        return None, "ATTENTION_EXT_CUDA=off"
    try:
        if torch_cuda is None:
            raise CudaBuildError("torch is a CPU build (torch.version.cuda is None)")
        toolkit = find_toolkit()
        if toolkit.version.split(".")[0] != torch_cuda.split(".")[0]:
            raise CudaBuildError(
                f"nvcc is of CUDA {toolkit.version} ({toolkit.root}), torch of CUDA {torch_cuda}: "
                "their major versions must be equal"
            )
        if not (toolkit.include_dir / "cuda_runtime.h").is_file():
            raise CudaBuildError(f"{toolkit.include_dir}/cuda_runtime.h is missing")
        _ = toolkit.runtime
    except CudaBuildError as error:
        if wish == "on":
            raise CudaBuildError(
                f"ATTENTION_EXT_CUDA=on, but a CUDA build is not possible: {error}"
            ) from error
        return None, str(error)
    return toolkit, ""


def arch_flags(archs: str | None = None) -> list[str]:
    """nvcc's -gencode flags for a list such as "80 90+PTX" ("8.0;9.0+PTX" means the same)."""
    text = archs if archs is not None else os.environ.get("ATTENTION_EXT_CUDA_ARCHS", "")
    flags = []
    for name in re.split(r"[\s,;]+", text.strip() or DEFAULT_ARCHS):
        found = re.fullmatch(r"(\d+)\.?(\d)([af]?)(\+PTX)?", name)
        if found is None or int(found.group(1) + found.group(2)) < 80:
            raise CudaBuildError(
                "ATTENTION_EXT_CUDA_ARCHS must list devices of 8.0 and newer, such as "
                f"'{DEFAULT_ARCHS}', got {name!r}"
            )
        arch = "".join(found.group(1, 2, 3))
        codes = f"sm_{arch},compute_{arch}" if found.group(4) else f"sm_{arch}"
        # nvcc takes a list of codes only in brackets.
        flags += ["-gencode", f"arch=compute_{arch},code=[{codes}]"]
    return flags


def kernel_flags(source: Path) -> list[str]:
    """The flags that give the code of one file of kernels."""
    return [*NVCC_FLAGS, *(SIMT_FLAGS if "simt" in source.parts else [])]


def nvcc_flags(source: Path, cxx: str, csrc: Path) -> list[str]:
    """All flags of one file of kernels; torch's headers are not among what it sees."""
    host = "-fPIC,-fvisibility=hidden"
    return [*kernel_flags(source), *arch_flags(), f"-ccbin={cxx}", "-Xcompiler", host, f"-I{csrc}"]


def link_flags(toolkit: Toolkit) -> list[str]:
    """c10's and torch's CUDA halves, the runtime, and where its file lies beside torch."""
    major = toolkit.version.split(".")[0]
    return [
        *("-Wl,--no-as-needed", "-lc10_cuda", "-ltorch_cuda", "-Wl,--as-needed"),
        str(toolkit.runtime),
        # For programs that have not loaded torch's libraries when they load ours.
        f"-Wl,-rpath,$ORIGIN/../nvidia/cu{major}/lib",
    ]
