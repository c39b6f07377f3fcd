"""Watches the dispatcher: which operators really ran, and the largest tensor they made."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that would mean attention by other means than ours.
_OTHER_WAYS = ("scaled_dot_product", "multi_head_attention", "transformer_encoder", "softmax")


class Watch(TorchDispatchMode):
    """with Watch() as seen: model(x); then seen.ours, seen.other_ways, seen.largest."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.largest = 0  # bytes of the largest tensor that an operator returned as new memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        result = func(*args, **(kwargs or {}))
        taken = {x.data_ptr() for x in _tensors(args)}
        for x in _tensors(result):
            if x.data_ptr() not in taken:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result

    @property
    def ours(self) -> int:
        """How often our forward operator ran."""
        return self.calls["attention_ext::attention"]

    @property
    def other_ways(self) -> list[str]:
        """The operators that compute attention and are not ours."""
        return sorted(name for name in self.calls if any(way in name for way in _OTHER_WAYS))


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
    return [x for x in leaves if not x.is_nested and x.layout == torch.strided]
