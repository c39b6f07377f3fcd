"""One piece of attention work, spelled for both sides: ours, and every fair spelling of torch's.

A `Work` is a shape, a dtype, a layout, a mask and a direction. `prepare` makes its inputs from a
fixed seed and returns closures that do the same work; the benchmark takes the fastest of torch's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import attention_ext as ae

Call = Callable[[], object]
Mask = Literal["full", "causal", "bool", "float", "padding", "window"]
Direction = Literal["fwd", "bwd", "fwd+bwd"]


@dataclass(frozen=True)
class Prepared:
    """The closures of one row; their results are compared first unless they are random."""

    ours: Call
    torch: dict[str, Call]
    flops: float
    comparable: bool = True


@dataclass(frozen=True, kw_only=True)
class Work:
    """Attention of B x H heads, L queries against S keys (S = L and Hkv = H unless given)."""

    B: int = 2
    H: int = 8
    L: int
    S: int | None = None
    E: int = 64
    Hkv: int | None = None
    dtype: torch.dtype = torch.float32
    mask: Mask = "full"
    window: int = 0
    dropout: float = 0.0
    learned_bias: bool = False
    transposed: bool = False
    direction: Direction = "fwd"

    @property
    def keys(self) -> int:
        return self.L if self.S is None else self.S

    def visible_pairs(self) -> int:
        """Pairs of one (batch, head) that a structured mask leaves; a dense one leaves all."""
        if self.mask == "causal":
            return self.L * (self.L + 1) // 2
        if self.mask == "padding":
            return self.L * (self.keys // 2)
        if self.mask == "window":
            return sum(min(i, self.window) + 1 for i in range(self.L))
        return self.L * self.keys

    def flops(self) -> float:
        """Two products forward, five backward, two operations a multiply-add."""
        products = {"fwd": 2, "bwd": 5, "fwd+bwd": 7}[self.direction]
        return 2.0 * products * self.E * self.visible_pairs() * self.B * self.H

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def one(heads: int, length: int) -> Tensor:
            shape = (self.B, heads, length, self.E)
            if self.transposed:
                shape = (self.B, length, heads, self.E)
            x = torch.randn(shape, generator=generator, dtype=torch.float32).to(self.dtype)
            x = x.transpose(1, 2) if self.transposed else x
            return x.requires_grad_(self.direction != "fwd")

        kv_heads = self.Hkv or self.H
        return one(self.H, self.L), one(kv_heads, self.keys), one(kv_heads, self.keys)

    def prepare(self, name: str) -> Prepared:
        """Inputs and closures; the seed comes from the row's name: a row is the same every day."""
        seed = zlib.crc32(name.encode())
        q, k, v = self.inputs(seed)
        generator = torch.Generator().manual_seed(seed + 1)
        forward, spellings, leaves = self._forward(q, k, v, generator)
        calls = {key: self._directed(call, leaves, seed) for key, call in spellings.items()}
        ours = self._directed(forward, leaves, seed)
        return Prepared(ours, calls, self.flops(), comparable=self.dropout == 0)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator
    ) -> tuple[Callable[[], Tensor], dict[str, Callable[[], Tensor]], list[Tensor]]:
        """Our forward call, torch's by name of spelling, and what gradients are taken of."""
        L, S, p = self.L, self.keys, self.dropout
        leaves = [q, k, v]

        def sdpa(mask: Tensor | None = None, causal: bool = False) -> Callable[[], Tensor]:
            return lambda: F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal
            )

        def ours(**options: object) -> Callable[[], Tensor]:
            return lambda: ae.attention(q, k, v, dropout_p=p, **options)  # type: ignore[arg-type,return-value]

        if self.learned_bias:
            bias = torch.randn((1, self.H, L, S), generator=generator).requires_grad_()
            scale = self.E**-0.5

            def by_hand() -> Tensor:
                return torch.softmax((q * scale) @ k.transpose(-2, -1) + bias, -1) @ v

            return (
                ours(attn_bias=bias),
                {"sdpa": sdpa(bias), "by hand": by_hand},
                [*leaves, bias],
            )
        if self.mask == "causal":
            return (
                lambda: ae.scaled_dot_product_attention(q, k, v, None, p, True),
                {"sdpa": sdpa(causal=True)},
                leaves,
            )
        if self.mask in ("bool", "float"):
            keep = torch.rand((L, S), generator=generator) < 0.5
            keep[:, 0] = True
            mask = keep if self.mask == "bool" else torch.randn((L, S), generator=generator)
            mask = mask if self.mask == "bool" else mask.to(self.dtype)
            ours_call = lambda: ae.scaled_dot_product_attention(q, k, v, mask, p)  # noqa: E731
            return ours_call, {"sdpa": sdpa(mask)}, leaves
        if self.mask == "padding":
            # Lengths around a half of S, S/2 on average.
            spread = torch.linspace(-0.25, 0.25, self.B) if self.B > 1 else torch.zeros(1)
            lengths = ((0.5 + spread) * S).round().long()
            key_mask = torch.arange(S) < lengths[:, None]
            return (
                ours(key_mask=key_mask),
                self._both_masks(sdpa, key_mask[:, None, None, :]),
                leaves,
            )
        if self.mask == "window":
            distance = torch.arange(L)[:, None] - torch.arange(S)
            band = (distance >= 0) & (distance <= self.window)
            return ours(window=(self.window, 0)), self._both_masks(sdpa, band), leaves
        if self.Hkv is not None:
            return ours(), self._grouped(q, k, v), leaves
        return (
            lambda: ae.scaled_dot_product_attention(q, k, v, None, p),
            {"sdpa": sdpa()},
            leaves,
        )

    def _both_masks(
        self, sdpa: Callable[[Tensor], Callable[[], Tensor]], keep: Tensor
    ) -> dict[str, Callable[[], Tensor]]:
        """Torch reads a bool and a float mask at different speeds; both are made in advance."""
        keep = keep.expand(*keep.shape[:-2], self.L, self.keys)
        added = torch.zeros(keep.shape, dtype=self.dtype).masked_fill_(~keep, -torch.inf)
        return {"sdpa, bool mask": sdpa(keep), "sdpa, float mask": sdpa(added)}

    def _grouped(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
        """Grouped heads: the flag, heads repeated as a view, and the group as query rows."""
        assert self.Hkv is not None
        group = self.H // self.Hkv

        def flag() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        def repeated() -> Tensor:
            return F.scaled_dot_product_attention(
                q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            )

        def as_rows() -> Tensor:
            rows = q.reshape(self.B, self.Hkv or 1, group * self.L, self.E)
            return F.scaled_dot_product_attention(rows, k, v).view(q.shape)

        return {"sdpa, enable_gqa": flag, "sdpa, repeated": repeated, "sdpa, as rows": as_rows}

    def _directed(self, forward: Callable[[], Tensor], leaves: list[Tensor], seed: int) -> Call:
        """The forward call itself, or the gradients of its result, or both together."""
        if self.direction == "fwd":
            return _without_grad(forward)
        with torch.no_grad():
            out = forward()
        generator = torch.Generator().manual_seed(seed + 2)
        grad = torch.randn(out.shape, generator=generator).to(out.dtype)
        if self.direction == "fwd+bwd":
            return lambda: torch.autograd.grad(forward(), leaves, grad)
        recorded = forward()
        return lambda: torch.autograd.grad(recorded, leaves, grad, retain_graph=True)


def _without_grad(forward: Callable[[], Tensor]) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            return forward()

    return call


@dataclass(frozen=True, kw_only=True)
class ModuleStep:
    """A training step of the module: forward, backward to input and parameters."""

    E: int = 512
    H: int = 8
    B: int = 4
    L: int = 512
    need_weights: bool

    def prepare(self, name: str) -> Prepared:
        torch.manual_seed(zlib.crc32(name.encode()))
        theirs = torch.nn.MultiheadAttention(self.E, self.H, batch_first=True)
        ours = ae.MultiheadAttention(self.E, self.H, batch_first=True)
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(self.B, self.L, self.E, requires_grad=True)
        grad = torch.randn(self.B, self.L, self.E)

        def step(module: torch.nn.MultiheadAttention) -> Call:
            parameters = list(module.parameters())

            def call() -> object:
                out, _ = module(x, x, x, need_weights=self.need_weights)
                return torch.autograd.grad(out, [x, *parameters], grad)

            return call

        attention = Work(B=self.B, H=self.H, L=self.L, E=self.E // self.H, direction="fwd+bwd")
        projections = 3 * 2 * 4 * self.E**2 * self.B * self.L
        return Prepared(step(ours), {"module": step(theirs)}, attention.flops() + projections)
