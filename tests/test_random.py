"""Random calls against the reference in float64: every option at once, at sizes nobody chose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attention_ext as ae
from attention_ext import reference
from cases import Case, PackedCase, evaluate

LENGTHS = st.one_of(st.integers(0, 8), st.integers(9, 140), st.sampled_from([191, 193, 257, 520]))
SIZES = st.one_of(st.integers(1, 20), st.sampled_from([0, 31, 33, 64, 65, 96, 130]))
MASKS = st.sampled_from([None, "LS", "BHLS", "B1LS", "1HLS", "11LS", "B11S", "BHL1", "1111"])
SIDES = st.one_of(st.none(), st.integers(0, 300))
LAYOUTS = st.sampled_from(
    ["contiguous", "heads_last", "columns", "strided", "sliced", "expanded", "expanded_last"]
)


@st.composite
def calls(draw: st.DrawFn) -> Case:
    """A case of the table's kind."""
    kv_heads = draw(st.integers(1, 3))
    batch = draw(st.sampled_from([(1,), (2,), (3,)]))
    return Case(
        "random",
        draw(LENGTHS),
        draw(LENGTHS),
        draw(SIZES),
        draw(SIZES),
        batch=batch,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        mask=draw(MASKS),
        band=draw(st.sampled_from([None, None, (40, 10)])),
        bias=draw(MASKS),
        hidden_bias=draw(st.booleans()),
        key_mask=draw(st.sampled_from([None, "bool", "float"])),
        dead_rows=draw(st.booleans()),
        is_causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.tuples(SIDES, SIDES))),
        query_offset=draw(st.one_of(st.integers(-50, 200), st.just("per batch"))),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        sinks=draw(st.booleans()),
        alibi=draw(st.sampled_from([None, "H", "BH"])),
        scale=draw(st.sampled_from([None, 0.7, -0.4, 0.0])),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.35])),
        layout=draw(LAYOUTS),
    )


@st.composite
def packed_calls(draw: st.DrawFn) -> PackedCase:
    """A packed case of up to five sequences."""
    count = draw(st.integers(0, 5))
    lens = st.lists(st.integers(0, 120), min_size=count, max_size=count).map(tuple)
    kv_heads = draw(st.integers(1, 2))
    return PackedCase(
        "random",
        draw(lens),
        draw(lens),
        draw(SIZES),
        draw(SIZES),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        key_mask=draw(st.sampled_from([None, "bool", "float"])),
        is_causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.tuples(SIDES, SIDES))),
        query_offset=draw(st.one_of(st.integers(-50, 100), st.just("per batch"))),
        softcap=draw(st.sampled_from([0.0, 3.0])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.35])),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )


def _check(case: Any, op: Any, oracle: Any, seed: int, **more: Any) -> None:
    threads = torch.get_num_threads()
    args, kwargs = case.make(torch.float64, requires_grad=True, seed=seed)
    got = evaluate(op, args, kwargs, seed, **more)
    torch.set_num_threads(1)  # faster for the reference at these sizes
    want = evaluate(oracle, args, kwargs, seed, **more)
    torch.set_num_threads(threads)
    for name, x in want.items():
        torch.testing.assert_close(
            got[name], x, rtol=1e-9, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}"
        )


def _settings(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.slow
@_settings(300)
@given(calls(), st.integers(0, 99))
def test_random_calls_match_the_reference(case: Case, seed: int) -> None:
    _check(case, ae.attention, reference.attention, seed, return_lse=True)


@pytest.mark.slow
@_settings(80)
@given(calls(), st.integers(0, 99), st.sampled_from([True, "mean"]))
def test_random_weights_match_the_reference(case: Case, seed: int, kind: Any) -> None:
    more = {"return_lse": True, "return_weights": kind}
    _check(case, ae.attention, reference.attention, seed, **more)


@pytest.mark.slow
@_settings(80)
@given(packed_calls(), st.integers(0, 99))
def test_random_packed_calls_match_the_reference(case: PackedCase, seed: int) -> None:
    _check(case, ae.varlen_attention, reference.varlen_attention, seed, return_lse=True)


@_settings(25)
@given(calls(), st.integers(0, 99))
def test_a_few_random_calls_match_the_reference(case: Case, seed: int) -> None:
    _check(case, ae.attention, reference.attention, seed + 100, return_lse=True)
