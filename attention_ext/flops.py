"""What the operators cost, for torch.utils.flop_counter.FlopCounterMode.

Importing it, which the package does, registers the formulas. They count what torch's count for its
own attention, so that models can be compared: the matrix products, two forward and five backward,
each score computed, whatever a mask hides. Imports _ops, which loads the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from attention_ext import _ops

__all__: list[str] = []


def _products(query: Tensor, key: Tensor, options: Sequence[Any]) -> int:
    """2 * (number of scores): one product costs this times the size of a head.

    `options` are the schema's optional tensors. Packed sequences attend within themselves; where
    their borders are not known (in tracing), they count as one.
    """
    pairs = query.size(-2) * key.size(-2)
    borders_q, borders_k = options[6], options[7]
    if borders_q is not None and borders_k is not None and _known(borders_q) and _known(borders_k):
        lengths = zip(borders_q.diff().tolist(), borders_k.diff().tolist(), strict=True)
        pairs = sum(int(n) * int(m) for n, m in lengths)
    return 2 * math.prod(query.shape[:-2]) * pairs


def _known(borders: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return borders.device.type != "meta" and not isinstance(borders, (FakeTensor, FunctionalTensor))


def _padded(options: Sequence[Any]) -> list[Any]:
    """The nine optional tensors, those left out at the end included."""
    return [*options, *(None,) * (9 - len(options))][:9]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *options: Any, out_val: Any = None, **scalars: Any
) -> int:
    sizes = query.size(-1) + value.size(-1)
    return _products(query, key, _padded(_by_name(options, scalars))) * sizes


def _attention_backward(
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: Any,
    out_val: Any = None,
    **scalars: Any,
) -> int:
    # The scores and the gradients of query and key have the one size, the gradients of weights and
    # value the other.
    sizes = 3 * query.size(-1) + 2 * value.size(-1)
    return _products(query, key, _padded(others)) * sizes


def _attention_weights(
    query: Tensor, key: Tensor, *others: Any, out_val: Any = None, **scalars: Any
) -> int:
    return _products(query, key, _padded(others)) * query.size(-1)


def _attention_weights_backward(
    grad_weights: Tensor,
    query: Tensor,
    key: Tensor,
    *others: Any,
    out_val: Any = None,
    **scalars: Any,
) -> int:
    # The scores twice: what a row sums up to comes before the gradients of query and key.
    return _products(query, key, _padded(others)) * 4 * query.size(-1)


def _by_name(options: Sequence[Any], keywords: dict[str, Any]) -> list[Any]:
    """The forward operator's optional tensors, which may also come by name."""
    names = [argument.name for argument in _ops.attention._schema.arguments[3:12]]
    given = dict(zip(names, options, strict=False))
    return [given.get(name, keywords.get(name)) for name in names]


for _op, _formula in (
    (_ops.attention, _attention),
    (_ops.attention_backward, _attention_backward),
    (_ops.attention_weights, _attention_weights),
    (_ops.attention_weights_backward, _attention_weights_backward),
):
    if _op.overloadpacket not in flop_registry:  # the package may be imported anew
        register_flop_formula(_op.overloadpacket, get_raw=True)(_formula)
