"""The weights of return_weights: values, dropout, mean over heads, and gradients through them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_ext as ae
from attention_ext import reference
from cases import (
    CASES,
    DTYPES,
    Case,
    assert_accurate,
    case_named,
    differentiable,
    evaluate,
    truth_and_plain,
)

NAMED = [
    "tiny",
    "odd",
    "unbatched",
    "two_batch_dims",
    "two_tiles_odd",
    "decode_odd",
    "short_query",
    "heads_last",
    "strided",
    "expanded",
    "grouped",
    "mask_full",
    "key_mask_float",
    "bias_of_heads",
    "bias_grouped",
    "causal_tall",
    "window",
    "offset_per_batch",
    "softcap",
    "sinks",
    "alibi_per_batch",
    "scale_zero",
    "dropout_masked",
    "everything",
    "everything_decode",
]


@pytest.mark.parametrize("kind", [True, "mean"], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_weights_and_their_gradients_are_accurate(name: str, dtype: torch.dtype, kind: Any) -> None:
    """The loss is a function of out, logsumexp and weights at once."""
    args, kwargs = case_named(name).make(dtype, requires_grad=True)
    more = {"return_lse": True, "return_weights": kind}
    truth, plain = truth_and_plain(args, kwargs, **more)
    got = evaluate(ae.attention, args, kwargs, **more)
    assert got["weights"].dtype == dtype
    assert got["weights"].is_contiguous()
    assert_accurate(got, truth, plain)


def only_weights(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def weights(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = function(*args, **kwargs)[1]
        return result

    return weights


@pytest.mark.parametrize("kind", [True, "mean"], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", ["LS", "111S", "BHLS"])
def test_a_mean_of_the_incoming_gradient_costs_nothing(
    bias: str, dtype: torch.dtype, kind: Any
) -> None:
    """A constant for every row of it cancels, but only before anything is rounded to 16 bits."""
    case = Case("mean", 64, 64, 32, heads=4, bias=bias, hidden_bias=False, sinks=True)
    args, kwargs = case.make(dtype, requires_grad=True)
    kwargs["return_weights"] = kind
    got = evaluate(only_weights(ae.attention), args, kwargs, shift=4.0)
    function = only_weights(reference.attention)
    assert_accurate(got, *truth_and_plain(args, kwargs, function, shift=4.0))


@pytest.mark.parametrize("kind", [True, "mean"], ids=str)
@pytest.mark.parametrize("name", ["sinks", "bias_of_batch", "dropout", "window", "decode_bias"])
def test_weights_alone_have_gradients(name: str, kind: Any) -> None:
    """The loss is of weights alone: value gets no gradient."""
    args, kwargs = case_named(name).make(torch.float64, requires_grad=True)
    leaves = list(differentiable(args, kwargs).values())
    got, want = (
        torch.autograd.grad(
            f(*args, **kwargs, return_weights=kind)[1].sin().sum(), leaves, allow_unused=True
        )
        for f in (ae.attention, reference.attention)
    )
    for x, y in zip(got, want, strict=True):
        if y is None or x is None:
            assert (x is None or (x == 0).all()) and (y is None or (y == 0).all())
        else:
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["everything", "dropout", "grouped"])
def test_weights_times_values_are_the_output(name: str) -> None:
    """After dropout, as torch's module returns them."""
    args, kwargs = case_named(name).make(torch.float64)
    out, weights = ae.attention(*args, **kwargs, return_weights=True)
    group = args[0].size(1) // args[2].size(1)
    torch.testing.assert_close(weights @ args[2].repeat_interleave(group, 1), out)
    mean = ae.attention(*args, **kwargs, return_weights="mean")[1]
    torch.testing.assert_close(mean, weights.mean(1))


def test_rows_sum_to_one_and_sinks_take_the_rest() -> None:
    (q, k, v), _ = Case("sum", 70, 130, 8).make(torch.float32)
    weights = ae.attention(q, k, v, return_weights=True)[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 70))
    sinks = torch.tensor([0.5, 5.0])
    _, lse, weights = ae.attention(q, k, v, sinks=sinks, return_lse=True, return_weights=True)
    rest = (sinks[:, None] - lse).exp()
    torch.testing.assert_close(weights.sum(-1), 1 - rest)


@pytest.mark.parametrize("kind", [True, "mean"], ids=str)
def test_dead_rows_have_zero_weights_and_gradients(kind: Any) -> None:
    args, _ = Case("dead", 40, 130, 8).make(torch.float64, requires_grad=True)
    mask = torch.rand(40, 130) > 0.5
    mask[::3] = False
    weights = ae.attention(*args, mask, return_weights=kind)[1]
    assert (weights[..., ::3, :] == 0).all()
    gradients = torch.autograd.grad(weights[..., ::3, :].sum(), args, allow_unused=True)
    assert all(g is None or (g == 0).all() for g in gradients)


@pytest.mark.parametrize("kind", [True, "mean"], ids=str)
def test_large_scores_keep_the_weights_accurate(kind: Any) -> None:
    """At scores of 1e4 logsumexp alone would be off by 5e-4."""
    (q, k, v), _ = Case("far", 40, 130, 8).make(torch.float32, requires_grad=True)
    kwargs = {"attn_bias": torch.full((40, 130), 1e4)}
    more = {"return_weights": kind}
    got = evaluate(ae.attention, (q, k, v), kwargs, **more)
    assert_accurate(got, *truth_and_plain((q, k, v), kwargs, **more))
    weights = got["weights"]
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rows", [1, 40])
def test_hidden_nan_leaves_the_weights_alone(rows: int) -> None:
    args, _ = Case("nan", rows, 130, 8).make(torch.float64, requires_grad=True)
    mask = torch.rand(rows, 130) > 0.5
    mask[:, 60] = False
    with torch.no_grad():
        args[1][:, :, 60] = math.nan
    got, want = (
        evaluate(f, args, {"attn_mask": mask}, return_weights=True)
        for f in (ae.attention, reference.attention)
    )
    for name, x in want.items():
        if name != "out":  # the value is NaN in neither
            torch.testing.assert_close(got[name], x, msg=lambda text, n=name: f"{n}: {text}")
    assert got["weights"].isfinite().all()
    assert (got["grad_key"][:, :, 60] == 0).all()


def test_names_are_of_the_table() -> None:
    assert set(NAMED) <= {case.name for case in CASES}


@pytest.mark.parametrize(
    ("rows", "group"), [(1, 1), (2, 1), (4, 1), (5, 1), (17, 1), (97, 1), (1, 8), (1, 16), (2, 16)]
)
def test_weights_sum_to_one_however_large_the_scores(rows: int, group: int) -> None:
    """Scores are rebuilt with the bits the forward pass had: exp(s - logsumexp) shows any other."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (
        torch.randn(1, h, n, 24, generator=generator) * size
        for h, n, size in ((2 * group, rows, 60.0), (2, 130, 60.0), (2, 130, 1.0))
    )
    _, weights = ae.attention(q, k, v, return_weights=True)
    assert float((q @ k.repeat_interleave(group, 1).mT).abs().max()) / 24**0.5 > 1e3
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2 * group, rows), rtol=0, atol=1e-6)
