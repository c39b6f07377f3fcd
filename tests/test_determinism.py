"""Bitwise the same result: from run to run, for any number of threads, alone or inside a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attention_ext as ae
from cases import Case, case_named, evaluate, raw

LARGE = [
    Case("plain", 300, 1100, 24, 17, batch=(2,), heads=3),
    Case("one_head", 700, 1300, 16, batch=(1,), heads=1, is_causal=True),
    Case("grouped_bias", 200, 600, 16, heads=4, kv_heads=2, bias="1HLS", sinks=True),
    Case("broadcast_bias", 200, 600, 16, batch=(3,), bias="11LS", mask="BHLS"),
    Case("decode", 1, 4200, 32, batch=(1,), heads=2),
    Case("short_query", 7, 2100, 32, batch=(1,), heads=2, sinks=True, bias="B1LS"),
    case_named("everything", q_len=250, k_len=1100),
]
DTYPES = [torch.float32, torch.bfloat16]


def _all(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every result and gradient, through out, logsumexp and weights."""
    args, kwargs = case.make(dtype, requires_grad=True)
    results = evaluate(ae.attention, args, kwargs, return_lse=True)
    for kind in (True, "mean"):
        more = evaluate(ae.attention, args, kwargs, return_weights=kind)
        results.update({f"{name} with {kind}": x for name, x in more.items()})
    return results


def _assert_equal(got: dict[str, Tensor], want: dict[str, Tensor], label: str) -> None:
    for name, x in want.items():
        assert torch.equal(got[name], x), f"{label}: {name} differs"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_number_of_threads_changes_nothing(case: Case, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    want = _all(case, dtype)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        _assert_equal(_all(case, dtype), want, f"{threads} threads")


@pytest.mark.parametrize("case", LARGE[:3], ids=str)
def test_runs_are_equal(case: Case) -> None:
    want = _all(case, torch.float32)
    for _ in range(3):
        _assert_equal(_all(case, torch.float32), want, "again")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("plain", 150, 700, 24, batch=(3,), heads=4, kv_heads=2, mask="BHLS", bias="B1LS"),
        Case("causal", 150, 150, 16, batch=(3,), is_causal=True, key_mask="bool"),
        Case("window", 150, 300, 16, batch=(3,), window=(40, 5), query_offset="per batch"),
        Case("decode", 1, 2100, 32, batch=(3,), heads=4, kv_heads=1, key_mask="bool"),
        Case("short_query", 6, 1500, 32, batch=(3,), heads=2),
    ],
    ids=str,
)
def test_sample_alone_is_the_sample_in_a_batch(case: Case, dtype: torch.dtype) -> None:
    args, kwargs = case.make(dtype, requires_grad=True)
    more = {"return_lse": True, "return_weights": True}
    whole = evaluate(ae.attention, args, kwargs, **more)
    random = torch.Generator().manual_seed(0)
    incoming = {
        n: torch.randn(whole[n].shape, generator=random).to(whole[n].dtype)
        for n in ("out", "lse", "weights")
    }
    incoming["lse"].masked_fill_(whole["lse"].isinf(), 0)
    names = ("query", "key", "value")

    def gradients(tensors: Any, options: Any, part: slice) -> tuple[Tensor, ...]:
        results = ae.attention(*tensors, **options, **more)
        grads = [incoming[n][part] for n in ("out", "lse", "weights")]
        return (*results, *torch.autograd.grad(results, tensors, grads))

    want = gradients(args, kwargs, slice(None))
    for n in range(3):
        part = slice(n, n + 1)
        one = [x.detach()[part].requires_grad_() for x in args]
        options = {
            name: x[part] if isinstance(x, Tensor) and x.size(0) == 3 else x
            for name, x in kwargs.items()
        }
        got = gradients(one, options, part)
        for name, x, y in zip(("out", "lse", "weights", *names), got, want, strict=True):
            assert torch.equal(x[0], y[n]), f"{name} of sample {n} differs"


@pytest.mark.parametrize("rows", [1, 150])
def test_head_alone_is_the_head_among_others(rows: int) -> None:
    args, _ = Case("heads", rows, 1100, 24, batch=(1,), heads=4).make(torch.float32)
    whole = ae.attention(*args)
    for h in range(4):
        alone = ae.attention(*[x[:, h : h + 1] for x in args])
        assert torch.equal(alone, whole[:, h : h + 1])


@pytest.mark.parametrize("name", ["causal_wide", "mask_full", "bias_of_heads", "decode_mask"])
def test_grad_mode_changes_nothing(name: str) -> None:
    args, kwargs = case_named(name).make(torch.bfloat16, requires_grad=True)
    raw_args, raw_kwargs = raw(args, kwargs)
    want = torch.ops.attention_ext.attention(*raw_args, **raw_kwargs)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            got = torch.ops.attention_ext.attention(*raw_args, **raw_kwargs)
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)
