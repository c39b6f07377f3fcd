"""How often vmap calls the operators: once, whatever arguments are batched, but for what is named.

That the results are those of a loop is tests/test_transforms.py's matter.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from watch import Watch

OPS: Any = torch.ops.attention_ext
N, B, H, KV, L, S, E = 3, 2, 4, 2, 5, 6, 3
SHAPES: dict[str, tuple[int, ...]] = {
    "query": (B, H, L, E), "key": (B, KV, S, E), "value": (B, KV, S, E),
    "attn_bias": (B, 1, L, S), "attn_mask": (1, H, L, S), "key_mask": (B, S),
    "alibi_slopes": (H,), "query_offsets": (B,), "sinks": (H,),
}  # fmt: skip
LEARNED = ("query", "key", "value", "attn_bias", "sinks")


def make(name: str, batched: bool, shape: tuple[int, ...]) -> Tensor:
    size = (N, *shape) if batched else shape
    if name in ("attn_mask", "key_mask"):
        return torch.rand(size) > 0.2
    if name == "query_offsets":
        return torch.randint(0, 4, size)
    return torch.rand(size, dtype=torch.float64)


def calls(names: tuple[str, ...], batched: tuple[str, ...], **shapes: Any) -> tuple[int, int, int]:
    """Calls in a vmapped forward pass; and forward and backward in per-sample gradients."""
    tensors = [make(name, name in batched, shapes.get(name, SHAPES[name])) for name in names]
    dims = tuple(0 if name in batched else None for name in names)
    learned = tuple(n for n, name in enumerate(names) if name in LEARNED)

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        return OPS.attention(**dict(zip(names, values, strict=True)))[:2]

    def loss(*values: Tensor) -> Tensor:
        output, logsumexp = function(*values)
        return output.sin().sum() + logsumexp.clamp(min=-9.0).sum()

    with Watch() as forward:
        ours = vmap(function, in_dims=dims)(*tensors)
    loop = [
        function(*(x[n] if d == 0 else x for x, d in zip(tensors, dims, strict=True)))
        for n in range(N)
    ]
    torch.testing.assert_close(ours, tuple(torch.stack(x) for x in zip(*loop, strict=True)))
    with Watch() as both:
        vmap(grad(loss, argnums=learned), in_dims=dims)(*tensors)
    return forward.ours, both.ours, both.calls["attention_ext::attention_backward"]


def subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [s for n in range(1, len(names) + 1) for s in itertools.combinations(names, n)]


def test_any_subset_of_all_arguments_but_sinks_is_one_call() -> None:
    names = tuple(name for name in SHAPES if name != "sinks")
    for batched in subsets(names):
        assert calls(names, batched) == (1, 1, 1), batched


def test_sinks_that_differ_or_learn_are_one_call_beside_padding_and_slopes() -> None:
    names = ("query", "key", "value", "key_mask", "alibi_slopes", "sinks")
    for batched in subsets(names):
        assert calls(names, batched) == (1, 1, 1), batched


@pytest.mark.parametrize("batched", [True, False])
def test_sinks_beside_masks_are_one_call_where_the_mask_has_the_heads_or_one(batched: bool) -> None:
    names = ("query", "key", "value", "attn_mask", "sinks")
    shape = (1, H, L, S) if batched else (1, 1, L, S)
    for others in subsets(("query", "value", "sinks")):
        mapped = (*others, "attn_mask") if batched else others
        assert calls(names, mapped, attn_mask=shape) == (1, 1, 1), mapped


def test_the_loops_that_there_are() -> None:
    """Sinks beside what cannot be put into heads, and dropout, whose counters are a loop's."""
    names = ("query", "key", "value", "query_offsets", "sinks")
    assert calls(names, ("sinks", "query_offsets")) == (N, N, N)
    assert calls(names, ("query", "query_offsets")) == (1, 1, N)  # for the gradient of the sinks
    x = torch.randn(N, H, L, E)
    state = torch.tensor([1, 2, 0, 0, 0, 0])
    with Watch() as seen:
        vmap(lambda x: OPS.attention(x, x, x, rng_state=state, dropout_p=0.5)[0])(x)
    assert seen.ours == N
