"""Registers the fused operator in torch's own registry of flash attention implementations.

Called by users (``register()``), who then activate and restore it by torch's functions. Imports
override.py for torch's composite function, and serves the CPU's flash operator itself beside it.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from attention_ext import _ops
from attention_ext.override import replace_kernels, sdpa

__all__ = ["NAME", "register"]

#: The name that :func:`register` registers and returns.
NAME = "attention_ext"

_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def register() -> str:
    """Make ``torch.nn.attention.activate_flash_attention_impl("attention_ext")`` available.

    Activating it is :meth:`attention_ext.sdpa.enable` (process-wide, with all that is said there),
    and on the CPU it serves torch's flash operator, too, where code calls that directly.
    ``torch.nn.attention.restore_flash_attention_impl()`` puts back what was there. Nothing is
    active before.

    Returns:
        The name.

    Source: :func:`torch.nn.attention.register_flash_attention_impl`, in torch 2.11 and newer.

    Example::

        >>> import torch
        >>> from attention_ext.integrations import flash_impl
        >>> name = flash_impl.register()
        >>> torch.nn.attention.activate_flash_attention_impl(name)
        >>> torch.nn.attention.restore_flash_attention_impl()
    """
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_Active)
    return NAME


class _Active:
    """What torch's registry holds while ours is active."""

    def __init__(self) -> None:
        kernels = {_FLASH: _forward, f"{_FLASH}_backward": _backward}
        with ExitStack() as undo:
            sdpa.enable()
            undo.callback(sdpa.disable)
            replace_kernels(undo, [(name, "CPU", kernel) for name, kernel in kernels.items()])
            self._undo = undo.pop_all()

    def remove(self) -> None:
        self._undo.close()


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (output, logsumexp), the latter with the strides that torch's fake kernel promises."""
    output, logsumexp, *_ = _attend(query, key, value, dropout_p, is_causal, attn_mask, scale)
    return output, logsumexp.transpose(1, 2).contiguous().transpose(1, 2)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    torch's operator keeps the rounded output and logsumexp only, and a logsumexp alone cannot tell
    how many keys a row of finfo.min has: so they are computed again.
    """
    statistics = _attend(query, key, value, dropout_p, is_causal, attn_mask, scale)
    mask, bias = _sorted_mask(attn_mask)
    gradients = _ops.attention_backward(
        grad_out, None, query, key, value, mask, bias, *(None,) * 7, *statistics,
        [True, True, True, False, False], is_causal=is_causal, scale=scale,
    )  # fmt: skip
    return gradients[0], gradients[1], gradients[2]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Return the operator's output, logsumexp, and what rounding took from the two."""
    if dropout_p != 0.0:
        raise RuntimeError(
            "_scaled_dot_product_flash_attention_for_cpu: dropout_p must be 0 (as in torch), got "
            f"{dropout_p}; scaled_dot_product_attention takes any"
        )
    mask, bias = _sorted_mask(attn_mask)
    result: tuple[Tensor, ...] = _ops.attention(
        query, key, value, mask, bias, is_causal=is_causal, scale=scale
    )
    return result


def _sorted_mask(attn_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return (bool mask, bias) for a mask of either kind."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        return attn_mask, None
    return None, attn_mask
