"""Translates nn.MultiheadAttention's masks into the operator's, without expanding any of them.

Called by modules.py once per call. There, bool True means hidden; here and below, it means takes
part. Knows nothing of modules: tensors and sizes in, tensors out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Window = tuple[int | None, int | None]

NO_WINDOW: Window = (None, None)


class Masks(NamedTuple):
    """What hides keys, as the operator takes it."""

    attn_mask: Tensor | None  # bool, True = takes part, (N or 1, H or 1, L or 1, S)
    attn_bias: Tensor | None  # float, the same shapes
    key_mask: Tensor | None  # (N, S), bool True = takes part, or float
    is_causal: bool
    window: Window


class Sizes(NamedTuple):
    """The sizes a mask is translated for. `keys` leaves out the appended ones."""

    batch: int
    heads: int
    length: int
    keys: int
    appended: int


def translate_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    window: Window,
    sizes: Sizes,
    like: Tensor,
) -> Masks:
    """Invert bool masks, bring float ones to a dtype that fits `like`, show the appended keys.

    Args:
        attn_mask: (L, S) or (N * H, L, S), True = hidden or float; wins over is_causal.
        key_padding_mask: (N, S), True = hidden or float.
        is_causal: query i sees keys 0..i.
        window: on top of all masks.
        sizes: of the call; `appended` keys follow the others and nothing hides them.
        like: the projected query, for dtype and device.
    """
    mask = bias = key_mask = None
    if attn_mask is not None:
        is_causal = False
        lead = (1, 1) if attn_mask.dim() == 2 else (sizes.batch, sizes.heads)
        attn_mask = attn_mask.view(*lead, *attn_mask.shape[-2:])
        if attn_mask.dtype == torch.bool:
            mask = _pad_keys(~_without_expansion(attn_mask), sizes.appended, True)
        else:
            bias = _pad_keys(_in_bias_dtype(attn_mask, like.dtype), sizes.appended, 0.0)
    if key_padding_mask is not None:
        if key_padding_mask.dtype == torch.bool:
            key_mask = _pad_keys(~key_padding_mask, sizes.appended, True)
        else:
            key_bias = _in_bias_dtype(key_padding_mask, like.dtype)
            key_mask = _pad_keys(key_bias, sizes.appended, 0.0)
            if key_mask.requires_grad:  # the operator's key_mask is a constant, attn_bias is not
                bias = _finite_sum(bias, key_mask.view(sizes.batch, 1, 1, -1))
                key_mask = None
    if sizes.appended and (is_causal or window != NO_WINDOW):
        visible = _band(sizes, is_causal, window, like.device)
        is_causal, window = False, NO_WINDOW
        if mask is None:
            mask = visible
        else:  # the operator takes a mask and a bias: no merging into one mask per head
            zero = torch.zeros((), dtype=_bias_dtype(like.dtype), device=like.device)
            bias = torch.where(visible, zero if bias is None else bias, zero - math.inf)
    return Masks(mask, bias, key_mask, is_causal, window)


def _without_expansion(mask: Tensor) -> Tensor:
    """Narrow expanded dimensions to size 1: inverting then costs what the mask really holds.

    The last dimension keeps its size, because columns may be appended to it.
    """
    for dim in range(mask.dim() - 1):
        if mask.stride(dim) == 0 and mask.size(dim) > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _pad_keys(mask: Tensor, appended: int, value: float) -> Tensor:
    return F.pad(mask, (0, appended), value=value) if appended else mask


def _bias_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _in_bias_dtype(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a float mask unless the operator takes its dtype beside queries of the given one.

    A finite number stays finite: float64's lowest must not become float32's -inf.
    """
    target = _bias_dtype(dtype)
    if mask.dtype in (dtype, target):
        return mask
    cast = mask.to(target)
    if mask.dtype != torch.float64:
        return cast
    return _keep_finite(cast, mask.isfinite())


def _finite_sum(bias: Tensor | None, key_bias: Tensor) -> Tensor:
    """Add a bias per key to a bias; two finite numbers have a finite sum."""
    if bias is None:
        return key_bias
    return _keep_finite(bias + key_bias, bias.isfinite() & key_bias.isfinite())


def _keep_finite(x: Tensor, finite: Tensor) -> Tensor:
    """Replace the infinities of x by the dtype's largest numbers where `finite` says so."""
    info = torch.finfo(x.dtype)
    return torch.where(x.isinf() & finite, x.clamp(info.min, info.max), x)


def _band(sizes: Sizes, is_causal: bool, window: Window, device: torch.device) -> Tensor:
    """Return the window as a bool matrix (1, 1, L, S + appended) that shows the appended keys."""
    i = torch.arange(sizes.length, device=device).unsqueeze(1)
    j = torch.arange(sizes.keys + sizes.appended, device=device)
    left, right = window
    if is_causal:
        right = 0
    shape = (sizes.length, sizes.keys + sizes.appended)
    visible = torch.ones(shape, dtype=torch.bool, device=device)
    if left is not None:
        visible &= j >= i - left
    if right is not None:
        visible &= j <= i + right
    return (visible | (j >= sizes.keys)).view(1, 1, *shape)
