"""Gradients of all five inputs that have one: the table in every tier, then promise by promise."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_ext as ae
from attention_ext import reference
from cases import (
    DTYPES,
    Case,
    PackedCase,
    assert_accurate,
    case_named,
    differentiable,
    evaluate,
    gradients_with_dead_rows,
    params,
    truth_and_plain,
)
from tables import ALL, expected, result
from test_forward import HIDING, _hiding
from tiers import TIER_GROUPS

NAMES = ("query", "key", "value", "attn_bias", "sinks")


@pytest.mark.parametrize("tiers", TIER_GROUPS, ids="+".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", params(ALL))
def test_table_is_accurate_in_every_tier(
    case: Case | PackedCase, dtype: torch.dtype, tiers: list[str]
) -> None:
    truth, plain = expected(case, dtype)
    for tier in tiers:
        _, both = result(tier, case, dtype)
        assert_accurate(both, truth, plain, tier)
        for name, x in both.items():
            assert x.dtype == dtype or name in ("lse", "grad_attn_bias"), name


def _gradients(
    leaves: dict[str, Tensor], kwargs: dict[str, Any], function: Any = ae.attention
) -> dict[str, Tensor]:
    """Gradients of a sum of squares of out and of logsumexp, of the leaves that require them."""
    out, lse = function(**leaves, **kwargs, return_lse=True)
    loss = out.double().square().sum() + lse.double().masked_fill(lse.isinf(), 0).square().sum()
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


@pytest.mark.parametrize("subset", list(itertools.product([False, True], repeat=5))[1:], ids=str)
def test_any_subset_may_require_grad(subset: tuple[bool, ...]) -> None:
    case = Case("subset", 33, 97, 8, bias="1HLS", sinks=True, dead_rows=True)
    args, kwargs = case.make(torch.float64)
    leaves = differentiable(args, kwargs)
    every = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    want = _gradients(every, {}, reference.attention)
    some = {n: leaves[n].detach().requires_grad_(s) for n, s in zip(NAMES, subset, strict=True)}
    got = _gradients(some, {})
    assert list(got) == [n for n, s in zip(NAMES, subset, strict=True) if s]
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-9, atol=1e-11)


def test_nothing_requires_grad() -> None:
    args, kwargs = case_named("everything").make(torch.float32)
    results = ae.attention(*args, **kwargs, return_lse=True, return_weights=True)
    assert not any(x.requires_grad for x in results)


def test_logsumexp_alone_has_a_gradient() -> None:
    args, kwargs = Case("lse", 33, 97, 8, sinks=True, bias="1HLS").make(
        torch.float64, requires_grad=True
    )
    leaves = list(differentiable(args, kwargs).values())
    got, want = (
        torch.autograd.grad(
            f(*args, **kwargs, return_lse=True)[1].sin().sum(), leaves, allow_unused=True
        )
        for f in (ae.attention, reference.attention)
    )
    for x, y in zip(got, want, strict=True):
        x = torch.zeros_like(leaves[2]) if x is None else x
        y = torch.zeros_like(leaves[2]) if y is None else y
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["expanded", "strided", "columns", "heads_last"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_incoming_gradient_may_have_any_strides(dtype: torch.dtype, kind: str) -> None:
    args, _ = Case("incoming", 33, 97, 24).make(dtype, requires_grad=True)
    out = ae.attention(*args)
    x = torch.randn(out.shape).to(dtype)
    if kind == "expanded":
        x = torch.tensor(0.5, dtype=dtype).expand(out.shape)
    elif kind == "strided":
        x = torch.stack([x, x], -1)[..., 1]
    elif kind == "columns":
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    else:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    got = torch.autograd.grad(out, args, x, retain_graph=True)
    want = torch.autograd.grad(out, args, x.clone(memory_format=torch.contiguous_format))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_expanded_key_and_value_sum_over_the_heads_that_share_them() -> None:
    q = torch.randn(2, 4, 20, 8, dtype=torch.float64)
    shared = torch.randn(2, 1, 30, 8, dtype=torch.float64, requires_grad=True)
    got, want = (
        torch.autograd.grad(f(q, *[shared.expand(2, 4, 30, 8)] * 2).sin().sum(), shared)[0]
        for f in (ae.attention, reference.attention)
    )
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("layout", ["contiguous", "heads_last", "columns", "strided", "expanded"])
def test_gradients_are_laid_out_as_stated(layout: str) -> None:
    """Contiguous where the input is; those of other queries, keys and values as (B, L, H, E)."""
    case = Case("layout", 33, 40, 8, bias="1HLS", sinks=True, layout=layout)
    args, kwargs = case.make(torch.float32, requires_grad=True)
    leaves = differentiable(args, kwargs)
    out = ae.attention(*args, **kwargs)
    # The op itself is asked: autograd's accumulation may lay a leaf's gradient out anew.
    gradients = dict(
        zip(leaves, torch.autograd.grad(out.sum(), list(leaves.values())), strict=True)
    )
    for name in ("query", "key", "value"):
        lies = gradients[name] if layout == "contiguous" else gradients[name].transpose(1, 2)
        assert lies.is_contiguous(), name
    assert gradients["attn_bias"].is_contiguous()
    assert gradients["sinks"].is_contiguous()


@pytest.mark.parametrize(
    "shape", ["LS", "BHLS", "1HLS", "B1LS", "11LS", "B11S", "1H1S", "BHL1", "1H11", "1111"]
)
def test_bias_gradient_has_the_shape_of_the_bias(shape: str) -> None:
    case = Case("bias", 100, 130, 8, heads=4, kv_heads=2, batch=(3,), bias=shape)
    args, kwargs = case.make(torch.float64, requires_grad=True)
    bias = kwargs["attn_bias"]
    hidden = bias.detach() == -math.inf
    got = evaluate(ae.attention, args, kwargs)["grad_attn_bias"]
    want = evaluate(reference.attention, args, kwargs)["grad_attn_bias"]
    assert got.shape == bias.shape
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    assert (got[hidden] == 0).all()


def test_broadcast_bias_gradient_is_summed_in_float32() -> None:
    """Sixty-four batch entries of a bfloat16 bias: rounded once, at the end."""
    case = Case("sum", 256, 40, 8, batch=(64,), heads=1, bias="111S", hidden_bias=False)
    args, kwargs = case.make(torch.bfloat16)
    kwargs["attn_bias"].requires_grad_()
    truth, _ = truth_and_plain(args, kwargs)
    got = evaluate(ae.attention, args, kwargs)["grad_attn_bias"].double()
    want = truth["grad_attn_bias"]
    # Half a step of bfloat16, and the rounding of P and dS that a 16-bit product may make.
    assert float((got - want).abs().max()) <= 2**-8 * float(want.abs().max())


# Dead rows, finfo.min, NaN.


@pytest.mark.parametrize("kind", ["mask", "bias", "key_mask", "window"])
def test_dead_rows_send_zero_gradients(kind: str) -> None:
    args, kwargs = Case("dead", 70, 130, 8, bias="BHLS", sinks=True).make(torch.float64)
    dead = torch.zeros(70, dtype=torch.bool)
    dead[:40:3] = True
    if kind == "mask":
        kwargs["attn_mask"] = ~dead[:, None]
    elif kind == "bias":
        kwargs["attn_bias"].masked_fill_(dead[:, None], -math.inf)
    elif kind == "key_mask":
        dead[:] = True
        kwargs["key_mask"] = torch.zeros(2, 130, dtype=torch.bool)
    else:
        dead[:] = False
        dead[:30] = True
        kwargs.update(is_causal=True, query_offset=-30)
    leaves = {n: x.requires_grad_() for n, x in differentiable(args, kwargs).items()}
    for with_sinks in (False, True):
        if not with_sinks:
            sinks = kwargs.pop("sinks")
        else:
            kwargs["sinks"] = sinks
        wanted = [x for n, x in leaves.items() if with_sinks or n != "sinks"]
        out, lse = ae.attention(*args, **kwargs, return_lse=True)
        gradients = torch.autograd.grad(
            (out[:, :, dead].sum(), lse[:, :, dead].sum()), wanted, retain_graph=True
        )
        assert all((g == 0).all() for g in gradients[:4])
        if with_sinks:  # the sink is all of the row's logsumexp
            assert torch.equal(gradients[4], torch.full((2,), 2.0 * int(dead.sum())).double())
        gradients = torch.autograd.grad(out.sum(), wanted)
        assert all(g.isfinite().all() for g in gradients)
        assert (gradients[0][:, :, dead] == 0).all()


def test_dead_rows_change_nothing_for_the_others() -> None:
    args, _ = Case("dead", 40, 130, 8).make(torch.float64, requires_grad=True)
    mask = torch.rand(40, 130) > 0.3
    mask[::4] = False
    alive = mask.any(-1)
    with_dead = torch.autograd.grad(ae.attention(*args, mask).sin().sum(), args)
    query = args[0].detach()[:, :, alive].requires_grad_()
    without = torch.autograd.grad(
        ae.attention(query, *args[1:], mask[alive]).sin().sum(), (query, *args[1:])
    )
    torch.testing.assert_close(with_dead[0][:, :, alive], without[0])
    for x, y in zip(with_dead[1:], without[1:], strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_of_a_row_of_finfo_min(dtype: torch.dtype, rows: int) -> None:
    """The weights are 1/S exactly, in the gradients too."""
    args, _ = Case("uniform", rows, 130, 16).make(dtype, requires_grad=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bias = torch.zeros(rows, 130, dtype=wide)
    bias[-1] = torch.finfo(wide).min
    kwargs = {"attn_bias": bias.requires_grad_()}
    got = evaluate(ae.attention, args, kwargs, return_lse=True)
    assert_accurate(got, *truth_and_plain(args, kwargs, return_lse=True))
    out = ae.attention(*args, **kwargs)
    (d_value,) = torch.autograd.grad(out[:, :, -1].sum(), args[2])
    torch.testing.assert_close(d_value, torch.full_like(d_value, 1 / 130), rtol=1e-6, atol=0)


def _same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """NaN in the same places, close elsewhere; every place of both is looked at."""
    for name, y in want.items():
        x = got[name]
        assert torch.equal(x.isnan(), y.isnan()), f"{name}: {int((x.isnan() != y.isnan()).sum())}"
        torch.testing.assert_close(
            x, y, rtol=1e-8, atol=1e-10, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("poison", ["key", "value", "query", "grad_out"])
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("kind", HIDING)
def test_nan_reaches_only_what_sees_it(kind: str, rows: int, poison: str) -> None:
    """Backward, both ways: a NaN key is not felt by rows that do not see it, a NaN row or incoming
    gradient does not reach keys hidden from it."""
    keys = 210
    args, _ = Case("nan", rows, keys, 6, batch=(2,), heads=2).make(
        torch.float64, requires_grad=True
    )
    _, kwargs = _hiding(kind, rows, keys)
    kwargs = {n: x.double() if n == "attn_bias" else x for n, x in kwargs.items()}
    grad_out = torch.randn(2, 2, rows, 6, dtype=torch.float64)
    with torch.no_grad():
        if poison == "key":
            args[1][:, :, [5, 150], 2] = math.nan
        elif poison == "value":
            args[2][:, :, [5, 150], 2] = math.nan
        elif poison == "query":
            args[0][:, :, rows // 2, 2] = math.nan
        else:
            grad_out[:, :, rows // 2, 2] = math.nan

    def gradients(function: Any, **more: Any) -> dict[str, Tensor]:
        out = function(*args, **kwargs, **more)
        found = torch.autograd.grad(out, args, grad_out)
        return dict(zip(("query", "key", "value"), found, strict=True))

    want = gradients(reference.attention, pairwise=True)
    if rows > 3 and kind in ("mask", "bias"):  # elsewhere the NaN may be hidden from every row
        assert any(x.isnan().any() for x in want.values())
    _same(gradients(ae.attention), want)


@pytest.mark.parametrize("kind", HIDING)
def test_infinity_of_a_hidden_key_is_not_felt(kind: str) -> None:
    args, _ = Case("infinite", 70, 210, 6).make(torch.float32, requires_grad=True)
    visible, kwargs = _hiding(kind, 70, 210)
    clean = evaluate(ae.attention, args, kwargs)
    at = (~visible[0]).nonzero().flatten()[[0, -1]]  # hidden from row 0 at least
    with torch.no_grad():
        args[1][:, :, at[0]], args[2][:, :, at[1]] = math.inf, -math.inf
    got = evaluate(ae.attention, args, kwargs)
    felt = visible[:, at].any(-1)
    for name in ("out", "grad_query"):
        torch.testing.assert_close(got[name][:, :, ~felt], clean[name][:, :, ~felt])
    untouched = ~visible[felt].any(0)  # keys that no row with an infinity sees
    for name in ("grad_key", "grad_value"):
        torch.testing.assert_close(got[name][:, :, untouched], clean[name][:, :, untouched])


def test_nan_in_a_hidden_place_of_the_bias_gets_zero_gradient() -> None:
    args, _ = Case("nan", 40, 130, 8).make(torch.float64, requires_grad=True)
    mask = torch.rand(40, 130) > 0.5
    bias = torch.randn(40, 130, dtype=torch.float64).masked_fill(~mask, math.nan).requires_grad_()
    clean = bias.detach().nan_to_num(0).requires_grad_()
    got = evaluate(ae.attention, args, {"attn_mask": mask, "attn_bias": bias})
    want = evaluate(reference.attention, args, {"attn_mask": mask, "attn_bias": clean})
    _same(got, want)
    assert (got["grad_attn_bias"][~mask] == 0).all()


@pytest.mark.parametrize("arrives", [math.nan, math.inf])
@pytest.mark.parametrize("rows", [1, 40])
def test_what_arrives_for_a_dead_row_is_not_felt(rows: int, arrives: float) -> None:
    """By no gradient, that of the sinks included: they are all such a row's logsumexp has."""
    got = gradients_with_dead_rows(ae.attention, rows, arrives)
    for x, y in zip(got, gradients_with_dead_rows(ae.attention, rows, 0.0), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(got, gradients_with_dead_rows(reference.attention, rows, 0.0), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


# Numbers.


@pytest.mark.parametrize("value", [1e3, 1e6, 1e8])
@pytest.mark.parametrize("keys", [1, 50])
def test_huge_equal_inputs_have_finite_gradients(keys: int, value: float) -> None:
    args = [torch.full((1, 2, n, 16), value).requires_grad_() for n in (5, keys, keys)]
    got = evaluate(ae.attention, args, {})
    want = evaluate(reference.attention, [x.detach().double().requires_grad_() for x in args], {})
    torch.testing.assert_close(got["out"].double(), want["out"], rtol=1e-5, atol=0)
    torch.testing.assert_close(got["grad_value"].double(), want["grad_value"], rtol=1e-5, atol=0)
    # Equal keys: the gradient of the query is 0, up to the rounding of dP - delta, times key: two
    # sums of 16 products, in orders of their own in each tier.
    scale = 16 * torch.finfo(torch.float32).eps * value * value * 2
    assert float(got["grad_query"].abs().max()) <= scale
    assert float(got["grad_key"].abs().max()) <= scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [97, 3], ids=["blocks", "decoding"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("times", [3, 10])
def test_sharp_softmax_in_16_bits(
    times: float, dropout_p: float, rows: int, dtype: torch.dtype
) -> None:
    """The weights are nearly one-hot: gradients of scores are differences of almost equal numbers.

    Every head by itself, since a head of larger gradients would hide another one's errors.
    """
    args, kwargs = Case("sharp", rows, 130, 32, heads=1, dropout_p=dropout_p).make(dtype)
    for head in range(4):
        torch.manual_seed(head)
        ours = tuple((times * torch.randn_like(x)).requires_grad_() for x in args)
        got = evaluate(ae.attention, ours, kwargs, return_lse=True)
        assert_accurate(got, *truth_and_plain(ours, kwargs, return_lse=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("magnitude", [1e-36, 1e-38, 1e-40])
@pytest.mark.parametrize("tiny", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_numbers_around_the_smallest_normal_one(
    tiny: tuple[int, ...], magnitude: float, dtype: torch.dtype
) -> None:
    """Products of bfloat16 pairs take what is below it for zero, as dense attention's do."""
    args, _ = Case("tiny", 40, 100, 33, 31).make(dtype)
    ours = tuple((x * (magnitude if n in tiny else 1)).requires_grad_() for n, x in enumerate(args))
    got = evaluate(ae.attention, ours, {}, return_lse=True)
    assert_accurate(got, *truth_and_plain(ours, {}, return_lse=True))


def test_rounding_of_long_sums_hardly_grows_with_their_length() -> None:
    """Adding row after row to one float32 sum misses this by a factor of three."""
    query, grad = torch.randn(1, 20000, 16), torch.rand(1, 20000, 16)
    key, value = torch.randn(2, 1, 4, 16).unbind(0)

    def gradients(function: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (query, key, value)]
        return torch.autograd.grad(function(*leaves), leaves, grad.to(dtype))

    truth = gradients(reference.attention, torch.float64)
    for got, want in zip(gradients(ae.attention, torch.float32), truth, strict=True):
        assert (got - want).abs().max() < 8 * torch.finfo(torch.float32).eps * want.abs().max()


def test_long_reduction_over_grouped_heads_in_16_bits() -> None:
    case = Case("group", 300, 33, 16, heads=16, kv_heads=1)
    args, _ = case.make(torch.bfloat16, requires_grad=True)
    got = evaluate(ae.attention, args, {}, return_lse=True)
    assert_accurate(got, *truth_and_plain(args, {}, return_lse=True))


@pytest.mark.parametrize("sizes", list(itertools.product([0, 2], repeat=5)), ids=str)
def test_zero_sized_anything(sizes: tuple[int, int, int, int, int]) -> None:
    batch, heads, rows, keys, size = sizes
    for value_size in (0, 3):
        case = Case("zero", rows, keys, size, value_size, batch=(batch,), heads=heads)
        args, _ = case.make(torch.float32, requires_grad=True)
        args = tuple(x.detach()[:, :heads].requires_grad_() for x in args)
        bias = torch.randn(1, heads, rows, keys, requires_grad=True)
        sinks = torch.randn(heads, requires_grad=True)
        kwargs = {"attn_bias": bias, "sinks": sinks}
        got = evaluate(ae.attention, args, kwargs, return_lse=True)
        want = evaluate(reference.attention, args, kwargs, return_lse=True)
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, msg=lambda text, n=name: f"{n}: {text}")


def test_more_heads_than_16_bits_count() -> None:
    args, _ = Case("many", 1, 3, 2, batch=(33_000,), heads=2).make(
        torch.float32, requires_grad=True
    )
    got, want = (evaluate(f, args, {}) for f in (ae.attention, reference.attention))
    for name in want:
        torch.testing.assert_close(got[name], want[name])


def test_jagged_gradients() -> None:
    """The gradient of a jagged nested tensor is that of its sequences, one by one."""
    lens = (3, 0, 70)
    parts = [torch.randn(n, 2, 8, dtype=torch.float64) for n in lens]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    out, lse = ae.attention(*[nested.transpose(1, 2)] * 3, is_causal=True, return_lse=True)
    assert out.shape == nested.transpose(1, 2).shape
    (gradient,) = torch.autograd.grad(out.values().sin().sum() + lse.values().cos().sum(), nested)
    for part, one, one_lse, got in zip(
        parts, out.unbind(), lse.unbind(), gradient.unbind(), strict=True
    ):
        x = part.requires_grad_()
        want, want_lse = reference.attention(
            *[x.transpose(0, 1)] * 3, is_causal=True, return_lse=True
        )
        torch.testing.assert_close(one, want)
        torch.testing.assert_close(one_lse, want_lse)
        (d_x,) = torch.autograd.grad(want.sin().sum() + want_lse.cos().sum(), x)
        torch.testing.assert_close(got, d_x)
