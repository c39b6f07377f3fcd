"""What torch's flop counter and profiler see of the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import attention_ext as ae

B, H, KV, L, S, E, EV = 2, 4, 2, 5, 7, 6, 3
OPS: Any = torch.ops.attention_ext


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def qkv(*batch: int, heads: int = H, kv_heads: int = KV, ev: int = EV) -> tuple[Tensor, ...]:
    shapes = ((heads, L, E), (kv_heads, S, E), (kv_heads, S, ev))
    return tuple(torch.randn(*batch, *shape, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("kv_heads", [H, KV, 1])
@pytest.mark.parametrize("ev", [E, EV])
def test_counts_are_those_of_torchs_attention(kv_heads: int, ev: int) -> None:
    q, k, v = qkv(B, kv_heads=kv_heads, ev=ev)
    forward = flops(lambda: ae.attention(q, k, v, is_causal=True))
    assert forward == sdpa_flop_count(q.shape, k.shape, v.shape)
    both = flops(lambda: ae.attention(q, k, v).sum().backward())
    out = (B, H, L, ev)
    assert both - forward == sdpa_backward_flop_count(out, q.shape, k.shape, v.shape)


def test_counts_are_what_torchs_dense_formula_multiplies() -> None:
    q, k, v = qkv(B, kv_heads=H)
    with sdpa_kernel(SDPBackend.MATH):
        dense = flops(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
    score, value = (2 * B * H * L * S * n for n in (E, EV))
    assert dense == 3 * score + 3 * value  # it keeps the scores; a fused backward makes them again
    assert flops(lambda: ae.attention(q, k, v).sum().backward()) == dense + score


def test_every_operator_has_a_formula() -> None:
    q, k, v = qkv(B)
    bias = torch.randn(1, H, L, S, requires_grad=True)
    score, value = (2 * B * H * L * S * n for n in (E, EV))
    options = {"attn_bias": bias, "key_mask": torch.ones(B, S) > 0, "window": (3, 3)}

    def call(backward: bool) -> None:
        out, weights = ae.attention(q, k, v, **options, return_weights="mean")
        if backward:
            (out.sum() + weights.square().sum()).backward()

    assert flops(lambda: call(False)) == (score + value) + score
    attention, weights = 3 * score + 2 * value, 4 * score
    assert flops(lambda: call(True)) == (score + value) + score + attention + weights


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_any_batch_dimensions_count(batch: tuple[int, ...]) -> None:
    q, k, v = qkv(*batch)
    sequences = 6 if batch else 1
    assert flops(lambda: ae.attention(q, k, v)) == 2 * sequences * H * L * S * (E + EV)


def test_packed_sequences_count_the_pairs_within_each() -> None:
    q, k, v = (x.detach().transpose(0, 1).requires_grad_() for x in qkv())
    borders_q, borders_k = torch.tensor([0, 2, 5]), torch.tensor([0, 6, 7])
    pairs = 2 * 6 + 3 * 1

    def call() -> Tensor:
        return ae.varlen_attention(q, k, v, borders_q, borders_k)

    assert flops(call) == 2 * H * pairs * (E + EV)
    assert flops(lambda: call().sum().backward()) == 2 * H * pairs * (4 * E + 3 * EV)
    named = {"cu_seqlens_q": borders_q, "cu_seqlens_k": borders_k}
    packed = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    assert flops(lambda: OPS.attention(*packed, **named)) == 2 * H * pairs * (E + EV)
    fake = [x.to("meta") for x in packed]  # lengths that nobody knows: as if one sequence
    named = {name: borders.to("meta") for name, borders in named.items()}
    assert flops(lambda: OPS.attention(*fake, **named)) == 2 * H * L * S * (E + EV)


def test_models_on_the_operator_count_as_with_torchs_attention() -> None:
    x = torch.randn(2, 9, 16)
    model = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    own = flops(lambda: model(x, x, x, need_weights=True))
    holder = torch.nn.ModuleList([model])
    ae.replace_attention(holder)
    with FlopCounterMode(holder, display=False) as counter:
        holder[0](x, x, x, need_weights=False)
    assert counter.get_total_flops() == own
    counts = counter.get_flop_counts()["Global"]
    assert counts[OPS.attention] == 2 * 2 * 2 * 4 * 9 * 9 * 4


def test_the_profiler_names_operators_and_their_backward() -> None:
    q, k, v = qkv(B)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        out, weights = ae.attention(q, k, v, return_weights=True)
        (out.sum() + weights.square().sum()).backward()
    events = {event.key: event for event in seen.key_averages()}
    for name in ("attention", "attention_backward", "attention_weights"):
        assert events[f"attention_ext::{name}"].count == 1, name
    assert events["attention_ext::attention_weights_backward"].count == 1
    nodes = [name for name in events if "evaluate_function" in name]
    assert any("AttentionBackward" in name for name in nodes)
    assert any("AttentionWeightsBackward" in name for name in nodes)
    (forward,) = (e for e in seen.events() if e.name == "attention_ext::attention")
    assert forward.input_shapes[:3] == [list(x.shape) for x in (q, k, v)]
    (backward,) = (e for e in seen.events() if e.name == "attention_ext::attention_backward")
    assert "AttentionBackward" in backward.cpu_parent.name
