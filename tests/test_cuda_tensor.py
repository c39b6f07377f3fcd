"""The tensor-core kernels' own source on the host, through the SIMT shim: a wide table of cases.

test_cuda_ptx.py runs few of them as nvcc compiled them; here are all that cases.py has and tensor
cores take, with heads of 64, 128, 256 and odd multiples of 8 below, against float64.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cases import CASES, Case, assert_accurate, evaluate, truth_and_plain
from cuda_emulation import (
    NO_COMPILER,
    Emulator,
    can_compile,
    emulator,
    sanitized,
)

pytestmark = [
    pytest.mark.slow,  # compiling takes most of a minute
    pytest.mark.skipif(not can_compile(), reason=NO_COMPILER),
]

# Layouts whose rows cannot be copied 16 bytes at a time go to the SIMT kernels.
TAKEN = ("contiguous", "heads_last", "expanded")


def fitting(size: int, value_size: int) -> list[Case]:
    """All cases of the table that tensor cores take, with these head sizes."""
    return [
        replace(
            case,
            name=f"{case.name}-{size}",
            size=size,
            value_size=None if case.value_size is None else value_size,
        )
        for case in CASES
        if case.layout in TAKEN and len(case.batch) < 2 and case.q_len * case.k_len < 90_000
    ]


NARROW, MIDDLE, WIDE = fitting(64, 40), fitting(72, 104), fitting(128, 144)
TABLE = [
    *((case, (torch.bfloat16, torch.float16)[n % 2]) for n, case in enumerate(NARROW)),
    *((case, (torch.float16, torch.bfloat16)[n % 2]) for n, case in enumerate(MIDDLE[1::3])),
    *((case, (torch.float16, torch.bfloat16)[n % 2]) for n, case in enumerate(WIDE[::3])),
]


@pytest.mark.parametrize(("case", "dtype"), TABLE, ids=str)
def test_every_option_is_accurate(case: Case, dtype: torch.dtype) -> None:
    args, kwargs = case.make(dtype, requires_grad=True)
    truth, plain = truth_and_plain(args, kwargs, return_lse=True)
    ours = evaluate(emulator().attention, args, kwargs, return_lse=True)
    assert_accurate(ours, truth, plain, case.name)


def test_such_calls_run_on_the_tensor_core_kernels() -> None:
    """36 KiB of shared memory are enough for theirs and too little for the SIMT kernels."""
    args, kwargs = NARROW[2].make(torch.bfloat16)
    small = Emulator(emulator().follow, shared_memory=36 * 1024)
    small.attention(*args, **kwargs)
    with pytest.raises(RuntimeError, match="shared memory"):
        small.attention(*(x.float() for x in args), **kwargs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_the_lowest_number_are_uniform(dtype: torch.dtype) -> None:
    """finfo.min in a float32 bias is a number, forward and backward; -inf beside it hides."""
    random = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, 70, 64, generator=random).to(dtype) for _ in range(3))
    bias = torch.zeros(70, 70)
    bias[3] = torch.finfo(torch.float32).min
    bias[3, 50:] = -torch.inf
    args = tuple(x.requires_grad_() for x in (q, k, v))
    kwargs = {"attn_bias": bias.requires_grad_()}
    out = emulator().attention(*args, **kwargs)
    uniform = v[0, 0, :50].float().mean(0)
    assert (out[0, 0, 3].float() - uniform).abs().max() < 0.01
    truth, plain = truth_and_plain(args, kwargs)
    assert_accurate(evaluate(emulator().attention, args, kwargs), truth, plain, "lowest")


@pytest.mark.parametrize(("rows", "keys"), [(66, 66), (2, 600)], ids=["whole", "split keys"])
def test_infinite_scores_are_those_of_softmax(rows: int, keys: int) -> None:
    q, k, v = (torch.ones(1, 1, n, 64).bfloat16() for n in (rows, keys, keys))
    k[..., 5, :] = torch.inf  # row 0: inf - inf; row 1, of the other sign: no weight at all
    q[..., 1, :] = -1
    out, lse = emulator().attention(q, k, v, return_lse=True)
    assert out[..., 0, :].isnan().all()
    assert lse[..., 0].isnan().all()
    assert torch.equal(out[..., 1, :], torch.ones_like(out[..., 1, :]))


def test_dropout_of_a_shard_is_that_of_the_whole() -> None:
    """Also where a shard begins inside a group of eight keys."""
    q, k, v = (torch.randn(1, 2, 70, 64).bfloat16() for _ in range(3))
    for first in (0, 8, 13):
        state = torch.tensor([5, 6, 0, 0, 3, first])
        found = emulator().attention(q, k, v, dropout_p=0.4, rng_state=state)
        simt = Emulator(emulator().follow, major=7)
        want = simt.attention(q, k, v, dropout_p=0.4, rng_state=state)
        assert (found.float() - want.float()).abs().max() < 0.03


SANITIZED = ("everything-64", "mask_full-64", "grouped-64", "causal_bottom_right-64")


@sanitized
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize("name", SANITIZED)
def test_sanitizers_find_nothing(name: str, sanitizer: str) -> None:
    case = next(case for case in NARROW if case.name == name)
    args, kwargs = case.make(torch.float16, requires_grad=True)
    truth, plain = truth_and_plain(args, kwargs, return_lse=True)
    ours = evaluate(emulator(sanitizer).attention, args, kwargs, return_lse=True)
    assert_accurate(ours, truth, plain, case.name)
