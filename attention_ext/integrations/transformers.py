"""Registers the fused operator with Hugging Face transformers as an attention implementation.

Called by users (``register()``) and by examples/. Imports transformers, which the package needs
nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from attention_ext.functional import attention

__all__ = ["NAME", "register"]

NAME = "attention_ext"

# Keywords that models pass along and that do not change what attention computes here: a mask, if
# one is needed, already holds what positions and caches say.
_NO_EFFECT = frozenset(
    {
        "cache_position",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def register() -> str:
    """Make ``attn_implementation="attention_ext"`` available to every transformers model.

    Registers the attention and its masks under one name: with the attention alone, transformers
    would silently build no mask at all.

    Returns:
        The name, for ``from_pretrained(..., attn_implementation=register())``.

    Source: transformers' ``AttentionInterface`` and ``AttentionMaskInterface``.
    """
    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, _attention_mask)
    return NAME


def _attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = bidirectional_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return None, a padding mask (B, 1, 1, S), or a mask (B, 1, L, S); bool, True = takes part.

    Padding alone, the case of encoders, stays one row per sequence, whatever the length.
    """
    if mask_function is not bidirectional_mask_function or kv_offset != 0:
        dense: Tensor | None = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            **kwargs,
        )  # fmt: skip
        return dense
    if attention_mask is None:
        return None
    padding = attention_mask[:, :kv_length].to(torch.bool)
    if padding.size(1) < kv_length:  # keys beyond the mask are empty slots of a cache
        padding = nn.functional.pad(padding, (0, kv_length - padding.size(1)), value=False)
    return padding[:, None, None, :]


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers asks: (B, H, L, E) in, (B, L, H, Ev) out, and weights if asked for."""
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _NO_EFFECT)
    if unknown:
        raise NotImplementedError(
            f"attention_ext does not know what these attention keywords of "
            f"{type(module).__name__} mean: {', '.join(unknown)}"
        )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    is_causal = is_causal and attention_mask is None and query.size(2) > 1
    window = None
    if sliding_window is not None and attention_mask is None:
        window = (sliding_window - 1, 0) if is_causal else (sliding_window, sliding_window)
    mask, bias, key_mask = _sort_mask(attention_mask)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    result = attention(
        query,
        key,
        value,
        mask,
        attn_bias=bias,
        key_mask=key_mask,
        is_causal=is_causal,
        window=window,
        softcap=softcap or 0.0,
        sinks=s_aux,
        scale=scaling,
        dropout_p=dropout,
        return_weights=bool(output_attentions),
    )
    out, weights = (result, None) if isinstance(result, Tensor) else result
    return out.transpose(1, 2).contiguous(), weights


def _sort_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (attn_mask, attn_bias, key_mask) for what a model hands over as its mask."""
    if mask is None:
        return None, None, None
    if mask.dtype != torch.bool:
        return None, mask, None
    if mask.dim() == 4 and mask.size(1) == mask.size(2) == 1:
        return None, None, mask[:, 0, 0]
    return mask, None, None
