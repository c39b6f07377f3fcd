"""Work follows the mask: the block pairs that the kernels visit are those with a visible pair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_ext as ae
from attention_ext import reference
from cases import Case, PackedCase

OPS = torch.ops.attention_ext
ROWS, KEYS = 410, 530


def _pairs_with_something_visible(visible: Tensor) -> int:
    """Of (..., L, S), cut into the kernels' blocks."""
    rows, keys = OPS._block_sizes(visible.size(-2), visible.size(-1))
    count = 0
    for row_block in visible.split(rows, -2):
        for block in row_block.split(keys, -1):
            count += int(block.flatten(-2).any(-1).sum())
    return count


def _blocks(rows: int, keys: int, share: float) -> Tensor:
    """A mask whose blocks of 50 x 60 are wholly visible or wholly hidden."""
    seen = torch.rand(math.ceil(rows / 50), math.ceil(keys / 60)) < share
    return seen.repeat_interleave(50, 0).repeat_interleave(60, 1)[:rows, :keys]


def _options(kind: str, rows: int, keys: int) -> dict[str, Any]:
    distance = torch.arange(keys) - torch.arange(rows)[:, None]
    if kind == "nothing":
        return {}
    if kind == "causal":
        return {"is_causal": True}
    if kind == "bottom_right":
        return {"is_causal": True, "query_offset": keys - rows}
    if kind == "window":
        return {"window": (60, 20), "query_offset": 30}
    if kind == "window_of_one":
        return {"window": (0, 0)}
    if kind == "offsets":
        return {"is_causal": True, "query_offset": torch.tensor([-150, 70])}
    if kind == "mask_blocks":
        return {"attn_mask": _blocks(rows, keys, 0.3)}
    if kind == "mask_of_heads":
        return {"attn_mask": torch.stack([_blocks(rows, keys, 0.3) for _ in range(2)])[None]}
    if kind == "mask_band":
        return {"attn_mask": distance.abs() < 40}
    if kind == "one_pair":
        return {"attn_mask": (torch.arange(rows)[:, None] == 300) & (torch.arange(keys) == 333)}
    if kind == "hidden":
        return {"attn_mask": torch.zeros(rows, keys, dtype=torch.bool)}
    if kind == "bias_blocks":
        bias = torch.randn(rows, keys).masked_fill(~_blocks(rows, keys, 0.3), -math.inf)
        return {"attn_bias": bias}
    if kind in ("key_mask", "float_key_mask"):
        seen = torch.arange(keys) < torch.tensor([[130], [517]])
        if kind == "key_mask":
            return {"key_mask": seen}
        return {"key_mask": torch.zeros(2, keys).masked_fill(~seen, -math.inf)}
    assert kind == "mask_and_window"  # some blocks are hidden by the intersection alone
    return {"attn_mask": distance > 25, "window": (None, 25 + 60)}


KINDS = [
    "nothing",
    "causal",
    "bottom_right",
    "window",
    "window_of_one",
    "offsets",
    "mask_blocks",
    "mask_of_heads",
    "mask_band",
    "one_pair",
    "hidden",
    "bias_blocks",
    "key_mask",
    "float_key_mask",
    "mask_and_window",
]


@pytest.mark.parametrize("kind", KINDS)
def test_visited_block_pairs_are_those_with_something_visible(kind: str) -> None:
    """Forward and backward, in eager mode, with ordinary tensors for masks."""
    (q, k, v), _ = Case("pairs", ROWS, KEYS, 8).make(torch.float32, requires_grad=True)
    options = _options(kind, ROWS, KEYS)
    want = _pairs_with_something_visible(reference.visible_pairs(q, k, **options))
    total = _pairs_with_something_visible(torch.ones(2, 2, ROWS, KEYS, dtype=torch.bool))
    assert want == total if kind == "nothing" else want < total
    OPS._visited_block_pairs()  # reading the counter sets it to zero
    out = ae.attention(q, k, v, **options)
    assert OPS._visited_block_pairs() == want
    torch.autograd.grad(out.sum(), (q, k, v))
    assert OPS._visited_block_pairs() == want


@pytest.mark.parametrize("heads", [2, 16])
@pytest.mark.parametrize("kind", ["window", "key_mask", "mask_blocks"])
def test_one_query_skips_hidden_blocks_of_keys(kind: str, heads: int) -> None:
    """Also where the heads of a group are taken as rows: each of them counts."""
    kv_heads = 1 if heads == 16 else heads
    (q, k, v), _ = Case("pairs", 1, 4000, 8, heads=heads, kv_heads=kv_heads).make(torch.float32)
    if kind == "window":
        options: dict[str, Any] = {"window": (200, 0), "query_offset": 3000}
    elif kind == "key_mask":
        options = {"key_mask": torch.arange(4000) < torch.tensor([[130], [2000]])}
    else:
        options = {"attn_mask": _blocks(1, 4000, 0.2)}
    visible = reference.visible_pairs(q, k, **options)
    OPS._visited_block_pairs()
    ae.attention(q, k, v, **options)
    visited = OPS._visited_block_pairs()
    assert visited == _pairs_with_something_visible(visible)


def test_packed_sequences_visit_their_own_blocks_only() -> None:
    """The blocks of a packed call are cut within each sequence, by the sizes of the whole."""
    case = PackedCase("pairs", (130, 0, 300), (200, 50, 90), 8, is_causal=True)
    args, kwargs = case.make(torch.float32, requires_grad=True)
    OPS._visited_block_pairs()
    out = ae.varlen_attention(*args, **kwargs)
    forward = OPS._visited_block_pairs()
    torch.autograd.grad(out.sum(), args[:3])
    assert OPS._visited_block_pairs() == forward
    want = 0
    for rows, keys in zip(case.q_lens, case.k_lens, strict=True):
        if rows and keys:
            seen = torch.ones(2, rows, keys, dtype=torch.bool).tril()
            want += _pairs_with_something_visible(seen)
    assert forward == want
