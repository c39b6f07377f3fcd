"""The oracle itself is checked: against a loop in plain Python and against hand-made numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_ext import reference
from cases import CASES, PACKED_CASES, Case, PackedCase, case_named, evaluate, params

WORD = 0xFFFFFFFF


def _philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python's integers."""
    for _ in range(10):
        low, high = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            high >> 32 ^ counter[1] ^ key[0],
            high & WORD,
            low >> 32 ^ counter[3] ^ key[1],
            low & WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return counter


def _keeps(state: list[int], heads: int, b: int, h: int, i: int, j: int, p: float) -> bool:
    """Whether dropout keeps the pair, from the definition."""
    seed, offset, total, first_head, first_row, first_key = state
    j += first_key
    words = _philox(
        [
            offset & WORD,
            (b * (total or heads) + first_head + h) & WORD,
            (first_row + i) & WORD,
            j >> 3 & WORD,
        ],
        [seed & WORD, (seed >> 32 ^ offset >> 32) & WORD],
    )
    lane = words[(j & 7) // 2] >> 16 * (j & 1) & 0xFFFF
    return lane >= round(p * 65536)


def _loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    query_offset: int | Tensor = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and weights by the contract's formula, one row at a time, in Python's floats."""
    batch, (heads, rows, size) = q.shape[:-3], q.shape[-3:]
    kv_heads, keys, value_size = k.size(-3), k.size(-2), v.size(-1)
    full = (*batch, heads, rows, keys)
    mask = None if attn_mask is None else attn_mask.expand(full)
    bias = None if attn_bias is None else attn_bias.expand(full)
    slopes = None if alibi_slopes is None else alibi_slopes.expand(*batch, heads)
    out = q.new_zeros(*batch, heads, rows, value_size)
    lse = q.new_full((*batch, heads, rows), -math.inf)
    weights = q.new_zeros(full)
    scale = (1 / math.sqrt(size) if size else 1.0) if scale is None else scale
    for n, at in enumerate(itertools.product(*map(range, batch))):
        offset = int(query_offset[at]) if isinstance(query_offset, Tensor) else query_offset
        for h in range(heads):
            k_rows = k[at][h // (heads // kv_heads)].tolist()
            v_rows = v[at][h // (heads // kv_heads)].tolist()
            for i, q_row in enumerate(q[at][h].tolist()):
                scores: dict[int, float] = {}
                for j in range(keys):
                    hidden = mask is not None and not mask[at][h, i, j]
                    hidden |= is_causal and j > i + offset
                    hidden |= window[1] is not None and j > i + offset + window[1]
                    hidden |= window[0] is not None and j < i + offset - window[0]
                    s = scale * sum(x * y for x, y in zip(q_row, k_rows[j], strict=True))
                    if softcap > 0:
                        s = softcap * math.tanh(s / softcap)
                    if slopes is not None:
                        s -= float(slopes[at][h]) * abs(i + offset - j)
                    if bias is not None:
                        hidden |= float(bias[at][h, i, j]) == -math.inf
                        s += float(bias[at][h, i, j])
                    if key_mask is not None:
                        seen = key_mask[at][j]
                        hidden |= not seen if seen.dtype == torch.bool else seen == -math.inf
                        s += 0.0 if seen.dtype == torch.bool else float(seen)
                    if not hidden:
                        scores[j] = s
                logits = [*scores.values(), *([] if sinks is None else [float(sinks[h])])]
                if not logits:
                    continue
                top = max(logits)
                total = sum(math.exp(s - top) for s in logits)
                lse[at][h, i] = top + math.log(total)
                for j, s in scores.items():
                    p = math.exp(s - top) / total
                    if dropout_p > 0:
                        assert rng_state is not None
                        kept = _keeps(rng_state.tolist(), heads, n, h, i, j, dropout_p)
                        p = p * 65536 / (65536 - round(dropout_p * 65536)) if kept else 0.0
                    weights[at][h, i, j] = p
                out[at][h, i] = torch.tensor(
                    [
                        sum(float(weights[at][h, i, j]) * v_rows[j][e] for j in scores)
                        for e in range(value_size)
                    ],
                    dtype=q.dtype,
                )
    return out, lse, weights


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_matches_a_plain_loop_over_rows(name: str) -> None:
    full = case_named(name)
    case = case_named(
        name,
        q_len=min(full.q_len, 9),
        k_len=min(full.k_len, 21),
        size=min(full.size, 33),
        value_size=min(full.shape["Ev"], 33),
    )
    args, kwargs = case.make(torch.float64)
    got = reference.attention(*args, **kwargs, return_lse=True, return_weights=True)
    for x, y in zip(got, _loop(*args, **kwargs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", params(PACKED_CASES))
def test_packed_sequences_match_one_call_for_each(case: PackedCase) -> None:
    """Each sequence alone gives the same numbers; dropout counts sequences as batch entries."""
    (q, k, v, borders_q, borders_k), kwargs = case.make(torch.float64)
    got, got_lse = reference.varlen_attention(
        q, k, v, borders_q, borders_k, **kwargs, return_lse=True
    )
    assert got.shape == (q.size(0), q.size(1), v.size(2))
    for n in range(len(case.q_lens)):
        rows = slice(int(borders_q[n]), int(borders_q[n + 1]))
        keys = slice(int(borders_k[n]), int(borders_k[n + 1]))
        options = dict(kwargs)
        if "key_mask" in options:
            options["key_mask"] = options["key_mask"][keys]
        if isinstance(options.get("query_offset"), Tensor):
            options["query_offset"] = int(options["query_offset"][n])
        if case.dropout_p > 0:  # batch entry n of H heads is head n * H + h of the state
            options["rng_state"] = options["rng_state"].clone()
            options["rng_state"][3] = n * q.size(1)
        one = (q[rows].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1))
        out, lse = reference.attention(*one, **options, return_lse=True)
        torch.testing.assert_close(got[rows], out.transpose(0, 1), rtol=0, atol=0)
        torch.testing.assert_close(got_lse[:, rows], lse, rtol=0, atol=0)


def test_agrees_with_torch() -> None:
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    mask = torch.rand(2, 1, 5, 7) > 0.3
    bias = torch.randn(4, 5, 7, dtype=torch.float64)
    torch_sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(reference.attention(q, k, v, mask), torch_sdpa(q, k, v, mask))
    torch.testing.assert_close(reference.attention(q, k, v, bias[None]), torch_sdpa(q, k, v, bias))
    causal = reference.attention(q, k, v, is_causal=True, scale=0.7)
    torch.testing.assert_close(causal, torch_sdpa(q, k, v, is_causal=True, scale=0.7))
    k, v = k[:, :2], v[:, :2]
    grouped = torch_sdpa(q, k, v, enable_gqa=True)
    torch.testing.assert_close(reference.attention(q, k, v), grouped)


def _one_row(*scores: float, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, weights) of one query that has these scores and the values 1, 10, 100, ..."""
    query = torch.ones(1, 1, 1, dtype=torch.float64)
    key = torch.tensor(scores, dtype=torch.float64).view(1, -1, 1)
    value = 10.0 ** torch.arange(len(scores), dtype=torch.float64).view(1, -1, 1)
    out, lse, weights = reference.attention(
        query, key, value, scale=1.0, **options, return_lse=True, return_weights=True
    )
    return out.flatten(), lse.flatten(), weights.flatten()


def _close(x: Tensor, *numbers: float) -> None:
    torch.testing.assert_close(x, torch.tensor(numbers, dtype=x.dtype), rtol=1e-12, atol=1e-12)


def test_hand_computed_weights() -> None:
    out, lse, weights = _one_row(0.0, math.log(3))
    _close(weights, 1 / 4, 3 / 4)
    _close(out, 1 / 4 + 30 / 4)
    _close(lse, math.log(4))


def test_hand_computed_mask_bias_and_sink() -> None:
    sink = torch.tensor([math.log(5)], dtype=torch.float64)
    bias = torch.tensor([[0.0, math.log(2), -math.inf, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    out, lse, weights = _one_row(
        0.0, math.log(3), 50.0, 60.0, attn_mask=mask, attn_bias=bias, sinks=sink
    )
    _close(weights, 1 / 12, 6 / 12, 0, 0)  # 1, 3 * 2, hidden, hidden, and 5 for the sink
    _close(out, 1 / 12 + 60 / 12)
    _close(lse, math.log(12))


def test_hand_computed_softcap_then_alibi() -> None:
    slopes = torch.tensor([math.log(2)], dtype=torch.float64)
    _, _, weights = _one_row(0.0, 1e9, softcap=math.log(4), alibi_slopes=slopes, query_offset=3)
    # tanh(1e9) is 1: scores 0 and ln 4; three and two positions away: 1/8 and 4/4.
    _close(weights, 1 / 9, 8 / 9)


def test_hand_computed_window() -> None:
    _, _, weights = _one_row(*[0.0] * 8, window=(2, 1), query_offset=4)
    _close(weights, 0, 0, 1 / 4, 1 / 4, 1 / 4, 1 / 4, 0, 0)
    _, _, weights = _one_row(*[0.0] * 4, window=(2, 1), query_offset=1, is_causal=True)
    _close(weights, 1 / 2, 1 / 2, 0, 0)


def test_dead_row_is_zero_and_sends_zero_gradients() -> None:
    query, key, value = (torch.randn(2, n, 3, dtype=torch.float64) for n in (4, 5, 5))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1] = False
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    out, lse = reference.attention(*leaves, mask, return_lse=True)
    assert torch.equal(out[:, 1], torch.zeros(2, 3, dtype=torch.float64))
    assert (lse[:, 1] == -math.inf).all()
    gradients = torch.autograd.grad((out[:, 1].sum(), lse[:, 1].sum()), leaves)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)
    out, lse = reference.attention(*leaves, mask, sinks=sinks, return_lse=True)
    assert torch.equal(lse[:, 1], sinks.detach())
    assert torch.equal(out[:, 1], torch.zeros(2, 3, dtype=torch.float64))
    (d_sinks,) = torch.autograd.grad(lse[:, 1].sum(), sinks)
    assert torch.equal(d_sinks, torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finfo_min_row_is_the_uniform_average(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, n, 4, dtype=dtype) for n in (3, 8, 8))
    bias = torch.zeros(3, 8, dtype=dtype)
    bias[1] = torch.finfo(dtype).min
    value.requires_grad_()
    out, weights = reference.attention(query, key, value, bias, return_weights=True)
    assert torch.equal(weights[0, 1], torch.full((8,), 1 / 8, dtype=dtype))
    torch.testing.assert_close(out[0, 1], value[0].mean(0))
    (d_value,) = torch.autograd.grad(out[0, 1].sum(), value)
    assert torch.equal(d_value, torch.full_like(value, 1 / 8))


def test_sum_of_two_finite_masks_stays_finite() -> None:
    smallest = torch.finfo(torch.float32).min
    query, key = torch.zeros(1, 1, 2), torch.randn(1, 4, 2)
    value = torch.eye(4).view(1, 4, 4)
    bias = torch.full((1, 4), smallest)
    out = reference.attention(query, key, value, bias, key_mask=torch.full((4,), smallest))
    assert torch.equal(out.flatten(), torch.full((4,), 0.25))


def test_hidden_nan_is_not_felt_and_sends_nothing() -> None:
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[:2, 3] = False  # key 3 is hidden from rows 0 and 1 only
    args, _ = Case("hidden", 4, 6, 3, batch=()).make(torch.float64, requires_grad=True)
    clean = evaluate(reference.attention, args, {"attn_mask": mask})
    with torch.no_grad():
        args[1][:, 3], args[2][:, 3] = math.nan, math.inf
    dirty = evaluate(reference.attention, args, {"attn_mask": mask})
    torch.testing.assert_close(dirty["out"][:, :2], clean["out"][:, :2])
    torch.testing.assert_close(dirty["grad_query"][:, :2], clean["grad_query"][:, :2])
    assert dirty["out"][:, 2:].isnan().all()
    assert dirty["grad_query"][:, 2:].isnan().all()


def test_nan_row_does_not_reach_the_keys_hidden_from_it() -> None:
    args, _ = Case("hidden", 4, 6, 3, batch=()).make(torch.float64, requires_grad=True)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[2, 1:4] = False
    with torch.no_grad():
        args[0][:, 2] = math.nan
    got = evaluate(reference.attention, args, {"attn_mask": mask})
    for name in ("grad_key", "grad_value"):
        assert got[name][:, 1:4].isfinite().all()
        assert got[name][:, [0, 4, 5]].isnan().all()


def test_overflow_to_minus_infinity_is_not_a_mask() -> None:
    """Visible scores that are all -inf: NaN, as dense softmax gives, and a logsumexp of -inf."""
    out, lse, _ = _one_row(-math.inf, -math.inf)
    assert out.isnan().all()
    assert (lse == -math.inf).all()


def test_no_size_is_division_by_no_zero() -> None:
    out = reference.attention(torch.ones(1, 2, 0), torch.ones(1, 4, 0), torch.ones(1, 4, 3))
    assert torch.equal(out, torch.ones(1, 2, 3))


def test_philox_known_answers() -> None:
    """The published test vectors of Philox4x32-10: all zeros, and all ones."""
    zero, ones = torch.zeros((), dtype=torch.int64), torch.tensor(WORD)
    answer = [int(x) for x in reference._philox((zero, zero, zero, zero), (0, 0))]
    assert answer == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    answer = [int(x) for x in reference._philox((ones, ones, ones, ones), (WORD, WORD))]
    assert answer == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert _philox([WORD] * 4, [WORD] * 2) == answer


@pytest.mark.parametrize(
    "state",
    [
        [0, 0, 0, 0, 0, 0],
        [-1, -1, 0, 0, 0, 0],
        [2**63 - 1, 2**40 + 3, 8, 2, 100, 13],
        [-(2**62) - 9, -(2**35), 16, 4, 2**31, 2**35 + 5],
    ],
    ids=["zero", "ones", "shard", "far"],
)
def test_dropout_mask_is_its_definition(state: list[int]) -> None:
    got = reference.dropout_mask(torch.tensor(state), (2,), 3, 4, 21, 0.4)
    for b, h, i, j in itertools.product(range(2), range(3), range(4), range(21)):
        assert bool(got[b, h, i, j]) == _keeps(state, 3, b, h, i, j, 0.4)


def test_dropout_mask_of_a_shard_is_part_of_the_whole() -> None:
    whole = reference.dropout_mask(torch.tensor([3, 4, 0, 0, 0, 0]), (2,), 6, 9, 40, 0.5)
    shard = reference.dropout_mask(torch.tensor([3, 4, 6, 2, 5, 11]), (2,), 3, 4, 20, 0.5)
    assert torch.equal(shard, whole[:, 2:5, 5:9, 11:31])


def test_dropout_rate_and_ends() -> None:
    state = torch.tensor([11, 0, 0, 0, 0, 0])
    kept = reference.dropout_mask(state, (4,), 8, 64, 64, 0.3).double().mean()
    assert abs(float(kept) - 0.7) < 0.01  # standard deviation 0.0013
    assert not reference.dropout_mask(state, (), 1, 9, 9, 1.0).any()
    assert reference.dropout_mask(state, (), 1, 9, 9, 0.0).all()
    assert reference.dropout_rescale(1.0) == 0.0
    assert reference.dropout_rescale(0.5) == 2.0
    assert reference.dropout_rescale(1 / 3) == 65536 / (65536 - 21845)


def test_derivatives_of_every_order_and_forward_mode() -> None:
    case = case_named("everything", q_len=3, k_len=5, size=2, value_size=2, batch=(1,), heads=2)
    args, kwargs = case.make(torch.float64, requires_grad=True)
    bias, sinks = kwargs.pop("attn_bias"), kwargs.pop("sinks")

    def call(*tensors: Tensor) -> Any:
        options = {**kwargs, "attn_bias": tensors[3], "sinks": tensors[4]}
        out, lse, weights = reference.attention(
            *tensors[:3], **options, return_lse=True, return_weights=True
        )
        return out, lse.masked_fill(lse.isinf(), 0), weights

    inputs = (*args, bias.detach().masked_fill(bias.isinf(), 1.0).requires_grad_(), sinks)
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (((2, 3), (2, 3), (2, 3)), "same number of dimensions"),
        (((1, 2, 3), (1, 2, 4), (1, 2, 3)), "do not go together"),
        (((3, 2, 4), (2, 2, 4), (2, 2, 4)), "no multiple"),
    ],
)
def test_refuses_shapes_that_do_not_fit(shapes: Any, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        reference.attention(*(torch.ones(shape) for shape in shapes))


def test_refuses_a_mask_of_three_dimensions_beside_a_query_of_four() -> None:
    query = torch.ones(2, 2, 3, 4)
    with pytest.raises(RuntimeError, match="attn_mask must be"):
        reference.attention(query, query, query, torch.ones(2, 3, 3, dtype=torch.bool))
