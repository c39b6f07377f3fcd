"""Pads nested tensors and nests padded ones, in either layout. Used by modules.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def nested_lengths(x: Tensor) -> Tensor:
    """Return the sequence lengths (N) of a nested tensor (N, *, E), on its device."""
    if x.layout == torch.jagged:
        jagged: Any = x
        lengths: Tensor | None = jagged.lengths()
        return jagged.offsets().diff() if lengths is None else lengths
    return torch.tensor([part.size(0) for part in x.unbind()], device=x.device)


def beyond(lengths: Tensor, size: int) -> Tensor:
    """Return the bool mask (N, size) of the positions at or after each length: the padding."""
    return torch.arange(size, device=lengths.device) >= lengths.unsqueeze(1)


def nest_like(padded: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
    """Cut (N, L, E) to the lengths of the nested tensor x, in its layout.

    A jagged result shares x's offsets, so that torch sees the two as the same shape.
    """
    jagged: Any = x
    if x.layout == torch.jagged and jagged.lengths() is None:
        values = padded[~beyond(lengths, padded.size(1))]
        return torch.nested.nested_tensor_from_jagged(values, offsets=jagged.offsets())
    parts = [row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)]
    return torch.nested.as_nested_tensor(parts, layout=x.layout)
