"""Typed access to torch.ops.attention_ext: the raw ops, argument by argument as in their schemas.

Used by functional.py and modules.py. Nothing is checked or converted here: the ops check
everything. Each op is bound once, at import, so that a call pays for no look-up.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from attention_ext import _loader

_loader.load()

# OpOverloads, to be called with (tensors..., **Scalars): see csrc/ops for the schemas.
attention: Any = torch.ops.attention_ext.attention.default
attention_backward: Any = torch.ops.attention_ext.attention_backward.default
attention_weights: Any = torch.ops.attention_ext.attention_weights.default
attention_weights_backward: Any = torch.ops.attention_ext.attention_weights_backward.default


class Scalars(TypedDict, total=False):
    """The keyword-only arguments that all four ops share."""

    query_offset: int
    window_left: int | None
    window_right: int | None
    is_causal: bool
    scale: float | None
    softcap: float
    dropout_p: float


class Tensors(TypedDict, total=False):
    """The optional tensors that all four ops share, in the order of the schema."""

    attn_mask: Tensor | None
    attn_bias: Tensor | None
    key_mask: Tensor | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    query_offsets: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    rng_state: Tensor | None


def cpu_capability() -> str:
    """The tier whose kernels this process runs: baseline, avx2, avx512 or avx512_bf16."""
    return str(torch.ops.attention_ext._cpu_capability())
