"""Outputs and logsumexp: the table in every tier, then the contract's promises one by one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attention_ext as ae
from attention_ext import reference
from cases import (
    CASES,
    DTYPES,
    Case,
    PackedCase,
    assert_accurate,
    case_named,
    evaluate,
    params,
    raw,
    truth_and_plain,
)
from tables import ALL, expected, result
from tiers import OTHER_TIERS, TIER_GROUPS, TIERS, run_pytest

torch_sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("tiers", TIER_GROUPS, ids="+".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", params(ALL))
def test_table_is_accurate_in_every_tier(
    case: Case | PackedCase, dtype: torch.dtype, tiers: list[str]
) -> None:
    truth, plain = expected(case, dtype)
    for tier in tiers:
        forward, both = result(tier, case, dtype)
        some = {name: truth[name] for name in ("out", "lse")}
        assert_accurate(forward, some, plain, tier)
        for name in some:  # requires_grad changes nothing
            assert torch.equal(forward[name].nan_to_num(), both[name].nan_to_num()), name
        assert forward["out"].dtype == dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert forward["lse"].dtype == wide


@pytest.mark.slow
@pytest.mark.skipif("avx512_bf16" not in TIERS, reason="no bfloat16 products in this processor")
def test_every_tier_of_avx512_agrees_but_for_bfloat16() -> None:
    different = set()
    for case, dtype in itertools.product(ALL, DTYPES):
        for one, other in zip(
            result("avx512", case, dtype), result("avx512_bf16", case, dtype), strict=True
        ):
            if any(not torch.equal(one[x].nan_to_num(), other[x].nan_to_num()) for x in one):
                different.add((case, dtype))
    assert {dtype for _, dtype in different} == {torch.bfloat16}
    folded = {"decode_wide_group", "decode_last_row"}  # heads as rows
    decoded = {c.name for c, _ in different if isinstance(c, Case) and c.q_len <= 4}
    assert "decode_wide_group" in decoded
    assert decoded <= folded
    assert len(different) > len(ALL) / 2


@pytest.mark.slow
@pytest.mark.parametrize("tier", OTHER_TIERS)
def test_promises_hold_in_every_tier(tier: str) -> None:
    """The other tests of these files, in a process of that tier."""
    names = ("forward", "backward", "weights", "dropout", "packed")
    files = [f"tests/test_{name}.py" for name in names]
    run_pytest(*files, "-k", "not every_tier", "-m", "not slow", tier=tier)


# The result: layout, freshness, order.


def test_output_merges_its_heads_as_a_view() -> None:
    args, kwargs = case_named("two_batch_dims").make(torch.float32)
    out = ae.attention(*args, **kwargs)
    merged = out.transpose(-2, -3)
    assert merged.is_contiguous()
    assert merged.flatten(-2).data_ptr() == out.data_ptr()


def test_results_come_in_order_and_one_alone_is_a_tensor() -> None:
    (q, k, v), _ = case_named("odd").make(torch.float32)
    assert isinstance(ae.attention(q, k, v), Tensor)
    out, lse, weights = ae.attention(q, k, v, return_lse=True, return_weights=True)
    assert (out.shape, lse.shape, weights.shape) == ((2, 2, 17, 33), (2, 2, 17), (2, 2, 17, 31))
    out, weights = ae.attention(q, k, v, return_weights="mean")
    assert weights.shape == (2, 17, 31)
    out, lse = ae.attention(q, k, v, return_lse=True)
    assert lse.shape == (2, 2, 17)


@pytest.mark.parametrize("name", ["one_number", "mask_single", "decode", "window_zero"])
def test_outputs_are_fresh_memory(name: str) -> None:
    args, kwargs = case_named(name).make(torch.float32)
    before = [x.clone() for x in args]
    out, lse, weights = ae.attention(*args, **kwargs, return_lse=True, return_weights=True)
    places = [x.untyped_storage().data_ptr() for x in (*args, out, lse, weights)]
    assert len(set(places)) == 6
    for x in (out, lse, weights):
        x.fill_(7.0)
    assert all(torch.equal(x, y) for x, y in zip(args, before, strict=True))
    assert all(x._version == 0 for x in args)


@pytest.mark.parametrize("rows", [1, 20])
def test_row_statistics_keep_what_logsumexp_rounds_away(rows: int) -> None:
    """exp(score - logsumexp - residual) is the probability, where logsumexp alone is too coarse."""
    (q, k, v), _ = Case("statistics", rows, 130, 8).make(torch.float32)
    score = torch.randint(-3, 4, (rows, 130)).float() + 10_000.0
    raw_args, raw_kwargs = raw((q, k, v), {"attn_bias": score, "scale": 0.0})
    _, lse, residual, _ = torch.ops.attention_ext.attention(*raw_args, **raw_kwargs)
    exact = score.double().logsumexp(-1).expand(2, 2, rows)
    assert float((lse.double() - exact).abs().max()) > 5e-5  # float32 has steps of 1e-3 there
    assert float((lse.double() + residual.double() - exact).abs().max()) < 1e-6


# Rows that see nothing, and rows of finfo.min.


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "kind", ["mask", "bias", "key_mask", "float_key_mask", "window", "no_keys"]
)
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_dead_rows_are_zero(kind: str, rows: int, sinks: bool) -> None:
    keys = 0 if kind == "no_keys" else 200
    (q, k, v), _ = Case("dead", rows, keys, 16).make(torch.float32)
    dead = torch.zeros(rows, dtype=torch.bool)
    kwargs: dict[str, Any] = {}
    if kind == "mask":
        dead[::2] = True
        kwargs["attn_mask"] = ~dead[:, None].expand(rows, keys)
    elif kind == "bias":
        dead[::2] = True
        kwargs["attn_bias"] = torch.zeros(rows, keys).masked_fill(dead[:, None], -math.inf)
    elif kind == "key_mask":
        dead[:] = True
        kwargs["key_mask"] = torch.zeros(2, keys, dtype=torch.bool)
    elif kind == "float_key_mask":
        dead[:] = True
        kwargs["key_mask"] = torch.full((2, keys), -math.inf)
    elif kind == "window":
        dead[: min(rows, 3)] = True
        kwargs.update(is_causal=True, query_offset=-3)
    else:
        dead[:] = True
    if sinks:
        kwargs["sinks"] = torch.tensor([0.25, -3.0])
    out, lse, weights = ae.attention(q, k, v, **kwargs, return_lse=True, return_weights=True)
    assert (out[:, :, dead] == 0).all()
    assert (weights[:, :, dead] == 0).all()
    if sinks:
        wanted = kwargs["sinks"].view(1, 2, 1).expand(2, 2, int(dead.sum()))
        assert torch.equal(lse[:, :, dead], wanted)
    else:
        assert (lse[:, :, dead] == -math.inf).all()
    assert (out[:, :, ~dead] != 0).any(-1).all()
    assert lse[:, :, ~dead].isfinite().all()


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_of_finfo_min_is_the_uniform_average(dtype: torch.dtype, rows: int) -> None:
    """finfo.min is a number: it swallows the scores, and the average is what the formula gives."""
    (q, k, v), _ = Case("uniform", rows, 130, 16).make(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bias = torch.zeros(rows, 130, dtype=wide)
    bias[-1] = torch.finfo(wide).min
    out, lse, weights = ae.attention(q, k, v, bias, return_lse=True, return_weights=True)
    uniform = weights[:, :, -1]
    assert (uniform == uniform[0, 0, 0]).all()
    assert abs(float(uniform[0, 0, 0]) * 130 - 1) <= 2 * torch.finfo(dtype).eps
    mean = v.double().mean(-2)
    torch.testing.assert_close(out[:, :, -1], mean.to(dtype), rtol=1e-2, atol=1e-2)
    assert float((out[:, :, -1].double() - mean).abs().max()) <= torch.finfo(dtype).eps
    assert (lse[:, :, -1] == torch.finfo(wide).min).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_finfo_min_of_16_bits_hides_nothing_by_itself(dtype: torch.dtype) -> None:
    """Added in float32, a score below zero does not push finfo.min of 16 bits to -inf."""
    q, k = torch.full((1, 1, 3, 8), 4.0), torch.full((1, 1, 50, 8), -4.0)
    v = torch.randn(1, 1, 50, 8)
    bias = torch.full((3, 50), torch.finfo(dtype).min, dtype=dtype)
    out = ae.attention(q.to(dtype), k.to(dtype), v.to(dtype), bias)
    mean = v.to(dtype).double().mean(-2, keepdim=True).expand(1, 1, 3, 8)
    assert float((out.double() - mean).abs().max()) <= torch.finfo(dtype).eps


def test_sum_of_two_finite_masks_stays_finite() -> None:
    smallest = torch.finfo(torch.float32).min
    (q, k, v), _ = Case("sum", 5, 130, 8).make(torch.float32)
    bias = torch.full((5, 130), smallest)
    key_mask = torch.full((2, 130), smallest)
    key_mask[:, ::2] = -math.inf
    out = ae.attention(q, k, v, attn_bias=bias, key_mask=key_mask)
    mean = v[:, :, 1::2].mean(-2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, mean, rtol=1e-5, atol=1e-6)


def test_zero_and_one_in_a_float_mask_are_a_bias() -> None:
    (q, k, v), _ = Case("encodings", 8, 8, 8).make(torch.float32)
    seen = torch.rand(8, 8) > 0.5
    torch.testing.assert_close(ae.attention(q, k, v, seen), torch_sdpa(q, k, v, seen))
    torch.testing.assert_close(
        ae.attention(q, k, v, seen.float()), torch_sdpa(q, k, v, seen.float())
    )


# NaN: hidden ones are not felt, visible ones are not hidden.


def _hiding(kind: str, rows: int, keys: int) -> tuple[Tensor, dict[str, Any]]:
    """(visible (rows, keys), the options that make it so): about half of the pairs are hidden."""
    mask = torch.rand(rows, keys) > 0.5
    mask[0, : keys // 2] = False
    if rows > 1:
        mask[rows // 2, keys // 2 :] = False
    if kind == "mask":
        return mask, {"attn_mask": mask}
    if kind == "bias":
        return mask, {"attn_bias": torch.randn(rows, keys).masked_fill(~mask, -math.inf)}
    if kind == "key_mask":
        seen = mask[-1:].expand(rows, keys)
        return seen, {"key_mask": mask[-1].expand(2, keys)}
    distance = torch.arange(keys) - torch.arange(rows)[:, None]
    if kind == "causal":
        offset = keys - rows - 20
        return distance <= offset, {"is_causal": True, "query_offset": offset}
    assert kind == "window"
    return (distance - 30).abs() <= 25, {"window": (25, 25), "query_offset": 30}


HIDING = ["mask", "bias", "key_mask", "causal", "window"]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 110])
@pytest.mark.parametrize("kind", HIDING)
def test_hidden_key_is_not_felt(kind: str, rows: int, poison: float) -> None:
    (q, k, v), _ = Case("hidden", rows, 230, 12, heads=2).make(torch.float32)
    visible, kwargs = _hiding(kind, rows, 230)
    clean, clean_lse = ae.attention(q, k, v, **kwargs, return_lse=True)
    at = torch.tensor([3, 70, 130, 200])
    k[:, :, at[:2]] = poison
    v[:, :, at[2:]] = poison
    k[:, :, at[3], 5] = poison
    felt = visible[:, at].any(-1)
    out, lse = ae.attention(q, k, v, **kwargs, return_lse=True)
    torch.testing.assert_close(out[:, :, ~felt], clean[:, :, ~felt], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[:, :, ~felt], clean_lse[:, :, ~felt], rtol=1e-5, atol=1e-6)
    if math.isnan(poison):
        assert out[:, :, felt].isnan().all()


@pytest.mark.parametrize("rows", [1, 110])
def test_number_beside_a_hidden_pair_is_not_felt(rows: int) -> None:
    """A bias may hold NaN where a bool mask, a key mask or a window hides the pair."""
    (q, k, v), _ = Case("hidden", rows, 230, 12).make(torch.float32)
    for kind in ("mask", "key_mask", "causal", "window"):
        visible, kwargs = _hiding(kind, rows, 230)
        bias = torch.randn(rows, 230)
        clean = ae.attention(q, k, v, **kwargs, attn_bias=bias)
        out = ae.attention(q, k, v, **kwargs, attn_bias=bias.masked_fill(~visible, math.nan))
        torch.testing.assert_close(out, clean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_visible_nan_comes_out(dtype: torch.dtype, rows: int) -> None:
    (q, k, v), _ = Case("nan", rows, 130, 16).make(dtype)
    mask = torch.rand(rows, 130) > 0.5
    mask[:, 100] = True
    for tensor, at in ((q, (0, 0, rows - 1, 3)), (k, (1, 0, 100, 5)), (v, (0, 1, 100, 7))):
        poisoned = [x.clone() for x in (q, k, v)]
        poisoned[[x is tensor for x in (q, k, v)].index(True)][at] = math.nan
        got = ae.attention(*poisoned, mask)
        want = reference.attention(*poisoned, mask)
        assert torch.equal(got.isnan(), want.isnan())
        assert want.isnan().any()


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("bits", [0x7FC00001, 0x7FFFFFFF, 0x7F800001, -1], ids=hex)
def test_nan_of_any_bits_comes_out(bits: int, rows: int) -> None:
    (q, k, v), _ = Case("nan", rows, 130, 16).make(torch.float32)
    k[0, 0, 100, 5] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    out = ae.attention(q, k, v)
    assert out[0, 0].isnan().all()
    assert not out[0, 1].isnan().any()


def test_mask_of_integers_is_refused_by_its_own_name() -> None:
    x, mask = torch.randn(1, 2, 3, 4), torch.ones(3, 3, dtype=torch.int32)
    for function in (ae.attention, ae.scaled_dot_product_attention):
        with pytest.raises(RuntimeError, match=r"attn_mask must be bool.*got Int"):
            function(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("rows", [1, 70])
def test_infinite_scores_become_nan(rows: int) -> None:
    (q, k, v), _ = Case("infinite", rows, 130, 8).make(torch.float32)
    bias = torch.zeros(rows, 130)
    bias[0, 50] = math.inf
    assert ae.attention(q, k, v, bias)[:, :, 0].isnan().all()
    q[:, :, 0], k[:] = 1e30, -1e30  # every score of row 0 is visible and overflows to -inf
    out, lse = ae.attention(q, k, v, return_lse=True)
    assert out[:, :, 0].isnan().all()
    assert (lse[:, :, 0] == -math.inf).all()


# Numbers.


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_results_are_rounded_to_nearest_even(
    dtype: torch.dtype, rows: int, stride: int
) -> None:
    """Numbers of any bits: a mean of two values, and a gradient that two heads share."""
    size = 77  # whole vectors and a rest
    bits = torch.randint(-(2**15), 2**15, (2, 2, 4, 2, size * stride), dtype=torch.int16)
    values, grads = bits.view(dtype)[..., ::stride]
    query = torch.zeros(2, 4, rows, 8, dtype=dtype)
    out = ae.attention(query, query[:, :, :2].expand(2, 4, 2, 8), values)
    mean = (values[:, :, 0].float() + values[:, :, 1].float()) / 2
    torch.testing.assert_close(out[:, :, -1], mean.to(dtype), rtol=0, atol=0, equal_nan=True)

    grad = torch.zeros(2, 4, rows, size * stride, dtype=dtype)[..., ::stride]
    grad[:, :, 0] = grads[:, :, 0]
    value = torch.zeros(2, 2, 1, size, dtype=dtype).requires_grad_()
    out = ae.attention(query, query[:, :2, :1], value)
    (found,) = torch.autograd.grad(out, value, grad)
    total = grad[:, ::2, 0].float() + grad[:, 1::2, 0].float()
    torch.testing.assert_close(found[:, :, 0], total.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 50])
def test_large_float16_inputs_do_not_overflow(rows: int) -> None:
    (q, k, v), _ = Case("large", rows, 120, 128).make(torch.float16)
    q, k = (300 * q).clamp(-600, 600), (300 * k).clamp(-600, 600)
    truth, _ = truth_and_plain((q, k, v), {})
    out = ae.attention(q, k, v)
    torch.testing.assert_close(out.double(), truth["out"], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_of_ten_thousand_keep_float32_accuracy(sign: int) -> None:
    (q, k, v), _ = Case("far", 50, 120, 16).make(torch.float32)
    bias = torch.full((50, 120), sign * 1e4)
    got = evaluate(ae.attention, (q, k, v), {"attn_bias": bias}, return_lse=True)
    assert_accurate(got, *truth_and_plain((q, k, v), {"attn_bias": bias}, return_lse=True))


def test_positions_beyond_16_bits() -> None:
    (q, k, v), _ = Case("far", 3, 70_000, 4, batch=(1,), heads=1).make(torch.float32)
    out = ae.attention(q, k, v, window=(2, 1), query_offset=69_990)
    near = ae.attention(q, k[:, :, 69_980:], v[:, :, 69_980:], window=(2, 1), query_offset=10)
    torch.testing.assert_close(out, near)


def test_denormal_probabilities_are_harmless() -> None:
    (q, k, v), _ = Case("denormal", 40, 200, 8).make(torch.float32)
    bias = torch.linspace(0, -110, 200).expand(40, 200)
    got = evaluate(ae.attention, (q, k, v), {"attn_bias": bias}, return_lse=True)
    assert_accurate(got, *truth_and_plain((q, k, v), {"attn_bias": bias}, return_lse=True))


def test_chunks_with_an_offset_are_one_call() -> None:
    (q, k, v), _ = Case("chunks", 150, 150, 16).make(torch.float32)
    whole = ae.attention(q, k, v, is_causal=True)
    for first, last in ((0, 97), (97, 149), (149, 150)):
        chunk = ae.attention(
            q[:, :, first:last],
            k[:, :, :last],
            v[:, :, :last],
            is_causal=True,
            query_offset=first,
        )
        torch.testing.assert_close(chunk, whole[:, :, first:last])


def test_causal_and_mask_together_mean_both() -> None:
    (q, k, v), _ = Case("both", 70, 70, 16).make(torch.float32)
    mask = torch.rand(2, 1, 70, 70) > 0.5
    mask[:, :, 40, :41] = False  # dead by the intersection alone
    out = ae.attention(q, k, v, mask, is_causal=True)
    assert torch.equal(out, ae.attention(q, k, v, mask & torch.ones(70, 70).tril().bool()))
    assert (out[:, :, 40] == 0).all()


@pytest.mark.parametrize("far", [2**31, 2**40, 2**62, 2**63 - 1])
def test_windows_and_offsets_of_any_size(far: int) -> None:
    (q, k, v), _ = Case("far", 20, 40, 8).make(torch.float32)
    plain = ae.attention(q, k, v)
    assert torch.equal(ae.attention(q, k, v, window=(far, far)), plain)
    far = min(far, 2**61)  # beyond it an offset is refused
    assert torch.equal(ae.attention(q, k, v, is_causal=True, query_offset=far), plain)
    assert (ae.attention(q, k, v, is_causal=True, query_offset=-far) == 0).all()
    offsets = torch.tensor([far, -far])
    out = ae.attention(q, k, v, window=(None, 0), query_offset=offsets)
    assert torch.equal(out[0], plain[0])
    assert (out[1] == 0).all()


# Memory layouts and sizes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["heads_last", "columns", "strided", "sliced", "shifted"])
@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "attn_bias", "key_mask"])
def test_each_tensor_may_have_strides_of_its_own(
    name: str, layout: str, dtype: torch.dtype
) -> None:
    plain = Case("layout", 33, 100, 24, mask="B1LS", bias="BHLS", key_mask="float")
    args, kwargs = plain.make(dtype)
    named = {"query": args[0], "key": args[1], "value": args[2], **kwargs}
    x = named[name]
    buffer = torch.zeros(*x.shape[:-1], 2 * x.size(-1) + 3, dtype=x.dtype)
    if layout == "shifted":  # even rows from an odd address
        buffer = buffer[..., :-1].contiguous()
    if layout == "strided":
        view = buffer[..., 1 : 1 + 2 * x.size(-1) : 2]
    elif layout == "sliced":
        view = buffer[..., 3 : 3 + x.size(-1)]
    elif layout == "shifted":
        view = buffer[..., 1 : 1 + x.size(-1)]
    elif layout == "columns":
        view = torch.zeros_like(x.transpose(-1, -2).contiguous()).transpose(-1, -2)
    else:
        view = x.transpose(0, -2).contiguous().transpose(0, -2)
    view.copy_(x)
    want = ae.attention(**named)
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    got = ae.attention(**{**named, name: view})
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [23, 24])
def test_what_lies_beside_a_row_is_not_felt(size: int, dtype: torch.dtype) -> None:
    args, _ = Case("beside", 33, 100, size).make(dtype)
    views = [torch.full((*x.shape[:-1], 26), math.nan).to(dtype) for x in args]
    inside = [view[..., :size].copy_(x) for view, x in zip(views, args, strict=True)]
    torch.testing.assert_close(ae.attention(*inside), ae.attention(*args))


def _huge(elements: int, dtype: str) -> Tensor:
    """Zeros whose pages are not touched."""
    return torch.from_numpy(np.zeros(elements, dtype=dtype))


def test_offsets_beyond_2_to_the_31_elements() -> None:
    step = 2**30 + 17
    base = _huge(2 * step + 4096, "float16")
    (q, k, v), _ = Case("huge", 3, 3, 8, batch=(1,), heads=1).make(torch.float16)
    far = [base.as_strided(x.shape, (4096, 4096, step, 1), 64 * n) for n, x in enumerate((q, k, v))]
    for x, y in zip(far, (q, k, v), strict=True):
        x.copy_(y)
    assert torch.equal(ae.attention(*far), ae.attention(q, k, v))


def test_mask_offsets_beyond_2_to_the_31_elements() -> None:
    step = 2**31 + 5
    (q, k, v), _ = Case("huge", 3, 40, 8, batch=(1,), heads=1).make(torch.float32)
    mask = torch.rand(3, 40) > 0.5
    far = _huge(2 * step + 64, "bool").as_strided((3, 40), (step, 1))
    far.copy_(mask)
    assert torch.equal(ae.attention(q, k, v, far), ae.attention(q, k, v, mask))


def test_more_heads_than_16_bits_count() -> None:
    (q, k, v), _ = Case("many", 1, 3, 2, batch=(33_000,), heads=2).make(torch.float32)
    torch.testing.assert_close(ae.attention(q, k, v), reference.attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 7, 15, 33, 63, 65, 80, 100, 127, 160, 257, 512])
def test_every_size_of_head(size: int, dtype: torch.dtype) -> None:
    for rows in (1, 9):
        args, kwargs = Case("size", rows, 20, size, max(size // 2, 1), batch=(1,)).make(dtype)
        got = evaluate(ae.attention, args, kwargs, return_lse=True)
        assert_accurate(got, *truth_and_plain(args, kwargs, return_lse=True), f"{rows} rows")


@pytest.mark.parametrize("sizes", list(itertools.product([0, 2], repeat=5)), ids=str)
def test_zero_sized_anything(sizes: tuple[int, int, int, int, int]) -> None:
    """Any of B, H, L, S, E and Ev may be 0: without keys the output is zero, without E uniform."""
    batch, heads, rows, keys, size = sizes
    for value_size in (0, 3):
        case = Case("zero", rows, keys, size, value_size, batch=(batch,), heads=heads)
        args, _ = case.make(torch.float32)
        args = tuple(x[:, :heads] for x in args)
        out, lse, weights = ae.attention(*args, return_lse=True, return_weights=True)
        wanted = reference.attention(*args, return_lse=True, return_weights=True)
        for x, y in zip((out, lse, weights), wanted, strict=True):
            torch.testing.assert_close(x, y)
        mean = ae.attention(*args, return_weights="mean")[1]
        assert mean.shape == (batch, rows, keys)


# The Python API.


@pytest.mark.parametrize(
    ("query", "key", "value", "mask"),
    [
        ((5, 8), (7, 8), (7, 3), None),
        ((5, 8), (7, 8), (7, 3), (5, 7)),
        ((5, 8), (7, 8), (7, 3), (7,)),
        ((5, 8), (7, 8), (7, 3), ()),
        ((5, 8), (7, 8), (7, 3), (1, 7)),
        ((2, 5, 8), (2, 7, 8), (2, 7, 3), (2, 5, 7)),
        ((2, 5, 8), (7, 8), (7, 3), (5, 1)),
        ((5, 8), (2, 7, 8), (7, 3), (5, 7)),
        ((4, 4, 5, 8), (4, 4, 7, 8), (4, 4, 7, 3), (4, 5, 7)),
        ((4, 2, 5, 8), (4, 2, 7, 8), (4, 2, 7, 3), (4, 1, 1, 7)),
        ((4, 2, 5, 8), (4, 2, 7, 8), (4, 2, 7, 3), (1, 2, 5, 1)),
        ((1, 2, 5, 8), (4, 2, 7, 8), (4, 1, 7, 3), (4, 2, 5, 7)),
        ((3, 1, 2, 5, 8), (4, 1, 7, 8), (1, 7, 3), (4, 2, 5, 7)),
        ((3, 2, 2, 5, 8), (3, 2, 2, 7, 8), (3, 2, 2, 7, 3), (1, 1, 5)),
        ((1, 5, 8), (4, 7, 8), (4, 7, 3), None),
    ],
    ids=str,
)
def test_sdpa_broadcasts_as_torch_does(query: Any, key: Any, value: Any, mask: Any) -> None:
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in (query, key, value))
    if mask is None:
        torch.testing.assert_close(
            ae.scaled_dot_product_attention(q, k, v, is_causal=True),
            torch_sdpa(q, k, v, is_causal=True),
        )
        return
    if mask == (1, 1, 5):
        mask = (1, 1, 5, 1)
    bias = torch.randn(mask, dtype=torch.float64)
    seen = bias > -0.5
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want, want_seen = torch_sdpa(q, k, v, bias), torch_sdpa(q, k, v, seen)
    torch.testing.assert_close(ae.scaled_dot_product_attention(q, k, v, bias), want)
    got = ae.scaled_dot_product_attention(q, k, v, seen)
    torch.testing.assert_close(got, want_seen.nan_to_num(0))


def test_sdpa_groups_heads_without_a_flag() -> None:
    q, k, v = (torch.randn(2, h, 6, 8) for h in (8, 2, 4))
    want = torch_sdpa(q, k, v, enable_gqa=True)
    torch.testing.assert_close(ae.scaled_dot_product_attention(q, k, v), want)
    torch.testing.assert_close(ae.scaled_dot_product_attention(q, k, v, enable_gqa=True), want)


def test_sdpa_takes_a_mask_and_causal_together() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    mask = torch.rand(6, 6) > 0.3
    got = ae.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    torch.testing.assert_close(
        got, reference.attention(q, k, v, mask & torch.ones(6, 6).tril().bool())
    )


def test_causal_bias_objects() -> None:
    q, k, v = (torch.randn(2, 4, n, 8) for n in (5, 9, 9))
    top = torch.ones(5, 9).tril().bool()
    bottom = torch.ones(5, 9).tril(4).bool()
    for bias, mask in ((causal_upper_left(5, 9), top), (causal_lower_right(5, 9), bottom)):
        want = reference.attention(q, k, v, mask)
        torch.testing.assert_close(ae.scaled_dot_product_attention(q, k, v, bias), want)
        torch.testing.assert_close(ae.attention(q, k, v, bias), want)
    both = ae.scaled_dot_product_attention(q, k, v, causal_lower_right(5, 9), is_causal=True)
    torch.testing.assert_close(both, reference.attention(q, k, v, top))
    with pytest.raises(RuntimeError, match="causal bias must be for 5 queries and 9 keys"):
        ae.scaled_dot_product_attention(q, k, v, causal_upper_left(5, 8))


def test_float_mask_beside_a_bias_is_refused() -> None:
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="a float attn_mask is the attn_bias"):
        ae.attention(x, x, x, torch.zeros(4, 4), attn_bias=torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"window": 3}, r"window must be a pair .* got 3"),
        ({"window": (1, 2, 3)}, "window must be a pair"),
        ({"return_weights": "all"}, "return_weights must be False, True or 'mean', got 'all'"),
    ],
)
def test_python_options_are_checked(options: dict[str, Any], text: str) -> None:
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match=text):
        ae.attention(x, x, x, **options)


def test_one_dimension_is_refused() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        ae.scaled_dot_product_attention(x[0], x, x)


@pytest.mark.parametrize(
    "name", [case.name for case in CASES if case.name.startswith("everything")]
)
def test_python_api_passes_every_option_on(name: str) -> None:
    args, kwargs = case_named(name).make(torch.float32)
    raw_args, raw_kwargs = raw(args, kwargs)
    want = torch.ops.attention_ext.attention(*raw_args, **raw_kwargs)
    got = ae.attention(*args, **kwargs, return_lse=True)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_python_api_compiles_into_one_graph() -> None:
    args, kwargs = case_named("mask_2d").make(torch.float32)
    bias = torch.randn(2, 1, 97, 100)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, lse, weights = ae.attention(
            q, k, v, **kwargs, window=(50, 3), return_lse=True, return_weights="mean"
        )
        other = ae.scaled_dot_product_attention(q, k, v, bias, is_causal=True)
        dropped = ae.attention(q, k, v, query_offset=torch.tensor([1, 2]), dropout_p=0.5)
        return out, lse, weights, other, dropped

    torch.manual_seed(5)
    want = call(*args)
    torch.manual_seed(5)
    got = torch.compile(call, fullgraph=True, backend="eager")(*args)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("sink", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("function", [ae.attention, reference.attention])
def test_dead_rows_are_zero_beside_any_sink(function: Any, sink: float) -> None:
    q, k, v = (torch.randn(1, 1, n, 4, requires_grad=True) for n in (2, 3, 3))
    sinks = torch.tensor([sink], requires_grad=True)
    hidden = torch.zeros(2, 3, dtype=torch.bool)
    out, lse, weights = function(q, k, v, hidden, sinks=sinks, return_lse=True, return_weights=True)
    assert torch.equal(out, torch.zeros(1, 1, 2, 4))
    assert torch.equal(weights, torch.zeros(1, 1, 2, 3))
    torch.testing.assert_close(lse, torch.full((1, 1, 2), sink), equal_nan=True)
    for grad in torch.autograd.grad(out.sum() + weights.sum(), (q, k, v, sinks)):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: ae.attention(x, None, x), "attention: key must be a tensor, got NoneType"),
        (lambda x: ae.attention(x, x, x, [[True]]), "attention: mask must be a tensor, got list"),
        (
            lambda x: ae.scaled_dot_product_attention(x, x, x, 3),
            "scaled_dot_product_attention: mask must be a tensor, got int",
        ),
        (
            lambda x: ae.varlen_attention(x[0], x[0], x[0], None, None),
            "varlen_attention: cu_seqlens_q must be a tensor of the sequences' borders",
        ),
    ],
)
def test_what_is_no_tensor_is_named(call: Any, sentence: str) -> None:
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match=sentence):
        call(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [(0, 0), (0, 202), (99, 0), (99, 150), (99, 202)], ids=str)
def test_one_finite_number_in_a_bias_of_minus_infinity_is_found(
    place: tuple[int, int], dtype: torch.dtype
) -> None:
    query, value = torch.randn(1, 100, 24, dtype=dtype), torch.randn(1, 203, 24, dtype=dtype)
    key = torch.randn_like(value)
    bias = torch.full((100, 203), -math.inf, dtype=dtype)
    bias[place] = 0.5
    want = torch.zeros_like(query)
    want[0, place[0]] = value[0, place[1]]
    assert torch.equal(ae.attention(query, key, value, attn_bias=bias), want)
    bias[place] = math.nan
    got = ae.attention(query, key, value, attn_bias=bias)
    assert got[0, place[0]].isnan().all()
    assert got.isnan().sum() == 24
