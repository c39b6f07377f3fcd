"""MultiheadAttention beside torch's: configurations, equal pairs of modules, inputs and masks.

L, S, N and E are different numbers throughout, so that a swapped dimension shows.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_ext.modules import MultiheadAttention

N, L, S, E, H = 2, 5, 7, 12, 3

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": True},
    "bias_kv and zero_attn": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    "kdim and vdim": {"kdim": 8, "vdim": 10},
    "kdim, batch first, bias_kv": {"kdim": 8, "batch_first": True, "add_bias_kv": True},
    "vdim, no bias, zero_attn": {"vdim": 10, "bias": False, "add_zero_attn": True},
}
ATTN_MASKS = (None, "bool 2-D", "float 2-D", "bool 3-D", "float 3-D")
PADDING_MASKS = (None, "bool", "float")


def slow(*values: Any) -> Any:
    """A parameter that `make check` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def pair(dtype: torch.dtype = torch.float64, **config: Any) -> tuple[nn.Module, MultiheadAttention]:
    """torch's module and ours with equal parameters, the biases not zero."""
    theirs = nn.MultiheadAttention(E, H, dtype=dtype, **config)
    for name, parameter in theirs.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    ours = MultiheadAttention(E, H, dtype=dtype, **config)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def make_inputs(
    kind: str, config: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """(leaves, (query, key, value)): leaves are what the three are made of."""
    kdim, vdim = config.get("kdim") or E, config.get("vdim") or E
    same_size = kdim == vdim == E

    def leaf(length: int, size: int) -> Tensor:
        shape = [N, length] if config.get("batch_first") else [length, N]
        shape = [length] if kind == "unbatched" else shape
        return torch.randn(*shape, size, dtype=dtype, requires_grad=True)

    query = leaf(L, E)
    if kind == "self" and same_size:
        return [query], (query, query, query)
    key = leaf(S, kdim)
    if kind == "cross" and kdim == vdim:
        return [query, key], (query, key, key)
    value = leaf(S, vdim)
    return [query, key, value], (query, key, value)


def make_masks(
    attn: str | None, padding: str | None, keys: int, kind: str, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Masks of torch's polarity that leave key 0 visible to everybody."""
    masks: dict[str, Tensor] = {}
    batch = 1 if kind == "unbatched" else N
    if attn is not None:
        shape = (L, keys) if "2-D" in attn else (batch * H, L, keys)
        masks["attn_mask"] = torch.rand(shape) < 0.4 if "bool" in attn else torch.randn(shape)
    if padding is not None:
        shape = (keys,) if kind == "unbatched" else (N, keys)
        mask = torch.rand(shape) < 0.4 if padding == "bool" else torch.randn(shape)
        masks["key_padding_mask"] = mask
    for name, mask in masks.items():
        if mask.dtype == torch.bool:
            mask[..., 0] = False
        else:
            mask[..., -1] = -math.inf
            masks[name] = mask.to(dtype)
    return masks


def gradients(out: Tensor, weights: Tensor | None, wanted: list[Tensor]) -> list[Tensor]:
    """Gradients of a loss that depends on every entry of the output and of the weights."""
    torch.manual_seed(5)  # and not randn_like, which follows the strides
    loss = (out * torch.randn(out.shape, dtype=out.dtype)).sum()
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape, dtype=out.dtype)).sum()
    return list(torch.autograd.grad(loss, wanted))
