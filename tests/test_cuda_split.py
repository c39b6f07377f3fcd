"""Few queries and many keys on the tensor-core kernels: keys shared out among blocks, then joined.

The kernels' own source on the host, through the SIMT shim. The table has every option where rows of
a group's heads share a tile, in one and in two tiles, against float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention_ext import reference
from cases import Case, assert_accurate, evaluate, truth_and_plain
from cuda_emulation import (
    NO_COMPILER,
    Emulator,
    Library,
    can_compile,
    emulator,
    sanitized,
)

pytestmark = [
    pytest.mark.slow,  # compiling takes most of a minute
    pytest.mark.skipif(not can_compile(), reason=NO_COMPILER),
]

ONE = {"batch": (1,), "heads": 2}
CASES = [
    Case("one_query", 1, 600, 64),
    Case("one_query_of_a_group", 1, 1100, 64, 40, heads=8, kv_heads=2),
    Case("widest_group", 1, 1030, 128, 144, batch=(1,), heads=20, kv_heads=1),
    Case("widest_heads", 3, 513, 256, 200, batch=(1,), heads=4, kv_heads=2),
    Case("rows_of_two_heads_in_a_tile", 40, 2060, 64, batch=(1,), heads=3, kv_heads=1),
    Case("two_tiles_of_one_head", 70, 2050, 64, 72, batch=(1,), heads=1),
    Case("heads_last", 4, 515, 40, layout="heads_last", kv_heads=1, mask="BHLS"),
    Case("mask_full", 5, 1000, 64, kv_heads=1, mask="BHLS", dead_rows=True),
    Case("mask_of_keys", 1, 800, 64, heads=4, kv_heads=2, mask="B11S"),
    Case("mask_of_heads", 2, 600, 64, kv_heads=1, mask="1H1S"),
    Case("mask_band", 3, 1500, 64, **ONE, mask="11LS", band=(0, 70)),
    Case("key_mask", 1, 900, 64, heads=4, kv_heads=1, key_mask="bool"),
    Case("key_mask_float", 4, 600, 64, kv_heads=1, key_mask="float"),
    Case("bias_full", 3, 700, 64, kv_heads=1, bias="BHLS", wide_bias=True),
    Case("bias_of_heads", 1, 700, 64, heads=4, kv_heads=2, bias="1H1S"),
    Case("bias_dead_rows", 5, 600, 128, kv_heads=1, bias="BHLS", dead_rows=True),
    Case("bias_and_key_mask", 2, 600, 64, kv_heads=1, bias="1HLS", key_mask="float"),
    Case("causal_bottom_right", 5, 900, 64, kv_heads=1, is_causal=True, query_offset=895),
    Case("causal_two_tiles", 80, 2100, 64, **ONE, is_causal=True, query_offset=1000),
    Case("causal_dead", 6, 600, 64, **ONE, is_causal=True, query_offset=-3),
    Case("window", 2, 3000, 64, **ONE, window=(700, 10), query_offset=1500),
    Case("window_away", 2, 2000, 64, **ONE, window=(600, 600), query_offset=9000),
    Case(
        "offset_per_batch", 2, 700, 64, batch=(3,), kv_heads=1, is_causal=True,
        query_offset="per batch",
    ),
    Case("softcap", 3, 600, 64, kv_heads=1, softcap=2.0),
    Case("sinks", 3, 600, 64, heads=4, kv_heads=2, sinks=True, mask="11LS", dead_rows=True),
    Case("alibi", 3, 600, 64, heads=4, kv_heads=2, alibi="BH", query_offset=590),
    Case("scale_negative", 2, 600, 64, kv_heads=1, scale=-0.3),
    Case("scale_zero", 2, 600, 64, **ONE, scale=0.0),
    Case("dropout", 3, 600, 64, heads=4, kv_heads=2, dropout_p=0.3),
    Case(
        "everything", 6, 1100, 72, 40, heads=6, kv_heads=2, mask="B1LS", bias="1HLS",
        key_mask="float", window=(1010, 40), query_offset=1000, softcap=8.0, sinks=True,
        alibi="H", scale=0.2, dropout_p=0.2,
    ),
]  # fmt: skip
TABLE = [(case, (torch.bfloat16, torch.float16)[n % 2]) for n, case in enumerate(CASES)]


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def splits(q: Tensor, v: Tensor) -> int:
    """Parts of the keys, from the workspace that the last forward was given."""
    follow = emulator().follow
    assert isinstance(follow, Library)
    parts, rest = divmod(follow.workspaces["forward"], q[..., 0].numel() * (4 * v.size(-1) + 16))
    assert rest == 0
    return max(1, parts)


@pytest.mark.parametrize(("case", "dtype"), TABLE, ids=str)
def test_every_option_is_accurate(case: Case, dtype: torch.dtype) -> None:
    args, kwargs = case.make(dtype, requires_grad=True)
    truth, plain = truth_and_plain(args, kwargs, return_lse=True)
    ours = evaluate(emulator().attention, args, kwargs, return_lse=True)
    assert splits(args[0], args[2]) > 1
    assert_accurate(ours, truth, plain, case.name)


def forward(
    device: Emulator, case: Case, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    args, kwargs = case.make(dtype)
    results: tuple[Tensor, ...] = device.attention(*args, **kwargs, return_lse=True)
    return results


@pytest.mark.parametrize("name", ["everything", "causal_two_tiles", "widest_group"])
def test_no_bit_depends_on_the_order_of_threads_or_on_pieces_of_a_grid(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = forward(emulator(), named(name))
    found = [forward(emulator(grid_blocks=3), named(name))]
    monkeypatch.setenv("AE_SHIM_SEED", "12345")
    found.append(forward(emulator(), named(name)))
    for results in found:
        assert all(torch.equal(a, b) for a, b in zip(results, want, strict=True))


def test_a_sample_has_the_same_bits_alone_and_in_a_batch() -> None:
    (q, k, v), _ = named("one_query_of_a_group").make(torch.float16)
    many = [x.repeat(4, 1, 1, 1) for x in (q, k, v)]
    together = emulator().attention(*many)
    alone = emulator().attention(q[1:], k[1:], v[1:])
    assert torch.equal(together[5:6], alone)


def test_hidden_tiles_are_not_visited_and_heads_of_a_group_share_a_visit() -> None:
    q = torch.randn(2, 8, 1, 64).bfloat16()
    k, v = (torch.randn(2, 2, 1024, 64).bfloat16() for _ in range(2))
    device = emulator()
    device.attention(q, k, v)
    assert int(device.visited) == 2 * 2 * 16  # batch, key heads, key tiles
    mask = torch.zeros(2, 1, 1, 1024, dtype=torch.bool)
    mask[0, ..., 70:90] = True
    mask[1, ..., 1000:] = True
    device.attention(q, k, v, mask)
    assert int(device.visited) == 2 + 2
    device.attention(q, k, v, window=(600, 0), query_offset=1000)
    assert int(device.visited) == 2 * 2 * 10  # keys 400 to 1000


def test_rows_that_no_part_sees_are_dead_and_sinks_count_once() -> None:
    q, k, v = (torch.randn(1, 2, n, 64).bfloat16() for n in (2, 600, 600))
    mask = torch.ones(2, 600, dtype=torch.bool)
    mask[1] = False
    sinks = torch.tensor([0.5, 3.0])
    out, lse = emulator().attention(q, k, v, mask, sinks=sinks, return_lse=True)
    assert (out[:, :, 1] == 0).all()
    assert torch.equal(lse[0, :, 1], sinks)
    scores = (q.double() @ k.double().mT / 8)[:, :, 0]
    want = torch.logsumexp(torch.cat([scores, sinks.view(1, 2, 1).double()], -1), -1)
    torch.testing.assert_close(lse[:, :, 0].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_hidden_keys_cannot_be_felt_and_visible_ones_show(bad: float) -> None:
    """The part that holds them is computed again without them, for each head of the group."""
    case = Case("hidden", 3, 700, 64, batch=(1,), heads=4, kv_heads=1, mask="1HLS", dropout_p=0.1)
    args, kwargs = case.make(torch.float16)
    kwargs["attn_mask"][..., 500] = False
    kwargs["attn_mask"][..., 20] = False
    truth, plain = truth_and_plain(args, kwargs, return_lse=True)
    q, k, v = (x.clone() for x in args)
    k[..., 20, :] = bad
    v[..., 500, :] = bad
    assert_accurate(
        evaluate(emulator().attention, (q, k, v), kwargs, return_lse=True), truth, plain, "hidden"
    )
    kwargs["attn_mask"][0, 2, 1, 500] = True  # one row of one head sees it
    kwargs.pop("dropout_p")
    shown = emulator().attention(q, k, v, **kwargs)
    spoilt = ~shown.isfinite().all(-1)
    assert spoilt[0, 2, 1]
    assert int(spoilt.sum()) == 1


@pytest.mark.parametrize("first_key", [0, 16, 13])
def test_dropout_drops_what_the_cpu_drops(first_key: int) -> None:
    """One-hot values show the mask, bit for bit, in every part and head."""
    q, k = torch.zeros(2, 6, 3, 64).half(), torch.zeros(2, 2, 600, 64).half()
    shown = torch.arange(256) * 2 + 73
    v = torch.zeros(2, 2, 600, 256).half()
    v[:, :, shown, torch.arange(256)] = 1
    state = torch.tensor([5, 1 << 34, 0, 0, 7, first_key])
    out = emulator().attention(q, k, v, dropout_p=0.4, rng_state=state)
    assert splits(q, v) == 2
    kept = reference.dropout_mask(state, (2,), 6, 3, 600, 0.4)
    assert torch.equal(out != 0, kept[..., shown])


SANITIZED = ("rows_of_two_heads_in_a_tile", "sinks", "everything")


@sanitized
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize("name", SANITIZED)
def test_sanitizers_find_nothing(name: str, sanitizer: str) -> None:
    want, found = (forward(d, named(name)) for d in (emulator(), emulator(sanitizer)))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0.01, atol=0.01)


@sanitized
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing_where_parts_are_computed_again(sanitizer: str) -> None:
    (q, k, v), _ = Case("again", 2, 520, 64, batch=(1,), heads=2, kv_heads=1).make(torch.float16)
    mask = torch.ones(2, 520, dtype=torch.bool)
    mask[:, 300] = False
    v[..., 300, :] = torch.nan
    assert emulator(sanitizer).attention(q, k, v, mask).isfinite().all()
