"""PEP 517 backend: setuptools, plus the question which torch to build against.

pip builds in an isolated environment that hides the one the package will run in. The extension must
be compiled against the very torch that will load it, so `add_torch_to_path` looks there. Only when
that environment has no torch is one asked for as a build requirement (pinned: a bare `torch` would
fetch whatever is newest). setup.py uses the same function, with or without isolation.
"""

from __future__ import annotations

import importlib.util
import os
import site
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (the hooks a front end calls)
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

# Built against when the target environment has no torch; the version the project is tested with.
DEFAULT_TORCH = "torch==2.13.0"


def add_torch_to_path() -> bool:
    """Makes `import torch` find the torch the package will run with; False if there is none."""
    if importlib.util.find_spec("torch") is not None:
        return True
    # Isolation works through PYTHONPATH and a sitecustomize; the same interpreter started with -E
    # sees its own environment again (virtual environment, user and system site-packages included).
    probe = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
    found = subprocess.run(
        [sys.executable, "-E", "-c", probe],
        capture_output=True,
        text=True,
        cwd=os.path.dirname(__file__),
    ).stdout.strip()
    if not found:
        return False
    site.addsitedir(os.path.dirname(os.path.dirname(found)))
    return importlib.util.find_spec("torch") is not None


def _torch_requirement() -> list[str]:
    return [] if add_torch_to_path() else [DEFAULT_TORCH]


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch_requirement()]


def get_requires_for_build_editable(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_torch_requirement()]
