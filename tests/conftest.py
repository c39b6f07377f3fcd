"""What every test shares: equal seeds, the number of threads put back, no network."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import attention_ext  # noqa: F401  (a broken build fails here, once, with the loader's explanation)

os.environ.setdefault("HF_HUB_OFFLINE", "1")


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
