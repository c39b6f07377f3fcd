"""Runs the whole table of cases through the op in each tier, once, and keeps the results.

A tier belongs to a process, so `results(tier)` starts one that runs every case in every dtype,
forward without gradients and forward and backward with them, and hands the tensors back in a file.
Memory that torch allocates is filled with NaN there: a number that no kernel wrote shows.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attention_ext as ae
from attention_ext import reference
from cases import CASES, DTYPES, PACKED_CASES, Case, PackedCase, evaluate, truth_and_plain
from tiers import run_python

Results = dict[str, Tensor]
ALL: list[Case | PackedCase] = [*CASES, *PACKED_CASES]


def run_table(path: str) -> None:
    """Writes {(name, dtype): (forward, forward and backward) or what was raised}."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    table: dict[tuple[str, str], Any] = {}
    for case in ALL:
        op = ae.attention if isinstance(case, Case) else ae.varlen_attention
        for dtype in DTYPES:
            try:
                args, kwargs = case.make(dtype)
                forward = evaluate(op, args, kwargs, return_lse=True)
                args, kwargs = case.make(dtype, requires_grad=True)
                both = evaluate(op, args, kwargs, return_lse=True)
                table[case.name, str(dtype)] = (forward, both)
            except RuntimeError as error:
                table[case.name, str(dtype)] = str(error)
    torch.save(table, path)


@functools.cache
def results(tier: str) -> dict[tuple[str, str], Any]:
    """What `run_table` wrote in a process that runs this tier's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.pt"
        run_python(f"import tables; tables.run_table({str(path)!r})", tier=tier, timeout=900)
        table: dict[tuple[str, str], Any] = torch.load(path)
    return table


def result(tier: str, case: Case | PackedCase, dtype: torch.dtype) -> tuple[Results, Results]:
    """(forward, forward and backward) of one case in one tier."""
    found = results(tier)[case.name, str(dtype)]
    assert not isinstance(found, str), f"{tier}: {found}"
    pair: tuple[Results, Results] = found
    return pair


@functools.cache
def expected(case: Case | PackedCase, dtype: torch.dtype) -> tuple[Results, Results]:
    """`truth_and_plain` of a case, forward and backward: computed once, used for every tier."""
    args, kwargs = case.make(dtype, requires_grad=True)
    oracle = reference.attention if isinstance(case, Case) else reference.varlen_attention
    return truth_and_plain(args, kwargs, oracle, return_lse=True)
