"""Loads the op library once, after torch, and explains itself when it can't.

Called by attention_ext/__init__.py before anything else; from then on torch.ops.attention_ext.*
exist.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from pathlib import Path

import torch

PACKAGE_DIR = Path(__file__).resolve().parent
LIBRARY = PACKAGE_DIR / "_C.abi3.so"

_REBUILD = """  Either build it for this torch:
      pip install --no-build-isolation .        (in the source tree)
  or install the torch it was built for:
      pip install 'torch=={built_for}'"""


def _minor(version: str) -> str:
    """'2.13.0+cpu' -> '2.13': what torch's C++ ABI is promised for."""
    found = re.match(r"\d+\.\d+", version)
    return found.group() if found else version


def check_torch(built_for: str, cxx11_abi: bool, running: str, running_abi: bool) -> None:
    """Raises ImportError unless a library built for one torch can be loaded into another."""
    if _minor(built_for) != _minor(running):
        raise ImportError(
            "attention_ext was built for another torch.\n"
            f"  built for: torch {built_for}\n"
            f"  you have:  torch {running} ({Path(torch.__file__).parent})\n"
            + _REBUILD.format(built_for=built_for.split("+")[0])
        )
    if cxx11_abi != running_abi:
        raise ImportError(
            "attention_ext was built for another C++ ABI.\n"
            f"  built for: torch {built_for} with cxx11 ABI {cxx11_abi}\n"
            f"  you have:  torch {running} with cxx11 ABI {running_abi}\n"
            + _REBUILD.format(built_for=built_for.split("+")[0])
        )


def _registered() -> bool:
    """True if some library has already defined our ops in this process."""
    return bool(torch._C._dispatch_has_kernel("attention_ext::attention"))


def _resident() -> bool:
    """True if this very file is in the process, whoever loaded it."""
    try:
        ctypes.CDLL(str(LIBRARY), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


def load() -> None:
    """Loads the library unless this very file is loaded already (reloading the package is fine)."""
    if _resident():
        return
    if not LIBRARY.is_file() or importlib.util.find_spec("attention_ext._build_info") is None:
        raise ImportError(
            "attention_ext's compiled library is missing.\n"
            f"  looked for: {LIBRARY}\n"
            "  In the source tree, build it with one of:\n"
            "      make test                               (creates .venv and does everything)\n"
            "      pip install --no-build-isolation -e .   (into the active environment)\n"
            "      python setup.py build_ext --inplace     (the library alone)"
        )
    from attention_ext import _build_info

    check_torch(
        _build_info.TORCH_VERSION,
        _build_info.CXX11_ABI,
        str(torch.__version__),
        bool(torch.compiled_with_cxx11_abi()),
    )
    if _registered():
        loaded: set[str] = torch.ops.loaded_libraries
        others = ", ".join(sorted(path for path in loaded if Path(path).name == LIBRARY.name))
        raise ImportError(
            "attention_ext's ops are already registered in this process by another copy.\n"
            f"  loaded:   {others or 'unknown (not loaded through torch.ops.load_library)'}\n"
            f"  this one: {LIBRARY}\n"
            "  Keep one copy on sys.path (pip uninstall attention_ext removes the installed one)."
        )
    try:
        torch.ops.load_library(str(LIBRARY))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(
            "attention_ext's compiled library could not be loaded.\n"
            f"  built for: torch {_build_info.TORCH_VERSION}, {_build_info.COMPILER}\n"
            f"  you have:  torch {torch.__version__}\n"
            f"  the loader said: {error}\n" + _REBUILD.format(built_for=torch.__version__)
        ) from error
