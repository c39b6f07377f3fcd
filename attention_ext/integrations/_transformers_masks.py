"""Masks for transformers that keep their structure: a band around the diagonal, and padding.

transformers.py registers :func:`structured_mask` as the mask interface and hands what it returns,
a :class:`StructuredMask`, to the operator part by part. Anything else that looks at such a mask (a
model that slices it, say) sees the ordinary bool mask (B, 1, L, S), made when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

__all__ = ["StructuredMask", "structured_mask"]

Window = tuple[int | None, int | None]

_aten = torch.ops.aten
# What copies of a mask keep: reentrant checkpointing detaches, devices and models clone.
_COPIES = (_aten.detach.default, _aten.alias.default, _aten.clone.default)


class StructuredMask(Tensor):
    """A bool mask (B, 1, L, S), True = takes part, that stores no element of it.

    Row i sees key j if ``-left <= j - i - query_offset <= right`` (None: no bound) and
    ``key_mask[b, j]``. It is a wrapper subclass, so that ``torch.compile`` traces through it.

    Args:
        shape: (B, 1, L, S)
        window: (left, right), as in :func:`attention_ext.attention`.
        query_offset: key position of row 0; an int, or an integer tensor (B).
        key_mask: bool (B, S), or None.
        device: where the rows it masks are.

    Source:
        torch's ``_make_wrapper_subclass``.
    """

    window: Window
    query_offset: int | Tensor
    key_mask: Tensor | None

    @staticmethod
    def __new__(
        cls: type[StructuredMask],
        shape: tuple[int, ...],
        window: Window,
        query_offset: int | Tensor,
        key_mask: Tensor | None,
        device: torch.device | str,
    ) -> StructuredMask:
        place = torch.device(device)
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=place)
        mask.window = window
        mask.query_offset = query_offset
        mask.key_mask = key_mask
        return mask

    def dense(self) -> Tensor:
        """The mask as an ordinary tensor (B, 1, L, S)."""
        batch, _, rows, keys = self.shape
        offset = self.query_offset
        if isinstance(offset, Tensor):
            offset = offset[:, None, None, None]
        row = torch.arange(rows, device=self.device)[:, None] + offset
        distance = torch.arange(keys, device=self.device) - row
        left, right = self.window
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left is not None:
            seen = seen & (distance >= -left)
        if right is not None:
            seen = seen & (distance <= right)
        seen = seen.expand(batch, 1, rows, keys)
        return seen if self.key_mask is None else seen & self.key_mask[:, None, None, :]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        inner = [] if self.key_mask is None else ["key_mask"]
        if isinstance(self.query_offset, Tensor):
            return [*inner, "query_offset"], (self.window, None, self.device)
        return inner, (self.window, self.query_offset, self.device)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> StructuredMask:
        window, query_offset, device = context
        query_offset = inner.get("query_offset", query_offset)
        return StructuredMask(size, window, query_offset, inner.get("key_mask"), device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _COPIES and isinstance(args[0], StructuredMask):
            mask = args[0]
            return StructuredMask(
                mask.shape, mask.window, mask.query_offset, mask.key_mask, mask.device
            )
        args, kwargs = tree_map_only(StructuredMask, StructuredMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"StructuredMask(shape={tuple(self.shape)}, window={self.window}, "
            f"query_offset={self.query_offset}, key_mask={self.key_mask is not None})"
        )


def structured_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = bidirectional_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """transformers' mask interface: a :class:`StructuredMask` where the mask is a band and padding.

    Elsewhere a dense bool mask (B, 1, L, S): for mask functions that look at more than the distance
    of row and key (packed sequences, chunks, image blocks, a user's own), for static caches (their
    offset is a tensor, and the mask an input of compiled decoding steps that must not change its
    kind), and where the caller forbids to skip the mask, to join it with another.
    """
    structured = allow_is_causal_skip or allow_is_bidirectional_skip
    if structured and not isinstance(q_offset, Tensor):
        window = _window_of(mask_function)
        if window is not None:
            key_mask = attention_mask
            if key_mask is not None:
                key_mask = key_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
                if key_mask.size(1) < kv_length:  # empty slots of a cache stay hidden
                    key_mask = torch.nn.functional.pad(key_mask, (0, kv_length - key_mask.size(1)))
            offset: int = q_offset - kv_offset
            carried: int | Tensor = offset
            if torch.compiler.is_compiling() and offset != 0:
                # It grows with a cache. Dynamo can't carry a symbolic int as a tensor's attribute.
                carried = torch.full((batch_size,), offset, dtype=torch.int64, device=device)
            shape = (batch_size, 1, q_length, kv_length)
            return StructuredMask(shape, window, carried, key_mask, device)
    dense: Tensor = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=False, device=device, **kwargs,
    )  # fmt: skip
    return dense


class _NotABandError(Exception):
    """The mask function asks for more than the distance of row and key."""


def _window_of(mask_function: Callable[..., Any]) -> Window | None:
    """The window (left, right) that a mask function draws, or None if it draws something else.

    The function is called once, with stand-ins for the indices that note what is asked of them:
    what it computes is known then, whoever wrote it, and nothing is guessed from names.
    """
    try:
        band = mask_function(_Outside(), _Outside(), _Index(row=1, key=0), _Index(row=0, key=1))
    except (_NotABandError, TypeError, IndexError, AttributeError):
        return None
    return (band.left, band.right) if isinstance(band, _Band) else None


class _Band:
    """-left <= key - row <= right; None is no bound. What comparisons of :class:`_Index` give."""

    device = torch.device("cpu")  # mask functions ask their results for it

    def __init__(self, left: int | None = None, right: int | None = None) -> None:
        self.left = left
        self.right = right

    def __and__(self, other: object) -> _Band:
        if not isinstance(other, _Band):
            raise _NotABandError
        left = self.left if other.left is None else other.left
        right = self.right if other.right is None else other.right
        if self.left is not None and other.left is not None:
            left = min(self.left, other.left)
        if self.right is not None and other.right is not None:
            right = min(self.right, other.right)
        return _Band(left, right)

    def to(self, *_: object) -> _Band:
        return self


class _Outside:
    """The batch element or the head. A band looks at neither."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise _NotABandError

    def __bool__(self) -> bool:
        raise _NotABandError


class _Index:
    """row * (the row's position) + key * (the key's position) + plus, and no more than that."""

    device = torch.device("cpu")

    def __init__(self, row: int, key: int, plus: int = 0) -> None:
        self.row = row
        self.key = key
        self.plus = plus

    def new_ones(self, *_: object, **__: object) -> _Band:
        return _Band()

    def _times(self, sign: int, other: object) -> _Index:
        """self + sign * other"""
        if isinstance(other, int):
            return _Index(self.row, self.key, self.plus + sign * other)
        if isinstance(other, _Index):
            row, key = self.row + sign * other.row, self.key + sign * other.key
            return _Index(row, key, self.plus + sign * other.plus)
        raise _NotABandError

    def __add__(self, other: object) -> _Index:
        return self._times(1, other)

    def __sub__(self, other: object) -> _Index:
        return self._times(-1, other)

    def __abs__(self) -> _Size:
        return _Size(self)

    def _at_most_zero(self) -> _Band:
        """self <= 0"""
        if (self.row, self.key) == (-1, 1):  # key - row <= -plus
            return _Band(right=-self.plus)
        if (self.row, self.key) == (1, -1):  # key - row >= plus
            return _Band(left=-self.plus)
        if (self.row, self.key) == (-1, 0) and self.plus <= 0:  # true of every position
            return _Band()
        raise _NotABandError

    def __le__(self, other: object) -> _Band:
        return (self - other)._at_most_zero()

    def __lt__(self, other: object) -> _Band:
        return (self - other + 1)._at_most_zero()

    def __ge__(self, other: object) -> _Band:
        return (self - other)._negative()._at_most_zero()

    def __gt__(self, other: object) -> _Band:
        return ((self - other)._negative() + 1)._at_most_zero()

    def _negative(self) -> _Index:
        return _Index(-self.row, -self.key, -self.plus)


class _Size:
    """The absolute value of an index expression."""

    def __init__(self, index: _Index) -> None:
        self.index = index

    def __le__(self, other: object) -> _Band:
        return (self.index <= other) & (self.index._negative() <= other)

    def __lt__(self, other: object) -> _Band:
        return (self.index < other) & (self.index._negative() < other)
