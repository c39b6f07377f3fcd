"""One piece of attention work, spelled for both sides: ours, and every fair spelling of torch's.

`prepare` makes the inputs of a case (tests/cases.py) and returns closures that do the same work;
the benchmark takes the fastest of torch's. Masks are made in advance, as each spelling reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import attention_ext as ae
from cases import Args, Case, Kwargs

Call = Callable[[], object]
Forward = Callable[[], Tensor]
Direction = Literal["fwd", "bwd", "fwd+bwd"]


@dataclass(frozen=True)
class Prepared:
    """The closures of one row; their results are compared first unless they are random.

    `check` gives the others' result as a tensor where the call does not; `settle` is how long, in
    seconds, the sides leave each other alone (their threads may spin). `memory` is what must be
    read, in bytes.
    """

    ours: Call
    others: dict[str, Call]
    flops: float
    comparable: bool = True
    check: Call | None = None
    settle: float = 0.0
    memory: float = 0.0


class Work(Protocol):
    """What a row times."""

    @property
    def dtype(self) -> torch.dtype: ...

    def prepare(self) -> Prepared:
        """Inputs and closures, the same every day."""
        ...


@dataclass(frozen=True)
class Attention:
    """One case, forward, backward or both. A bias is a constant unless it is learned; a key mask
    hides the last half of the keys, a little more of some sequences and less of others."""

    case: Case
    dtype: torch.dtype = torch.float32
    direction: Direction = "fwd"
    learned_bias: bool = False

    def prepare(self) -> Prepared:
        """Inputs and closures, the same every day."""
        args, kwargs = self.case.make(self.dtype, requires_grad=self.direction != "fwd")
        kwargs.pop("rng_state", None)  # drawn in every call, as users do
        leaves = list(args)
        if "attn_bias" in kwargs:
            kwargs["attn_bias"].requires_grad_(self.learned_bias)
            leaves += [kwargs["attn_bias"]] if self.learned_bias else []
        if "key_mask" in kwargs:
            kwargs["key_mask"] = _padding(*kwargs["key_mask"].shape)
        spellings = {
            name: _directed(forward, leaves, self.direction)
            for name, forward in _spellings(args, kwargs).items()
        }
        ours = _directed(_ours(args, kwargs), leaves, self.direction)
        return Prepared(
            ours,
            spellings,
            self.flops(kwargs),
            comparable=not self.case.dropout_p,
            memory=sum(x.nbytes for x in args),
        )

    def flops(self, kwargs: Kwargs) -> float:
        """Two products forward, five backward, two operations for each multiply-add.

        Counted over the pairs that a window or padding leaves; a dense mask leaves all of them.
        """
        n = self.case.shape
        pairs = n["L"] * n["S"] * self.case.batch[0]
        if "key_mask" in kwargs:
            pairs = n["L"] * int(kwargs["key_mask"].sum())
        elif self.case.is_causal or self.case.window:
            left = (self.case.window or (None,))[0]
            reach = n["S"] if left is None else left
            pairs = self.case.batch[0] * sum(min(i, reach) + 1 for i in range(n["L"]))
        products = {"fwd": 2, "bwd": 5, "fwd+bwd": 7}[self.direction]
        return 2.0 * products * n["E"] * n["H"] * pairs


@dataclass(frozen=True)
class ModuleStep:
    """A training step of the module: forward, backward to its input and parameters."""

    need_weights: bool
    size: int = 512
    heads: int = 8
    batch: int = 4
    length: int = 512
    dtype: torch.dtype = torch.float32

    def prepare(self) -> Prepared:
        torch.manual_seed(0)
        theirs = torch.nn.MultiheadAttention(self.size, self.heads, batch_first=True)
        ours = ae.MultiheadAttention(self.size, self.heads, batch_first=True)
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(self.batch, self.length, self.size, requires_grad=True)
        grad = torch.randn(self.batch, self.length, self.size)

        def step(module: torch.nn.MultiheadAttention) -> Call:
            parameters = list(module.parameters())

            def call() -> object:
                out, _ = module(x, x, x, need_weights=self.need_weights)
                return torch.autograd.grad(out, [x, *parameters], grad)

            return call

        projections = 3 * 2.0 * 4 * self.size**2 * self.batch * self.length
        products = 7 * 2.0 * self.size * self.length**2 * self.batch
        return Prepared(step(ours), {"module": step(theirs)}, projections + products)


@dataclass(frozen=True)
class RawCall:
    """The smallest call, B1 H1 S8 D8, through torch.ops: the fixed cost of a call."""

    direction: Direction = "fwd"
    dtype: torch.dtype = torch.float32

    def prepare(self) -> Prepared:
        case = Case("smallest", 8, 8, 8, batch=(1,), heads=1)
        args, _ = case.make(self.dtype, requires_grad=self.direction != "fwd")
        op = torch.ops.attention_ext.attention.default
        ours = _directed(lambda: op(*args)[0], list(args), self.direction)
        sdpa = _directed(_spellings(args, {})["sdpa"], list(args), self.direction)
        return Prepared(ours, {"sdpa": sdpa}, 2.0 * 2 * 8 * 8 * 8)


@dataclass(frozen=True)
class TwoThreads:
    """A piece of our own work on one thread, against the same on two."""

    work: Attention
    dtype: torch.dtype = torch.float32

    def prepare(self) -> Prepared:
        prepared = self.work.prepare()

        def alone() -> object:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                return prepared.ours()
            finally:
                torch.set_num_threads(threads)

        return replace(prepared, others={"one thread": alone})


def _padding(batch: int, keys: int) -> Tensor:
    spread = torch.linspace(-0.25, 0.25, batch) if batch > 1 else torch.zeros(1)
    return torch.arange(keys) < ((0.5 + spread) * keys).round()[:, None]


def _ours(args: Args, kwargs: Kwargs) -> Forward:
    return lambda: ae.attention(*args, **kwargs)  # type: ignore[return-value]


def _sdpa_options(kwargs: Kwargs) -> dict[str, Any]:
    mask = kwargs.get("attn_mask", kwargs.get("attn_bias"))
    causal, p = kwargs.get("is_causal", False), kwargs.get("dropout_p", 0.0)
    return {"attn_mask": mask, "is_causal": causal, "dropout_p": p}


def _spellings(args: Args, kwargs: Kwargs) -> dict[str, Forward]:
    """Torch's ways to say the call: a structured mask as a bool and as a float one (which run at
    different speeds), a learned bias also by hand, grouped heads in three ways."""
    q, k, v = args
    options = _sdpa_options(kwargs)

    def sdpa(**more: Any) -> Forward:
        return lambda: F.scaled_dot_product_attention(q, k, v, **{**options, **more})

    if "key_mask" in kwargs or "window" in kwargs:
        rows, keys = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))
        if "window" in kwargs:
            keep = (keys <= rows) & (keys >= rows - kwargs["window"][0])
        else:
            keep = kwargs["key_mask"][:, None, None, :].expand(-1, 1, q.size(-2), -1)
        added = torch.zeros(keep.shape, dtype=q.dtype).masked_fill_(~keep, -torch.inf)
        return {"bool mask": sdpa(attn_mask=keep), "float mask": sdpa(attn_mask=added)}
    if "attn_bias" in kwargs and kwargs["attn_bias"].requires_grad:
        scale, bias = q.size(-1) ** -0.5, kwargs["attn_bias"]
        by_hand = lambda: torch.softmax((q * scale) @ k.mT + bias, -1) @ v  # noqa: E731
        return {"sdpa": sdpa(), "by hand": by_hand}
    if q.size(-3) != k.size(-3):
        group = q.size(-3) // k.size(-3)

        def repeated() -> Tensor:
            return F.scaled_dot_product_attention(
                q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            )

        def as_rows() -> Tensor:  # the heads of a group become query rows: legal without a mask
            rows = q.reshape(q.size(0), k.size(1), -1, q.size(-1))
            return F.scaled_dot_product_attention(rows, k, v).view(q.shape)

        return {"enable_gqa": sdpa(enable_gqa=True), "repeated": repeated, "as rows": as_rows}
    return {"sdpa": sdpa()}


def _directed(forward: Forward, leaves: list[Tensor], direction: Direction) -> Call:
    """The forward call itself, or the gradients of its result, or both together."""

    def without_grad() -> Tensor:
        with torch.no_grad():
            return forward()

    if direction == "fwd":
        return without_grad
    recorded = forward()
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(recorded.shape, generator=generator).to(recorded.dtype)
    if direction == "fwd+bwd":
        return lambda: torch.autograd.grad(forward(), leaves, grad)
    return lambda: torch.autograd.grad(recorded, leaves, grad, retain_graph=True)
