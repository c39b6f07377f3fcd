"""Teaches torch's DTensor how the operators may be sharded: by batch and by heads.

Called by users (``register()``). Imports torch.distributed.tensor, which the package needs nowhere
else.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

__all__ = ["register"]

_Placements = list[Any]

# Of each tensor, by its name in the schemas: how many dimensions it has behind those of the batch,
# and which of them, counted from the end, holds the heads (None: it has no heads).
_LAYOUT: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("query", "key", "value", "output", "output_residual", "grad_output"), (3, 3)),
    **dict.fromkeys(("logsumexp", "logsumexp_residual", "grad_logsumexp"), (2, 2)),
    **dict.fromkeys(("attn_mask", "attn_bias"), (3, 3)),
    "key_mask": (1, None),
    "query_offsets": (0, None),
    "sinks": (1, 1),
    "alibi_slopes": (1, 1),
}

_FORWARD_RESULTS = ("output", "logsumexp", "logsumexp_residual", "output_residual")
_BACKWARD_RESULTS = ("query", "key", "value", "attn_bias", "sinks")


def register() -> None:
    """Let ``torch.ops.attention_ext.attention`` take DTensors, forward and backward.

    A batch dimension or the heads may be sharded, on any dimension of the mesh; each rank then
    runs the operator on its own part, and the gradient of what the ranks share (a bias that is
    broadcast over the batch, the sinks) is a partial sum. Heads are sharded only where query heads
    and key/value heads fall into equal groups. With dropout, whose mask depends on the place in the
    whole, with packed sequences sharded over anything but heads, and for any other placement,
    inputs are gathered first. Every tensor argument must be a DTensor.

    Registering again is harmless.

    Source: :func:`torch.distributed.tensor.experimental.register_sharding`.

    Example::

        >>> from attention_ext.integrations import dtensor
        >>> dtensor.register()
    """
    ops = torch.ops.attention_ext
    for op, results in (
        (ops.attention.default, _FORWARD_RESULTS),
        (ops.attention_backward.default, _BACKWARD_RESULTS),
    ):
        names = [argument.name for argument in op._schema.arguments]

        def shardings(
            *arguments: Any, _names: list[str] = names, _results: Any = results, **scalars: Any
        ) -> list[tuple[_Placements, _Placements]]:
            # The scalars change no placement; DTensor's cache of decisions does not see them.
            return _shardings(dict(zip(_names, arguments, strict=False)), _results)

        register_sharding(op)(shardings)  # type: ignore[no-untyped-call]


def _shardings(
    arguments: dict[str, Any], results: tuple[str, ...]
) -> list[tuple[_Placements, _Placements]]:
    """(placements of the results, placements of the arguments), each way that is right."""
    query = arguments["query"]
    present = {name: x for name, x in arguments.items() if hasattr(x, "tensor_meta")}
    ways = [_way(lambda name, is_result: Replicate(), arguments, present, results)]
    if "rng_state" in present:
        return ways
    batch_dims = range(query.ndim - 3)
    if "cu_seqlens_q" in present:  # its batch is 1
        batch_dims = range(0)
    for dim in batch_dims:
        ways.append(
            _way(
                lambda name, is_result, dim=dim: _by_batch(name, present, dim, is_result),
                arguments,
                present,
                results,
            )
        )
    if _heads_divide(query, arguments["key"]):
        ways.append(
            _way(
                lambda name, is_result: _by_heads(name, present, is_result),
                arguments,
                present,
                results,
            )
        )
    return ways


def _way(
    place: Any, arguments: dict[str, Any], present: dict[str, Any], results: tuple[str, ...]
) -> tuple[_Placements, _Placements]:
    outputs = [place(name, True) for name in results]
    return outputs, [place(name, False) if name in present else None for name in arguments]


def _shape(name: str, present: dict[str, Any]) -> tuple[int, ...] | None:
    """The shape of a tensor argument; results of its name have the same."""
    return tuple(present[name].tensor_meta.shape) if name in present else None


def _whole(is_result: bool) -> Any:
    """What all ranks use has, as a gradient, a part from each."""
    return Partial() if is_result else Replicate()


def _by_batch(name: str, present: dict[str, Any], dim: int, is_result: bool) -> Any:
    if name not in _LAYOUT:
        return Replicate()
    inner, _ = _LAYOUT[name]
    shape = _shape(name, present)
    rank = present["query"].ndim - 3 + inner
    if shape is not None and (len(shape) < rank or shape[dim] == 1 != _batch(present, dim)):
        return _whole(is_result and name in ("attn_bias", "sinks"))
    return Shard(dim)


def _by_heads(name: str, present: dict[str, Any], is_result: bool) -> Any:
    if name not in _LAYOUT or _LAYOUT[name][1] is None:
        return Replicate()
    from_end = _LAYOUT[name][1]
    assert from_end is not None
    shape = _shape(name, present)
    rank = len(shape) if shape is not None else present["query"].ndim - 3 + _LAYOUT[name][0]
    dim = rank - from_end
    heads = present["query"].tensor_meta.shape[-3]
    if shape is not None and (dim < 0 or shape[dim] == 1 != heads):
        return _whole(is_result and name == "attn_bias")
    return Shard(dim)


def _batch(present: dict[str, Any], dim: int) -> int:
    return int(present["query"].tensor_meta.shape[dim])


def _heads_divide(query: Any, key: Any) -> bool:
    """Whether every number of shards that the mesh can make of the heads keeps groups together."""
    heads, kv_heads = query.tensor_meta.shape[-3], key.tensor_meta.shape[-3]
    sizes = query.mesh.shape
    counts = {
        math.prod(subset)
        for n in range(1, len(sizes) + 1)
        for subset in itertools.combinations(sizes, n)
    }
    return all(kv_heads % count == 0 for count in counts if count <= max(heads, kv_heads))
