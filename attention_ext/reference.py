"""The oracle: attention written down in plain torch, dense and differentiable to any order.

Called by the tests and by anyone who wants to know what the fused op must return. It shares no code
with the C++ kernels, holds every score in memory, and is slow. Letters: B batch, H query heads, Hkv
key/value heads, L queries, S keys, E query/key size, Ev value size; ``i`` is a query row, ``j`` a
key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

__all__ = ["attention", "dropout_mask", "dropout_rescale", "varlen_attention", "visible_pairs"]

_WORD = 0xFFFFFFFF
_FAR = (
    1 << 40
)  # further than any two positions lie apart; keeps sums of offsets and windows in int64


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
    compute_dtype: torch.dtype | None = None,
    pairwise: bool | None = None,
) -> Tensor | tuple[Tensor, ...]:
    r"""Dense attention with the arguments and the results of :func:`attention_ext.attention`.

    Arguments are those of :func:`attention_ext.attention`, and two more:

    Args:
        compute_dtype: the dtype in which all is computed and returned. By default float32 for
            16-bit inputs (the results are rounded to the query's dtype) and the input's own dtype
            otherwise. The query's own 16-bit dtype gives the plain dense attention to which errors
            are compared.
        pairwise: True forms the products pair by pair, so that a hidden NaN or infinity is not even
            multiplied by zero: B*H*L*S*E numbers. None does so when query, key or value holds a
            number that is not finite and some pair is hidden; say True when the incoming gradient
            will hold one, and False under ``vmap``.

    Returns:
        ``out`` (..., H, L, Ev), then the natural-log ``logsumexp`` (..., H, L) if ``return_lse``,
        then, if ``return_weights``, the weights after dropout: (..., H, L, S), or for ``"mean"``
        their mean over the heads, (..., L, S).

    Raises:
        RuntimeError: for shapes and dtypes that do not go together.

    Example::

        >>> query = key = value = torch.eye(2, dtype=torch.float64).view(1, 1, 2, 2)
        >>> attention(query, key, value, is_causal=True)[0, 0, 0]
        tensor([1., 0.], dtype=torch.float64)
    """
    mask, bias = _split_mask(attn_mask, attn_bias)
    state = _draw_state(query.device) if dropout_p > 0 and rng_state is None else rng_state
    out, lse, weights = _dense(
        query,
        key,
        value,
        mask,
        bias,
        key_mask,
        is_causal,
        window,
        query_offset,
        softcap,
        sinks,
        alibi_slopes,
        scale,
        dropout_p,
        state,
        compute_dtype,
        pairwise,
        first_batch=0,
    )
    if return_weights not in (False, True, "mean"):
        raise RuntimeError(
            "reference.attention: return_weights must be False, True or 'mean', got "
            f"{return_weights!r}"
        )
    results = [out]
    if return_lse:
        results.append(lse)
    if return_weights:
        mean = return_weights == "mean"
        results.append((weights.mean(-3) if mean else weights).to(out.dtype))
    return results[0] if len(results) == 1 else tuple(results)


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
    compute_dtype: torch.dtype | None = None,
    pairwise: bool | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Dense attention of packed sequences: the oracle of :func:`attention_ext.varlen_attention`.

    Args:
        query: (T, H, E).
        key: (T_k, Hkv, E).
        value: (T_k, Hkv, Ev).
        cu_seqlens_q, cu_seqlens_k: the borders of the sequences, (sequences + 1) each.
        key_mask: (T_k).
        query_offset: an int, or one for each sequence.
        alibi_slopes: constants, (H) or (sequences, H).
        compute_dtype, pairwise: as in :func:`attention`; the others as in
            :func:`attention_ext.varlen_attention`.

    Returns:
        ``out`` (T, H, Ev), then ``logsumexp`` (H, T) if ``return_lse``.

    Raises:
        RuntimeError: for shapes and dtypes that do not go together.
    """
    state = _draw_state(query.device) if dropout_p > 0 and rng_state is None else rng_state
    borders_q, borders_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if len(borders_q) != len(borders_k):
        raise RuntimeError(
            "reference.varlen_attention: cu_seqlens_q and cu_seqlens_k must name the same "
            f"sequences, got {len(borders_q)} and {len(borders_k)} borders"
        )
    outs, lses = [], []
    for n in range(len(borders_q) - 1):
        rows, keys = slice(*borders_q[n : n + 2]), slice(*borders_k[n : n + 2])
        out, lse, _ = _dense(
            query[rows].transpose(0, 1),
            key[keys].transpose(0, 1),
            value[keys].transpose(0, 1),
            None,
            None,
            None if key_mask is None else key_mask[keys],
            is_causal,
            window,
            query_offset[n] if isinstance(query_offset, Tensor) else query_offset,
            softcap,
            sinks,
            alibi_slopes if alibi_slopes is None or alibi_slopes.dim() < 2 else alibi_slopes[n],
            scale,
            dropout_p,
            state,
            compute_dtype,
            pairwise,
            first_batch=n,
        )
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    if not outs:  # no sequence: nothing, which is differentiable all the same
        dtype = compute_dtype or query.dtype
        nothing = (query.sum() + key.sum() + value.sum()).to(dtype)
        outs.append(nothing.expand(0, query.size(1), value.size(2)))
        wide = torch.promote_types(dtype, torch.float32)
        lses.append(nothing.to(wide).expand(query.size(1), 0))
    return (torch.cat(outs), torch.cat(lses, -1)) if return_lse else torch.cat(outs)


def visible_pairs(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    window: Sequence[int | None] | None = None,
    query_offset: int | Tensor = 0,
) -> Tensor:
    """Who sees whom, by every mask together.

    Args:
        query: (..., H, L, E); only its shape and device count, as do the key's.
        key: (..., Hkv, S, E).
        attn_mask, attn_bias, key_mask, is_causal, window, query_offset: as in
            :func:`attention_ext.attention`; of a float mask only its -inf counts.

    Returns:
        Bool (..., H, L, S), True where query row i sees key j.

    Raises:
        RuntimeError: for masks that do not broadcast to the scores.
    """
    batch, heads, rows, keys = query.shape[:-3], query.size(-3), query.size(-2), key.size(-2)
    visible = torch.ones(*batch, heads, rows, keys, dtype=torch.bool, device=query.device)
    left, right = (None, None) if window is None else window
    distance = _distance(query, key, query_offset)  # j - (i + query_offset)
    if is_causal:
        visible = visible & (distance <= 0)
    if right is not None:
        visible = visible & (distance <= min(right, _FAR))
    if left is not None:
        visible = visible & (distance >= -min(left, _FAR))
    if attn_mask is not None:
        visible = visible & attn_mask
    if attn_bias is not None:
        visible = visible & (attn_bias != -torch.inf)
    if key_mask is not None:
        seen = key_mask if key_mask.dtype == torch.bool else key_mask != -torch.inf
        visible = visible & seen[..., None, None, :]
    return visible


def dropout_mask(
    rng_state: Tensor,
    batch: Sequence[int],
    heads: int,
    rows: int,
    keys: int,
    dropout_p: float,
    *,
    first_batch: int = 0,
) -> Tensor:
    """Which weights dropout keeps: a pure function of the random state and of the place.

    One call of Philox4x32-10 serves eight neighbouring keys, sixteen bits for each.

    Args:
        rng_state: int64 (6), from :func:`attention_ext.make_rng_state`.
        batch: sizes of the batch dimensions.
        heads, rows, keys: H, L and S.
        dropout_p: probability of dropping a weight, rounded to 1/65536.
        first_batch: number of the first batch entry; a packed sequence's is its own number.

    Returns:
        Bool (..., H, L, S) with ``batch`` in front, True where the weight is kept.

    Raises:
        ValueError: for a random state of other than six numbers.
    """
    seed, offset, heads_total, first_head, first_row, first_key = rng_state.tolist()
    device = rng_state.device
    batches = 1
    for size in batch:
        batches *= size
    b = torch.arange(first_batch, first_batch + batches, device=device).view(*batch, 1, 1, 1)
    h = torch.arange(heads, device=device).view(-1, 1, 1)
    i = torch.arange(rows, device=device).view(-1, 1)
    j = torch.arange(first_key, first_key + keys, device=device)
    groups = torch.arange(first_key >> 3, ((first_key + keys - 1) >> 3) + 1, device=device)
    words = _philox(
        (
            torch.tensor(offset & _WORD, device=device),
            (b * (heads_total or heads) + first_head + h) & _WORD,
            (first_row + i) & _WORD,
            groups & _WORD,
        ),
        (seed & _WORD, ((seed >> 32) ^ (offset >> 32)) & _WORD),
    )
    lanes = torch.stack([part for word in words for part in (word & 0xFFFF, word >> 16)], -1)
    picked = (
        lanes.flatten(-2)[..., j - (first_key >> 3 << 3)] if keys else lanes.flatten(-2)[..., :0]
    )
    return picked >= round(dropout_p * 65536)


def dropout_rescale(dropout_p: float) -> float:
    """What kept weights are multiplied by.

    Args:
        dropout_p: probability of dropping a weight, rounded to 1/65536.

    Returns:
        1 / (1 - p) for the rounded p; 0 for p = 1.
    """
    kept = 65536 - round(dropout_p * 65536)
    return 65536 / kept if kept else 0.0


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    attn_bias: Tensor | None,
    key_mask: Tensor | None,
    is_causal: bool,
    window: Sequence[int | None] | None,
    query_offset: int | Tensor,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    scale: float | None,
    dropout_p: float,
    rng_state: Tensor | None,
    compute_dtype: torch.dtype | None,
    pairwise: bool | None,
    *,
    first_batch: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, logsumexp and weights of (..., H, L, E), (..., Hkv, S, E), (..., Hkv, S, Ev)."""
    _check(query, key, value, attn_mask, attn_bias, key_mask)
    double = query.dtype == torch.float64
    dtype = compute_dtype or (torch.float64 if double else torch.float32)
    q = query.to(dtype)
    k = _repeat_heads(key.to(dtype), query.size(-3))
    v = _repeat_heads(value.to(dtype), query.size(-3))

    # 1. Who sees whom. A row that sees nobody is dead: the masks decide it, never a NaN.
    visible = visible_pairs(
        query, key, attn_mask, attn_bias, key_mask, is_causal, window, query_offset
    )
    dead = ~visible.any(-1)
    if pairwise is None:
        finite = all(bool(x.isfinite().all()) for x in (q, k, v))
        pairwise = not finite and not bool(visible.all())

    # 2. Scores: scale, softcap, ALiBi, bias, mask.
    factor = (query.size(-1) ** -0.5 if query.size(-1) else 1.0) if scale is None else scale
    score = factor * _query_key(q, k, visible, pairwise)
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    if alibi_slopes is not None:
        distance = _distance(query, key, query_offset)
        score = score - alibi_slopes.to(dtype)[..., None, None] * distance.abs()
    bias = _added(attn_bias, key_mask, visible, dtype)
    if bias is not None:
        score = score + bias

    # 3. Softmax, the sink in its denominator. The maximum is a constant: it cancels.
    top = score.detach().masked_fill(~visible, -torch.inf)
    top = torch.cat([top, top.new_full((*top.shape[:-1], 1), -torch.inf)], -1).amax(-1)
    sink = None
    if sinks is not None:
        sink = sinks.to(dtype)[..., None].expand(top.shape)
        top = torch.maximum(top, sink.detach())
    top = torch.where(dead, 0.0, top)
    shifted = torch.where(visible, score - top[..., None], 0.0)
    e = torch.where(visible, shifted.exp(), 0.0)
    total = e.sum(-1)
    if sink is not None:
        total = total + (torch.where(dead, 0.0, sink) - top).exp()
    total = torch.where(dead, 1.0, total)
    # A dead row has the sink alone, whatever it is.
    lse = torch.where(top == -torch.inf, -torch.inf, top + total.log())
    lse = torch.where(dead, -torch.inf if sink is None else sink, lse)
    weights = torch.where(visible, e / total[..., None], 0.0)

    # 4. Dropout, then values.
    if dropout_p > 0:
        if rng_state is None:
            raise RuntimeError("reference.attention: dropout_p > 0 needs an rng_state")
        keep = dropout_mask(
            rng_state,
            query.shape[:-3],
            query.size(-3),
            query.size(-2),
            key.size(-2),
            dropout_p,
            first_batch=first_batch,
        )
        weights = torch.where(keep, weights * dropout_rescale(dropout_p), 0.0)
    out = _weights_value(weights, v, visible, pairwise)
    return out.to(compute_dtype or query.dtype), lse, weights


def _query_key(q: Tensor, k: Tensor, visible: Tensor, pairwise: bool) -> Tensor:
    """(..., H, L, S) dot products. Pair by pair, a hidden key is zero before it is multiplied."""
    if not pairwise:
        return q @ k.transpose(-2, -1)
    k_seen = torch.where(visible[..., None], k[..., None, :, :], 0.0)
    return (q[..., None, :] * k_seen).sum(-1)


def _weights_value(weights: Tensor, v: Tensor, visible: Tensor, pairwise: bool) -> Tensor:
    """(..., H, L, Ev) weighted sums of the values. Pair by pair, a hidden value is zero."""
    if not pairwise:
        return weights @ v
    v_seen = torch.where(visible[..., None], v[..., None, :, :], 0.0)
    return (weights[..., None] * v_seen).sum(-2)


def _added(
    attn_bias: Tensor | None, key_mask: Tensor | None, visible: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """What is added to the scores: bias, float key mask, or their sum, which stays finite."""
    bias = None if attn_bias is None else attn_bias.to(dtype)
    keys = None
    if key_mask is not None and key_mask.dtype != torch.bool:
        keys = key_mask.to(dtype)[..., None, None, :].detach()
    if bias is None or keys is None:
        added = keys if bias is None else bias
        return None if added is None else torch.where(visible, added, 0.0)
    limits = torch.finfo(dtype)
    total = (bias + keys).detach()
    clamped = total.isinf() & bias.detach().isfinite() & keys.isfinite()
    # A clamped sum keeps the bias's gradient, as a kernel that adds and then clamps does.
    rest = torch.where(clamped, total.clamp(limits.min, limits.max) - bias.detach(), keys)
    return torch.where(visible, bias + rest, 0.0)


def _distance(query: Tensor, key: Tensor, query_offset: int | Tensor) -> Tensor:
    """int64 (L, S), or (..., 1, L, S) with an offset per batch entry: j - (i + query_offset)."""
    i = torch.arange(query.size(-2), device=query.device)[:, None]
    j = torch.arange(key.size(-2), device=query.device)
    if isinstance(query_offset, Tensor):
        offset = query_offset.to(torch.int64).clamp(-_FAR, _FAR)[..., None, None, None]
        return j - (i + offset)
    return j - (i + max(-_FAR, min(query_offset, _FAR)))


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Key/value head g serves the query heads g * H/Hkv .. (g + 1) * H/Hkv - 1."""
    if x.size(-3) == heads:
        return x
    return x.repeat_interleave(heads // x.size(-3), dim=-3)


def _split_mask(
    attn_mask: Tensor | None, attn_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """A float attn_mask is the bias."""
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return attn_mask, attn_bias
    if attn_bias is not None:
        raise RuntimeError(
            "reference.attention: a float attn_mask is the attn_bias; give one of them, not both"
        )
    return None, attn_mask


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    attn_bias: Tensor | None,
    key_mask: Tensor | None,
) -> None:
    """The shapes without which broadcasting would give a plausible wrong answer."""
    if query.dim() < 3 or not query.dim() == key.dim() == value.dim():
        raise RuntimeError(
            "reference.attention: query, key and value must have the same number of dimensions, at "
            f"least 3, got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    if (
        query.shape[:-3] != key.shape[:-3]
        or key.shape[:-1] != value.shape[:-1]
        or query.size(-1) != key.size(-1)
    ):
        raise RuntimeError(
            f"reference.attention: query {list(query.shape)}, key {list(key.shape)} and value "
            f"{list(value.shape)} do not go together"
        )
    if key.size(-3) != query.size(-3) and (key.size(-3) == 0 or query.size(-3) % key.size(-3) != 0):
        raise RuntimeError(
            f"reference.attention: the query's {query.size(-3)} heads are no multiple of the key's "
            f"{key.size(-3)}"
        )
    full = (*query.shape[:-1], key.size(-2))
    for name, mask in (("attn_mask", attn_mask), ("attn_bias", attn_bias)):
        if mask is None:
            continue
        target = full if mask.dim() == len(full) else full[-2:]
        fits = mask.dim() == len(target) and all(
            m in (1, f) for m, f in zip(mask.shape, target, strict=True)
        )
        if not fits:
            raise RuntimeError(
                f"reference.attention: {name} must be (L, S) or have the dimensions {list(full)}, "
                f"each full or 1, got {list(mask.shape)}"
            )
    if key_mask is not None and key_mask.shape != (*query.shape[:-3], key.size(-2)):
        raise RuntimeError(
            "reference.attention: key_mask must have the shape "
            f"{[*query.shape[:-3], key.size(-2)]}, got {list(key_mask.shape)}"
        )


def _draw_state(device: torch.device) -> Tensor:
    """The draw of :func:`attention_ext.make_rng_state`: the same seed gives both the same state."""
    state = torch.zeros(6, dtype=torch.int64, device=device)
    state[:2] = torch.randint(0x7FFFFFFFFFFFFFFF, (2,), device=device)
    return state


def _philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon and others: Parallel random numbers: as easy as 1, 2, 3; SC 2011).

    Words are int64 tensors below 2^32. A product of two words may wrap around in int64; its bits
    are still right, and masking after the arithmetic shift takes the upper half of them.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)  # type: ignore[no-untyped-call]
    k0, k1 = key
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (high >> 32) & _WORD ^ c1 ^ k0,
            high & _WORD,
            (low >> 32) & _WORD ^ c3 ^ k1,
            low & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3
