"""What every test shares: equal seeds, the number of threads put back, no network, no old cache;
and the build's own modules (tools/), which tests of the build import."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import attention_ext  # noqa: F401  (a broken build fails here, once, with the loader's explanation)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

# Inductor's cache on disk knows nothing of our schemas: graphs of an older build would be reused.
_inductor_cache = tempfile.TemporaryDirectory(prefix="inductor-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _inductor_cache.name


@pytest.fixture(autouse=True)
def _equal_start() -> Iterator[None]:
    """Every test draws the same random numbers whatever ran before it, and leaves no trace."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def pytest_report_header() -> list[str]:
    """Says on top of the report what is being tested."""
    from attention_ext import __main__ as build_report

    return build_report.report().splitlines()
