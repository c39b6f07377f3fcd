"""The functional API: attention, scaled_dot_product_attention, varlen_attention, make_rng_state.

Thin Python over torch.ops.attention_ext: it sorts arguments (a float mask is a bias, a tensor of
offsets is not an int), draws the dropout state, and leaves every check of values to the ops.
``torch.compile(fullgraph=True)`` traces through all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from attention_ext import _ops

__all__ = ["attention", "make_rng_state", "scaled_dot_product_attention", "varlen_attention"]

_SEEDS = 0x7FFF_FFFF_FFFF_FFFF


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    attn_bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    window: Sequence[int | None] | None = None,
    query_offset: int | Tensor = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    return_lse: bool = False,
    return_weights: bool | Literal["mean"] = False,
) -> Tensor | tuple[Tensor, ...]:
    r"""Fused masked attention, differentiable in query, key, value, attn_bias and sinks.

    .. math::
        s_{ij} = \text{softcap}(\text{scale} \cdot q_i \cdot k_j) - \text{slope} \cdot |i + o - j| +
        \text{bias}_{ij}

    .. math::
        \text{out}_i = \sum_{j\ \text{visible}} \frac{\exp(s_{ij})}{\sum_{j'} \exp(s_{ij'}) +
        \exp(\text{sink})}\, v_j

    where o is ``query_offset`` and the sum below the line runs over visible keys, too.

    A query row that sees no key gives zeros, and sends zero gradients. Nothing of a hidden key, NaN
    included, reaches a row that does not see it.

    Shapes: B stands for any number of batch dimensions, none included; H query heads, Hkv key/value
    heads (H a multiple of Hkv: consecutive query heads share one), L queries, S keys, E and Ev head
    sizes.

    Args:
        query: (B, H, L, E), float64, float32, bfloat16 or float16; any strides. A jagged nested
            tensor (B, H, ragged L, E) is accepted, together with a jagged key and value.
        key: (B, Hkv, S, E), the query's dtype.
        value: (B, Hkv, S, Ev), the query's dtype.
        attn_mask: bool, True = takes part; (L, S), or as many dimensions as the query, each the
            full size or 1. A float mask is taken as ``attn_bias``.
        attn_bias: added to the scores; the shapes of ``attn_mask``, the query's dtype or float32.
            -inf hides the pair; ``finfo.min`` is a number like any other.
        key_mask: (B, S), bool (True = takes part) or float (added to the scores, a constant).
        is_causal: query row i sees the keys j <= i + query_offset.
        window: (left, right), each the number of keys seen to that side of i + query_offset, or
            None for all: (127, 0) is the causal window of 128 keys.
        query_offset: key position of query row 0, in keys: 0 is torch's top-left causal alignment,
            S - L the bottom-right one. An int, or an integer tensor (B).
        softcap: if positive, scores become softcap * tanh(score / softcap).
        sinks: (H), one more logit in each softmax's denominator, without a value.
        alibi_slopes: constants, (H) or (B, H); each head's factor of the distance.
        scale: factor of the dot products; 1/sqrt(E) by default.
        dropout_p: probability of dropping a weight, rounded to 1/65536. Obeyed always; a module
            passes 0 in evaluation.
        rng_state: from :func:`make_rng_state`; by default drawn from torch's default generator.
        return_lse: also return the natural-log logsumexp (B, H, L), float32 (float64 for float64).
        return_weights: True also returns the weights after dropout (B, H, L, S); "mean" returns
            their mean over the heads, (B, L, S), without ever holding all of them.

    Returns:
        ``out`` (B, H, L, Ev), laid out in memory as (B, L, H, Ev); then logsumexp, then weights, if
        asked for. Gradients of contiguous query, key and value are contiguous, of others laid out
        like ``out``.

    Raises:
        RuntimeError: for an argument of a wrong shape, dtype, device or value; the text names it.

    Source:
        csrc/ops/attention.cpp (checks, schema), csrc/kernels/cpu (arithmetic).

    Example::

        >>> import torch, attention_ext as ae
        >>> q, k, v = torch.randn(3, 2, 8, 100, 64).unbind(0)
        >>> ae.attention(q, k, v, is_causal=True).shape
        torch.Size([2, 8, 100, 64])
        >>> out, weights = ae.attention(q, k, v, window=(15, 0), return_weights="mean")
        >>> weights.shape
        torch.Size([2, 100, 100])
    """
    _expect_tensors("attention", query, key, value, attn_mask)
    if attn_mask is not None:
        if type(attn_mask) is not Tensor:
            attn_mask = _materialized(attn_mask, query)
        if attn_mask.is_floating_point():
            if attn_bias is not None:
                raise RuntimeError(
                    "attention: a float attn_mask is the attn_bias; expected one of them, got both"
                )
            attn_bias, attn_mask = attn_mask, None
    offsets = query_offset if isinstance(query_offset, Tensor) else None
    scalars = _scalars(window, query_offset, is_causal, scale, softcap, dropout_p)
    if dropout_p > 0 and rng_state is None:
        rng_state = make_rng_state(query.device)
    if query.is_nested or key.is_nested or value.is_nested:
        return _jagged_attention(
            query,
            key,
            value,
            (attn_mask, attn_bias, key_mask, sinks, alibi_slopes, offsets),
            rng_state,
            scalars,
            return_lse,
            return_weights,
        )
    out, lse, residual, _ = _ops.attention(
        query,
        key,
        value,
        attn_mask,
        attn_bias,
        key_mask,
        sinks,
        alibi_slopes,
        offsets,
        None,
        None,
        rng_state,
        **scalars,
    )
    if return_weights is False:
        return (out, lse) if return_lse else out
    weights = _ops.attention_weights(
        query,
        key,
        attn_mask,
        attn_bias,
        key_mask,
        sinks,
        alibi_slopes,
        offsets,
        None,
        None,
        rng_state,
        lse,
        residual,
        **scalars,
        average_heads=_average_heads(return_weights),
    )
    return (out, lse, weights) if return_lse else (out, weights)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention on the fused op: signature and results.

    More than torch's: ``is_causal`` together with a mask means both; grouped heads need no flag
    (``enable_gqa`` is accepted and changes nothing); a row that sees no key gives zeros for every
    kind of mask; float masks may be float32 beside 16-bit queries.

    Args:
        query: (..., L, E); the dimension before L, if any, holds the heads.
        key: (..., S, E).
        value: (..., S, Ev). Leading dimensions of all three broadcast, or group as heads.
        attn_mask: bool (True = takes part) or float (added to the scores), broadcast to
            (..., L, S) from the right; also a :class:`torch.nn.attention.bias.CausalBias`.
        dropout_p: probability of dropping a weight; obeyed always.
        is_causal: row i sees the keys j <= i.
        scale: factor of the dot products; 1/sqrt(E) by default.
        enable_gqa: accepted for torch's sake.

    Returns:
        ``out`` (..., L, Ev).

    Raises:
        RuntimeError: for an argument of a wrong shape, dtype, device or value; the text names it.

    Source:
        This function only arranges shapes; the work is :func:`attention`'s.

    Example::

        >>> import torch, attention_ext as ae
        >>> x = torch.randn(2, 4, 10, 16)
        >>> ours = ae.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> theirs = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> torch.allclose(ours, theirs, atol=1e-6)
        True
    """
    _expect_tensors("scaled_dot_product_attention", query, key, value, attn_mask)
    query_offset = 0
    if attn_mask is not None and type(attn_mask) is not Tensor:
        attn_mask, is_causal, query_offset = _causal_bias(attn_mask, query, key, is_causal)
    if query.is_nested:
        # attention() refuses a dense mask beside nested tensors.
        return attention(  # type: ignore[return-value]
            query,
            key,
            value,
            attn_mask,
            is_causal=is_causal,
            query_offset=query_offset,
            scale=scale,
            dropout_p=dropout_p,
        )
    without_heads = query.dim() == key.dim() == value.dim() == 2
    q, k, v, mask = _arrange(query, key, value, attn_mask)
    bias = None
    if mask is not None and mask.is_floating_point():
        bias, mask = mask, None
    out: Tensor = _ops.attention(
        q,
        k,
        v,
        mask,
        bias,
        None,
        None,
        None,
        None,
        None,
        None,
        make_rng_state(q.device) if dropout_p > 0 else None,
        **_scalars(None, query_offset, is_causal, scale, 0.0, dropout_p),
    )[0]
    return out.squeeze(0) if without_heads else out


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    window: Sequence[int | None] | None = None,
    query_offset: int | Tensor = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Fused attention over packed sequences: n is rows cu_seqlens[n] .. cu_seqlens[n + 1] - 1.

    Every option means what it means in :func:`attention`, positions counted within each sequence,
    so that a packed and a padded batch give the same numbers and, for the same ``rng_state``, drop
    the same weights. There are no dense masks, biases or weights here.

    Args:
        query: (T, H, E), T the sum of the query lengths.
        key: (T_k, Hkv, E), T_k the sum of the key lengths.
        value: (T_k, Hkv, Ev).
        cu_seqlens_q: int32 or int64 (sequences + 1), from 0, never falling, ending at T.
        cu_seqlens_k: likewise for the keys, ending at T_k.
        key_mask: (T_k), bool (True = takes part) or float.
        query_offset: an int, or an integer tensor (sequences).
        alibi_slopes: constants, (H) or (sequences, H).
        is_causal, window, softcap, sinks, scale, dropout_p, rng_state: as in :func:`attention`.
        return_lse: also return the logsumexp.

    Returns:
        ``out`` (T, H, Ev), then logsumexp (H, T) if asked for.

    Raises:
        RuntimeError: for an argument of a wrong shape, dtype, device or value; the text names it.

    Source:
        The packed form of torch.ops.attention_ext.attention, seen as (T, H, E).

    Example::

        >>> import torch, attention_ext as ae
        >>> q, k, v = torch.randn(3, 12, 4, 16).unbind(0)
        >>> borders = torch.tensor([0, 5, 12])
        >>> ae.varlen_attention(q, k, v, borders, borders, is_causal=True).shape
        torch.Size([12, 4, 16])
    """
    _expect_tensors("varlen_attention", query, key, value, key_mask)
    for name, borders in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(borders, Tensor):
            raise RuntimeError(
                f"varlen_attention: {name} must be a tensor of the sequences' borders, got "
                f"{type(borders).__name__}"
            )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise RuntimeError(
                f"varlen_attention: {name} must have 3 dimensions (tokens, heads, size), got shape "
                f"{list(tensor.shape)}"
            )
    if key_mask is not None and key_mask.dim() != 1:
        raise RuntimeError(
            f"varlen_attention: key_mask must have 1 dimension (tokens), got {list(key_mask.shape)}"
        )
    scalars = _scalars(window, query_offset, is_causal, scale, softcap, dropout_p)
    if dropout_p > 0 and rng_state is None:
        rng_state = make_rng_state(query.device)
    out, lse, *_ = _ops.attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        None,
        None,
        None if key_mask is None else key_mask.unsqueeze(0),
        sinks,
        alibi_slopes,
        query_offset if isinstance(query_offset, Tensor) else None,
        cu_seqlens_q,
        cu_seqlens_k,
        rng_state,
        **scalars,
    )
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def _expect_tensors(
    function: str, query: object, key: object, value: object, mask: object | None
) -> None:
    if (
        isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and (mask is None or isinstance(mask, Tensor))
    ):
        return
    for name, given in (("query", query), ("key", key), ("value", value), ("mask", mask)):
        if not isinstance(given, Tensor) and not (name == "mask" and given is None):
            raise RuntimeError(f"{function}: {name} must be a tensor, got {type(given).__name__}")


def make_rng_state(device: torch.device | str | int | None = None) -> Tensor:
    """A random state for dropout, from torch's default generator of the device; fits any call.

    Two calls with the same state drop the same weights. ``torch.manual_seed``, checkpointing and
    compiled graphs replay the draw.

    Args:
        device: where the state shall live: the query's device. None is torch's default device.

    Returns:
        ``state`` (6), int64. Seed, offset, and four numbers that place a shard inside a larger call
        (heads of the whole call or 0, first head, first row, first key), all 0.

    Source:
        csrc/kernels/philox.h says how a state and a position give a random number.

    Example::

        >>> import torch, attention_ext as ae
        >>> state = ae.make_rng_state()
        >>> x = torch.randn(1, 2, 50, 8)
        >>> a, b = (ae.attention(x, x, x, dropout_p=0.5, rng_state=state) for _ in range(2))
        >>> torch.equal(a, b)
        True
    """
    drawn = torch.randint(_SEEDS, (2,), dtype=torch.int64, device=device)
    return torch.nn.functional.pad(drawn, (0, 4))


def _scalars(
    window: Sequence[int | None] | None,
    query_offset: int | Tensor,
    is_causal: bool,
    scale: float | None,
    softcap: float,
    dropout_p: float,
) -> _ops.Scalars:
    """The op's keyword arguments that differ from its defaults: each costs 0.4 us to pass."""
    scalars: _ops.Scalars = {}
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise RuntimeError(
                "attention: window must be a pair (left, right), each an int or None, got "
                f"{window!r}"
            )
        scalars["window_left"], scalars["window_right"] = window
    if not isinstance(query_offset, Tensor) and query_offset != 0:
        scalars["query_offset"] = query_offset
    if is_causal:
        scalars["is_causal"] = is_causal
    if scale is not None:
        scalars["scale"] = scale
    if softcap != 0:
        scalars["softcap"] = softcap
    if dropout_p != 0:
        scalars["dropout_p"] = dropout_p
    return scalars


def _average_heads(return_weights: bool | str) -> bool:
    """True for "mean", False for True; anything else is an error."""
    if return_weights is True:
        return False
    if return_weights == "mean":
        return True
    raise RuntimeError(
        f"attention: return_weights must be False, True or 'mean', got {return_weights!r}"
    )


def _materialized(attn_mask: Tensor, query: Tensor) -> Tensor:
    """A CausalBias as the bool mask it stands for; any other subclass as it is."""
    from torch.nn.attention.bias import CausalBias

    if isinstance(attn_mask, CausalBias):
        return attn_mask._materialize(query.device)  # type: ignore[no-any-return]
    return attn_mask


def _causal_bias(
    attn_mask: Tensor, query: Tensor, key: Tensor, is_causal: bool
) -> tuple[Tensor | None, bool, int]:
    """(attn_mask, is_causal, query_offset) that a CausalBias stands for; other subclasses stay."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return attn_mask, is_causal, 0
    rows, keys = query.size(-2), key.size(-2)
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (rows, keys):
        raise RuntimeError(
            f"scaled_dot_product_attention: the causal bias must be for {rows} queries and {keys} "
            f"keys, got one for {attn_mask.seq_len_q} and {attn_mask.seq_len_kv}"
        )
    offset = 0 if attn_mask.variant == CausalVariant.UPPER_LEFT else keys - rows
    return None, True, min(offset, 0) if is_causal else offset


def _arrange(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The four as the op wants them: equal batch dimensions, heads that group, a mask of that rank.

    Broadcasting is by views. Shapes that do not fit all the same are left for the op to refuse.
    """
    dims = query.dim()
    if dims > 2 and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:  # nothing to broadcast
        if mask is not None and 2 != mask.dim() < dims:
            mask = mask[(None,) * (dims - mask.dim())]
        return query, key, value, mask
    dims = max(dims, key.dim(), value.dim())
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(
            "scaled_dot_product_attention: query, key and value must have at least 2 dimensions, "
            f"got shapes {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    if dims == 2 or not query.dim() == key.dim() == value.dim():
        dims = max(dims, 3)
        query, key, value = (
            x[(None,) * (dims - x.dim())] if x.dim() < dims else x for x in (query, key, value)
        )
    if key.size(-3) != value.size(-3):
        key, value = _same_heads(key, value)
    if query.size(-3) == 1 and key.size(-3) > 1:
        query = query.expand(*query.shape[:-3], key.size(-3), *query.shape[-2:])
    batch = query.shape[:-3]
    if not batch == key.shape[:-3] == value.shape[:-3]:
        try:
            shapes = (batch, key.shape[:-3], value.shape[:-3])
            batch = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        except RuntimeError:
            raise RuntimeError(
                "scaled_dot_product_attention: the batch dimensions of query, key and value must "
                f"broadcast, got shapes {list(query.shape)}, {list(key.shape)} and "
                f"{list(value.shape)}"
            ) from None
        query, key, value = (x.expand(*batch, *x.shape[-3:]) for x in (query, key, value))
    if mask is not None and 2 != mask.dim() < dims:
        mask = mask[(None,) * (dims - mask.dim())]
    return query, key, value, mask


def _same_heads(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """key and value with as many heads as the one that has more, as torch's grouped heads allow."""
    heads = max(key.size(-3), value.size(-3))
    pair = []
    for x in (key, value):
        if x.size(-3) in (0, heads) or heads % x.size(-3) != 0:
            pair.append(x)
        else:
            pair.append(x.repeat_interleave(heads // x.size(-3), dim=-3))
    return pair[0], pair[1]


def _jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: tuple[Tensor | None, ...],
    rng_state: Tensor | None,
    scalars: _ops.Scalars,
    return_lse: bool,
    return_weights: bool | str,
) -> Tensor | tuple[Tensor, Tensor]:
    """Jagged (B, H, ragged, E) tensors are packed sequences: hand their values to the op.

    `options` are the op's: attn_mask, attn_bias, key_mask, sinks, alibi_slopes, query_offsets.
    """
    if return_weights is not False:
        raise RuntimeError("attention: return_weights must be False for nested tensors")
    q, borders_q = _packed(query, "query")
    k, borders_k = _packed(key, "key")
    v, borders_v = _packed(value, "value")
    if borders_v is not borders_k and not torch.equal(borders_v, borders_k):
        raise RuntimeError(
            "attention: nested key and value must have the same lengths, got offsets "
            f"{borders_k.tolist()} and {borders_v.tolist()}"
        )
    attn_mask, attn_bias, key_mask, *others = options
    for name, dense in (("attn_mask", attn_mask), ("attn_bias", attn_bias)):
        if dense is not None:
            raise RuntimeError(
                f"attention: {name} must be None beside nested tensors, whose lengths differ, got "
                f"shape {list(dense.shape)}"
            )
    if key_mask is not None:
        if not key_mask.is_nested:
            raise RuntimeError(
                "attention: key_mask beside nested tensors must be nested (B, ragged S) too, got "
                f"shape {list(key_mask.shape)}"
            )
        key_mask = key_mask.values().unsqueeze(0)
    out, lse, *_ = _ops.attention(
        q, k, v, attn_mask, attn_bias, key_mask, *others, borders_q, borders_k, rng_state, **scalars
    )
    nest = torch.nested.nested_tensor_from_jagged
    nested_out = nest(out.squeeze(0), offsets=borders_q, jagged_dim=2)
    if not return_lse:
        return nested_out
    return nested_out, nest(lse.squeeze(0), offsets=borders_q, jagged_dim=2)


def _packed(nested: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(1, H, T, E) and the borders (B + 1) of a jagged tensor (B, H, ragged, E)."""
    if not nested.is_nested:
        raise RuntimeError(
            f"attention: query, key and value must be nested together, got a dense {name}"
        )
    jagged: Any = nested
    if nested.layout != torch.jagged or nested.dim() != 4 or jagged._ragged_idx != 2:
        raise RuntimeError(
            f"attention: a nested {name} must have the jagged layout and the dimensions (batch, "
            f"heads, ragged length, size), got layout {nested.layout} and {nested.dim()} dimensions"
        )
    if jagged._lengths is not None:
        jagged = jagged.transpose(1, 2).contiguous().transpose(1, 2)  # closes the holes
    return jagged.values().unsqueeze(0), jagged.offsets()
