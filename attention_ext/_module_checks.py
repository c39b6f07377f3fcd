"""What MultiheadAttention refuses, in torch's error types and words where torch has any.

Called by modules.py: at construction, and at every call before any work.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention_ext._module_masks import Sizes, Window


def checked_kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
    """Return the number of key/value heads, num_heads by default."""
    if num_kv_heads is None:
        return num_heads
    if num_kv_heads <= 0 or num_heads % num_kv_heads != 0:
        raise ValueError(
            "num_kv_heads must be positive and divide num_heads, "
            f"got num_kv_heads={num_kv_heads} and num_heads={num_heads}"
        )
    return num_kv_heads


def checked_window(window: Window | None) -> Window | None:
    """Return the window as a tuple (left, right)."""
    if window is None:
        return None
    sides = tuple(window) if isinstance(window, (tuple, list)) else ()
    if len(sides) != 2 or not all(
        side is None or (type(side) is int and side >= 0) for side in sides
    ):
        raise ValueError(
            f"window must be (left, right), each a non-negative int or None, got {window!r}"
        )
    return sides[0], sides[1]


def check_mask_dtype(mask: Tensor | None, name: str) -> None:
    """Refuse integer masks, whose meaning differs between libraries."""
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise AssertionError(f"only bool and floating types of {name} are supported")


def check_shapes(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> Sizes:
    """Refuse 3-D inputs whose sizes do not fit together; return the sizes of the call."""
    if query.size(-1) != module.embed_dim:
        raise AssertionError(
            f"was expecting embedding dimension of {module.embed_dim}, but got {query.size(-1)}"
        )
    if module._qkv_same_embed_dim:
        if key.shape != value.shape:
            raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")
    elif key.shape[:2] != value.shape[:2]:
        raise AssertionError(
            f"key's sequence and batch dims {key.shape[:2]} do not match value's {value.shape[:2]}"
        )
    batch_dim = 0 if module.batch_first else 1
    batch, length = query.size(batch_dim), query.size(1 - batch_dim)
    keys = key.size(1 - batch_dim)
    if key.size(batch_dim) != batch:
        raise RuntimeError(
            f"query and key must have the same batch size, but got query {query.shape} "
            f"and key {key.shape} with batch_first={module.batch_first}"
        )
    if key_padding_mask is not None:
        for dim, size in enumerate((batch, keys)):
            if key_padding_mask.size(dim) != size:
                raise AssertionError(
                    f"Expected key_padded_mask.shape[{dim}] to be {size}, "
                    f"but got {key_padding_mask.size(dim)}"
                )
    if attn_mask is not None:
        matrices = () if attn_mask.dim() == 2 else (batch * module.num_heads,)
        expected = (*matrices, length, keys)
        if attn_mask.shape != expected:
            raise RuntimeError(
                f"The shape of the {attn_mask.dim()}D attn_mask is {attn_mask.shape}, "
                f"but should be {expected}."
            )
    appended = int(module.bias_k is not None) + int(module.add_zero_attn)
    return Sizes(batch, module.num_heads, length, keys, appended)
