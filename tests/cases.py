"""ONE table of cases, shared by forward, backward, compile and transform tests and the benchmark.

    for case in CASES:
        args, kwargs = case.make(torch.float32)         # for ae.attention and reference.attention
        raw_args, raw_kwargs = raw(args, kwargs)        # the same call for torch.ops.attention_ext
        leaves = differentiable(args, kwargs)           # {"query": ..., "attn_bias": ...}
    for case in PACKED_CASES:
        args, kwargs = case.make(torch.float32)         # for varlen_attention

`pytest.mark.parametrize("case", params(CASES))` marks the large ones slow. Equal seeds give equal
numbers in every dtype (rounded to it). Sizes lie around the borders of tiles (at most 96 queries by
96 keys) and of the key ranges (512 and 1024 keys).

The tolerance rule is `assert_accurate`: the error against float64 is at most a small multiple of
the error that plain dense attention makes in the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_ext import reference

Args = tuple[Tensor, Tensor, Tensor]
Kwargs = dict[str, Any]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DIFFERENTIABLE = ("attn_bias", "sinks")


@dataclass(frozen=True)
class Case:
    """One call. `mask` and `bias` are shapes: a letter for a full dimension, 1 for a broadcast one,
    so that "BHLS", "1H1S", "B1LS" and "LS" say what they are."""

    name: str
    q_len: int = 5
    k_len: int = 7
    size: int = 8
    value_size: int | None = None
    batch: tuple[int, ...] = (2,)
    heads: int = 2
    kv_heads: int | None = None
    mask: str | None = None
    band: tuple[int, int] | None = None  # the mask shows keys j with -band[0] <= j - i <= band[1]
    bias: str | None = None
    wide_bias: bool = False  # the bias is float32 (float64 with float64)
    hidden_bias: bool = True  # one number of the bias in eight is -inf
    key_mask: str | None = None  # "bool" or "float"
    dead_rows: bool = False  # rows 0 and 3 of the mask or bias hide every key
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    query_offset: int | str = 0  # "per batch": a tensor
    softcap: float = 0.0
    sinks: bool = False
    alibi: str | None = None  # "H" or "BH"
    scale: float | None = None
    dropout_p: float = 0.0
    layout: str = "contiguous"  # of every tensor: see _laid_out
    slow: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def shape(self) -> dict[str, int]:
        """The letters of the contract: H, Hkv, L, S, E, Ev (the batch is `batch`)."""
        return {
            "H": self.heads,
            "Hkv": self.kv_heads or self.heads,
            "L": self.q_len,
            "S": self.k_len,
            "E": self.size,
            "Ev": self.size if self.value_size is None else self.value_size,
        }

    def make(
        self,
        dtype: torch.dtype,
        device: str = "cpu",
        requires_grad: bool = False,
        seed: int = 0,
    ) -> tuple[Args, Kwargs]:
        """(query, key, value) and the keyword arguments; leaves require grad if asked."""
        random = torch.Generator().manual_seed(1000 * seed + 7)
        n = self.shape

        def leaf(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            x = torch.randn(shape, generator=random, dtype=torch.float64).to(device, kind)
            return _laid_out(x, self.layout).detach().requires_grad_(requires_grad)

        query = leaf(*self.batch, n["H"], n["L"], n["E"])
        key = leaf(*self.batch, n["Hkv"], n["S"], n["E"])
        value = leaf(*self.batch, n["Hkv"], n["S"], n["Ev"])
        kwargs: Kwargs = {}
        if self.mask is not None:
            mask = torch.rand(self._full(self.mask), generator=random) > 0.4
            if self.band is not None:
                distance = torch.arange(n["S"]) - torch.arange(n["L"])[:, None]
                mask = mask & (distance >= -self.band[0]) & (distance <= self.band[1])
            if self.dead_rows:
                mask[..., 0:4:3, :] = False
            kwargs["attn_mask"] = _laid_out(mask.to(device), self.layout)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if self.bias is not None:
            bias = torch.randn(self._full(self.bias), generator=random, dtype=torch.float64)
            if self.hidden_bias:
                bias[torch.rand(bias.shape, generator=random) < 0.125] = -torch.inf
            if self.dead_rows:
                bias[..., 0:4:3, :] = -torch.inf
            bias = bias.to(device, wide if self.wide_bias else dtype)
            bias = _laid_out(bias, self.layout)
            kwargs["attn_bias"] = bias.detach().requires_grad_(requires_grad)
        if self.key_mask is not None:
            seen = torch.rand((*self.batch, n["S"]), generator=random) > 0.3
            added = torch.randn(seen.shape, generator=random).masked_fill(~seen, -torch.inf)
            kwargs["key_mask"] = _laid_out(
                (seen if self.key_mask == "bool" else added.to(wide)).to(device), self.layout
            )
        if self.sinks:
            sinks = torch.randn(n["H"], generator=random).to(device, dtype)
            kwargs["sinks"] = sinks.requires_grad_(requires_grad)
        if self.alibi is not None:
            shape = (n["H"],) if self.alibi == "H" else (*self.batch, n["H"])
            kwargs["alibi_slopes"] = (torch.rand(shape, generator=random) / 4).to(device, wide)
        if self.query_offset == "per batch":
            top = max(n["S"], 1)
            kwargs["query_offset"] = torch.randint(-2, top, self.batch, generator=random).to(device)
        elif self.query_offset:
            kwargs["query_offset"] = self.query_offset
        for option in ("is_causal", "window", "softcap", "scale", "dropout_p"):
            if getattr(self, option) != getattr(_PLAIN, option):
                kwargs[option] = getattr(self, option)
        if self.dropout_p > 0:
            kwargs["rng_state"] = torch.tensor([12345 + seed, 1 << 33, 0, 0, 0, 0], device=device)
        return (query, key, value), kwargs

    def _full(self, letters: str) -> tuple[int, ...]:
        """The shape that a string such as "B1LS" stands for."""
        full = (*self.batch, self.heads, self.q_len, self.k_len)[-len(letters) :]
        return tuple(1 if c == "1" else n for c, n in zip(letters, full, strict=True))


@dataclass(frozen=True)
class PackedCase:
    """One call with packed sequences, given by their lengths."""

    name: str
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    size: int = 8
    value_size: int | None = None
    heads: int = 2
    kv_heads: int | None = None
    key_mask: str | None = None
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    query_offset: int | str = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    dropout_p: float = 0.0
    index_dtype: torch.dtype = torch.int32
    slow: bool = False

    def __str__(self) -> str:
        return self.name

    def make(
        self, dtype: torch.dtype, device: str = "cpu", requires_grad: bool = False, seed: int = 0
    ) -> tuple[tuple[Tensor, ...], Kwargs]:
        """(query (T, H, E), key, value, cu_seqlens_q, cu_seqlens_k) and the keyword arguments."""
        one = Case(
            self.name,
            q_len=sum(self.q_lens),
            k_len=sum(self.k_lens),
            size=self.size,
            value_size=self.value_size,
            batch=(),
            heads=self.heads,
            kv_heads=self.kv_heads,
            key_mask=self.key_mask,
            is_causal=self.is_causal,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            alibi="H" if self.alibi else None,
            dropout_p=self.dropout_p,
            layout="heads_last",
        )
        tensors, kwargs = one.make(dtype, device, seed=seed)
        tensors = tuple(x.transpose(0, 1).detach().requires_grad_(requires_grad) for x in tensors)
        if "sinks" in kwargs:
            kwargs["sinks"].requires_grad_(requires_grad)
        if self.query_offset == "per batch":
            kwargs["query_offset"] = torch.arange(len(self.q_lens), device=device) * 3 - 2
        elif self.query_offset:
            kwargs["query_offset"] = self.query_offset
        borders_q = borders_of(self.q_lens, self.index_dtype, device)
        borders_k = borders_of(self.k_lens, self.index_dtype, device)
        return (*tensors, borders_q, borders_k), kwargs


def borders_of(
    lens: Sequence[int], dtype: torch.dtype = torch.int32, device: str = "cpu"
) -> Tensor:
    """cu_seqlens: 0 and the running sums of the lengths."""
    borders = [0]
    for n in lens:
        borders.append(borders[-1] + n)
    return torch.tensor(borders, dtype=dtype, device=device)


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """x's numbers in another memory layout (expanded ones repeat the first of each kind)."""
    if layout == "contiguous" or x.dim() < 2:
        return x.clone()
    if layout == "heads_last":  # (B, L, H, E) in memory
        return x if x.dim() < 3 else x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "columns":  # (B, H, E, L) in memory
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided":  # every second number, from an odd address
        big = x.new_zeros((*x.shape[:-1], 2 * x.size(-1) + 1))
        big[..., 1::2] = x
        return big[..., 1::2]
    if layout == "sliced":  # a block out of the middle of something larger
        big = x.new_zeros((*x.shape[:-2], x.size(-2) + 3, x.size(-1) + 5))
        big[..., 2:-1, 3:-2] = x
        return big[..., 2:-1, 3:-2]
    if layout == "expanded":  # the first dimension has stride 0
        return x[:1].expand(x.shape) if x.size(0) else x
    if layout == "expanded_last":  # the last dimension has stride 0
        return x[..., :1].expand(x.shape) if x.size(-1) else x
    raise ValueError(layout)


_PLAIN = Case("plain")

CASES: list[Case] = [
    # Sizes, without options: tails of vectors, tiles and key ranges.
    Case("one_number", 1, 1, 1, batch=(1,), heads=1),
    Case("tiny", 2, 5, 3, 1),
    Case("odd", 17, 31, 17, 33),
    Case("tail_of_one", 33, 97, 33, 40, batch=(1,)),
    Case("unbatched", 31, 33, 8, 17, batch=()),
    Case("two_batch_dims", 5, 17, 8, batch=(2, 3)),
    Case("one_tile", 96, 96, 64, batch=(1,)),
    Case("tile_less_one", 95, 95, 72, 80, batch=(1,)),
    Case("tile_plus_one", 97, 97, 40, 96, batch=(1,)),
    Case("two_tiles_odd", 193, 200, 3, 5, batch=(1,)),
    Case("two_tiles", 191, 193, 80, 33, batch=(1,)),
    Case("wide_values", 17, 100, 1, 200, batch=(1,)),
    Case("wide_head", 100, 64, 200, 128, batch=(1,)),
    Case("wider_head", 33, 97, 256, 256, batch=(1,)),
    Case("widest_head", 17, 65, 576, 512, batch=(1,), heads=4, kv_heads=1),
    Case("decode", 1, 1100, 64, batch=(2,), heads=4, kv_heads=2),
    Case("decode_odd", 1, 577, 33, 17, batch=(2,), heads=3),
    Case("decode_group", 1, 2057, 128, batch=(1,), heads=8, kv_heads=1),
    Case("decode_rows_of_group", 3, 577, 40, 24, heads=10, kv_heads=2),  # 15: 8, 4, 2 and 1
    Case("decode_wide_group", 1, 1100, 17, batch=(2,), heads=30, kv_heads=2, layout="heads_last"),
    Case("short_query", 5, 1025, 40, batch=(1,), heads=6, kv_heads=3),
    Case("long_keys", 100, 1100, 16, batch=(1,)),
    Case("long_queries", 1025, 100, 8, batch=(1,)),
    Case("long_both", 577, 1100, 8, batch=(1,), heads=1, slow=True),
    # Layouts, each with masks of that layout.
    Case("heads_last", 33, 100, 40, layout="heads_last", mask="BHLS"),
    Case("columns", 33, 100, 40, layout="columns", mask="BHLS"),
    Case("strided", 33, 100, 40, layout="strided", mask="B1LS", bias="1HLS"),
    Case("sliced", 97, 33, 17, layout="sliced", mask="LS", key_mask="bool"),
    Case("expanded", 17, 97, 33, layout="expanded", mask="BHLS", bias="BHLS"),
    Case(
        "expanded_last",
        17,
        97,
        16,
        layout="expanded_last",
        bias="BHLS",
        hidden_bias=False,
        scale=0.05,  # equal numbers in a row add up: the softmax should not be one-hot
    ),
    # Grouped heads.
    Case("grouped", 33, 65, 16, heads=6, kv_heads=2, mask="BHLS"),
    Case("one_kv_head", 65, 100, 24, heads=5, kv_heads=1, is_causal=True, layout="heads_last"),
    # Masks.
    Case("mask_full", 100, 193, 16, mask="BHLS", dead_rows=True),
    Case("mask_2d", 97, 100, 24, mask="LS", dead_rows=True),
    Case("mask_of_batch", 33, 97, 24, mask="B1LS", dead_rows=True),
    Case("mask_of_keys", 33, 97, 24, mask="1H1S"),
    Case("mask_of_rows", 33, 97, 24, mask="BHL1"),
    Case("mask_single", 5, 7, 24, mask="1111"),
    Case("mask_unbatched", 33, 40, 8, batch=(), mask="HLS", dead_rows=True),
    Case("mask_two_batch_dims", 33, 40, 8, batch=(2, 3), mask="B1HLS", dead_rows=True),
    Case("mask_band", 400, 400, 8, batch=(1,), heads=1, mask="11LS", band=(20, 5)),
    Case("decode_mask", 1, 1100, 32, heads=4, kv_heads=2, mask="B11S"),
    Case("decode_mask_of_heads", 1, 200, 8, heads=16, kv_heads=1, mask="BH1S", dead_rows=True),
    Case("key_mask", 100, 193, 16, key_mask="bool"),
    Case("key_mask_float", 97, 100, 16, key_mask="float"),
    Case("key_mask_decode", 1, 1100, 64, heads=4, key_mask="bool"),
    # Bias.
    Case("bias_full", 97, 193, 16, bias="BHLS", dead_rows=True),
    Case("bias_2d", 97, 100, 24, bias="LS", dead_rows=True),
    Case("bias_of_heads", 33, 200, 24, bias="1HLS"),
    Case("bias_of_batch", 33, 97, 24, bias="B1LS", wide_bias=True),
    Case("bias_of_keys", 97, 97, 24, bias="B11S", wide_bias=True),
    Case("bias_of_rows", 97, 31, 24, bias="1HL1", hidden_bias=False),
    Case("bias_single", 33, 31, 24, bias="1111", hidden_bias=False),
    Case("bias_grouped", 100, 97, 16, heads=4, kv_heads=2, bias="BHLS", wide_bias=True),
    Case("bias_unbatched", 33, 40, 8, batch=(), bias="1LS"),
    Case("bias_long", 200, 1100, 8, batch=(1,), bias="1HLS", slow=True),
    Case("bias_and_key_mask", 40, 97, 16, bias="1HLS", key_mask="float"),
    Case("decode_bias", 1, 1100, 32, bias="BH1S"),
    # Windows and offsets.
    Case("causal", 200, 200, 16, is_causal=True),
    Case("causal_wide", 97, 257, 16, is_causal=True),
    Case("causal_tall", 257, 97, 16, is_causal=True),
    Case("causal_bottom_right", 64, 257, 16, is_causal=True, query_offset=193),
    Case("causal_dead", 100, 64, 16, is_causal=True, query_offset=-36),
    Case("window", 257, 257, 16, window=(40, 3)),
    Case("window_left", 200, 257, 16, window=(17, None), query_offset=57),
    Case("window_right", 200, 257, 16, window=(None, 17)),
    Case("window_causal", 257, 257, 16, window=(63, 64), is_causal=True),
    Case("window_zero", 97, 97, 8, window=(0, 0)),
    Case("window_away", 33, 40, 8, window=(5, 5), query_offset=30),
    Case("offset_per_batch", 33, 97, 16, batch=(3,), is_causal=True, query_offset="per batch"),
    Case("decode_window", 1, 1100, 32, window=(200, 0), query_offset=1000),
    Case(
        "decode_last_row",
        1,
        300,
        8,
        heads=16,
        kv_heads=1,
        is_causal=True,
        query_offset=299,
        key_mask="float",
        softcap=2.0,
    ),
    Case(
        "decode_window_of_group", 1, 300, 8, heads=16, kv_heads=1, window=(100, 0), query_offset=250
    ),
    # Softcap, sinks, ALiBi, scale.
    Case("softcap", 97, 100, 24, softcap=1.5, scale=1.0),
    Case("sinks", 97, 100, 24, sinks=True, mask="BHLS", dead_rows=True),
    Case("sinks_decode", 1, 1100, 24, heads=4, sinks=True),
    Case("alibi", 97, 193, 24, alibi="H", query_offset=96),
    Case("alibi_per_batch", 33, 97, 24, alibi="BH", is_causal=True, query_offset="per batch"),
    Case("scale_negative", 33, 97, 24, scale=-0.3),
    Case("scale_zero", 33, 97, 24, scale=0.0),
    Case("scale_large", 33, 97, 24, scale=3.0),
    # Dropout, at sizes that are no multiples of eight.
    Case("dropout", 97, 100, 16, dropout_p=0.3),
    Case("dropout_masked", 65, 193, 16, dropout_p=0.5, mask="BHLS", dead_rows=True),
    Case("dropout_decode", 1, 1100, 32, dropout_p=0.25),
    # Everything at once.
    Case(
        "everything",
        100,
        193,
        17,
        24,
        heads=4,
        kv_heads=2,
        mask="B1LS",
        bias="1HLS",
        wide_bias=True,
        key_mask="bool",
        dead_rows=True,
        window=(150, 40),
        query_offset=50,
        softcap=4.0,
        sinks=True,
        alibi="H",
        dropout_p=0.2,
        layout="heads_last",
    ),
    Case(
        "everything_decode",
        1,
        1100,
        33,
        40,
        heads=4,
        kv_heads=2,
        mask="B11S",
        bias="BH1S",
        key_mask="float",
        window=(900, 5),
        query_offset=1000,
        softcap=4.0,
        sinks=True,
        alibi="BH",
        dropout_p=0.2,
    ),
]

PACKED_CASES: list[PackedCase] = [
    PackedCase("packed", (5, 33, 97), (7, 64, 100), 16),
    PackedCase("packed_one", (33,), (40,), 8, 17),
    PackedCase("packed_none", (), (), 8),
    PackedCase("packed_empty", (0, 5, 0, 17, 3), (4, 0, 0, 31, 97), 16, is_causal=True),
    PackedCase("packed_grouped", (1, 100, 193), (65, 100, 200), 24, 33, heads=4, kv_heads=2),
    PackedCase(
        "packed_causal",
        (97, 1, 96),
        (97, 200, 193),
        16,
        is_causal=True,
        query_offset="per batch",
        index_dtype=torch.int64,
    ),
    PackedCase("packed_window", (130, 64), (200, 31), 8, window=(30, 4), query_offset=5),
    PackedCase("packed_decode", (1, 1, 1), (1100, 5, 577), 32, heads=4, kv_heads=1),
    PackedCase(
        "packed_everything",
        (33, 0, 100, 7),
        (97, 5, 130, 0),
        17,
        24,
        heads=4,
        kv_heads=2,
        key_mask="bool",
        window=(60, 20),
        query_offset=3,
        softcap=4.0,
        sinks=True,
        alibi=True,
        dropout_p=0.3,
    ),
]


def params(cases: Iterable[Any]) -> list[Any]:
    """Cases as pytest parameters, named, the large ones marked slow."""
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else [])
        for case in cases
    ]


def case_named(name: str, **changes: Any) -> Case:
    """The case of that name, with some fields changed."""
    return replace(next(case for case in CASES if case.name == name), **changes)


def raw(args: Sequence[Tensor], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Kwargs]:
    """A call of ae.attention as arguments of torch.ops.attention_ext.attention."""
    options = dict(kwargs)
    offset = options.pop("query_offset", 0)
    left, right = options.pop("window", None) or (None, None)
    tensors = {
        **{name: options.pop(name, None) for name in ("attn_mask", "attn_bias", "key_mask")},
        **{name: options.pop(name, None) for name in ("sinks", "alibi_slopes")},
        "query_offsets": offset if isinstance(offset, Tensor) else None,
        "cu_seqlens_q": options.pop("cu_seqlens_q", None),
        "cu_seqlens_k": options.pop("cu_seqlens_k", None),
        "rng_state": options.pop("rng_state", None),
    }
    options["query_offset"] = 0 if isinstance(offset, Tensor) else offset
    options.update(window_left=left, window_right=right)
    return (*args, *tensors.values()), options


def raw_packed(args: Sequence[Tensor], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Kwargs]:
    """A call of ae.varlen_attention as arguments of torch.ops.attention_ext.attention."""
    *tensors, borders_q, borders_k = args
    options = {**kwargs, "cu_seqlens_q": borders_q, "cu_seqlens_k": borders_k}
    if "key_mask" in options:
        options["key_mask"] = options["key_mask"].unsqueeze(0)
    return raw([x.transpose(0, 1).unsqueeze(0) for x in tensors], options)


def differentiable(args: Sequence[Tensor], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a call that have a gradient, by name, in the op's order."""
    named = dict(zip(("query", "key", "value"), args, strict=False))
    return {**named, **{name: kwargs[name] for name in DIFFERENTIABLE if name in kwargs}}


def upcast(
    args: Sequence[Tensor], kwargs: Mapping[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[tuple[Tensor, ...], Kwargs]:
    """The same call on copies in another dtype: new leaves where the old ones require grad."""

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.detach().to(dtype, copy=True).requires_grad_(x.requires_grad)

    return tuple(copied(x) for x in args), {name: copied(x) for name, x in kwargs.items()}


def evaluate(
    function: Callable[..., Any],
    args: Sequence[Tensor],
    kwargs: Mapping[str, Any],
    seed: int = 0,
    shift: float = 0.0,
    **more: Any,
) -> dict[str, Tensor]:
    """Calls, and goes backward if anything requires grad: results and gradients by name.

    Every result gets an incoming gradient drawn from the seed, around `shift`, the same one in
    every dtype; rows whose logsumexp is -inf get none through it.
    """
    outputs = function(*args, **kwargs, **more)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    names = ["out"]
    names += ["lse"] if more.get("return_lse") else []
    names += ["weights"] if more.get("return_weights") else []
    results = dict(zip(names, outputs, strict=True))
    leaves = {n: x for n, x in differentiable(args, kwargs).items() if x.requires_grad}
    if leaves:
        random = torch.Generator().manual_seed(seed)
        incoming = []
        for name, x in results.items():
            drawn = torch.randn(x.shape, generator=random, dtype=torch.float64).to(x.device)
            # Drawn numbers are short enough for 16 bits, so that every dtype gets the same ones.
            drawn = (drawn * 32).round() / 32 + shift
            if name == "lse":
                drawn = drawn.masked_fill(x.isinf(), 0)
            incoming.append(drawn.to(x.dtype))
        gradients = torch.autograd.grad(
            list(results.values()), list(leaves.values()), incoming, allow_unused=True
        )
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            results[f"grad_{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: x.detach() for name, x in results.items()}


def truth_and_plain(
    args: Sequence[Tensor],
    kwargs: Mapping[str, Any],
    function: Callable[..., Any] = reference.attention,
    **more: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What `evaluate` gives in float64, and in plain dense attention of the call's own dtype.

    The plain logsumexp is computed in float32 for 16-bit inputs, since that is its dtype. One
    thread is faster at these sizes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _truth_and_plain(args, kwargs, function, **more)
    finally:
        torch.set_num_threads(threads)


def _truth_and_plain(
    args: Sequence[Tensor],
    kwargs: Mapping[str, Any],
    function: Callable[..., Any],
    shift: float = 0.0,
    **more: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    dtype = args[0].dtype
    truth, plain = (
        evaluate(f, *upcast(args, kwargs, to), shift=shift, **more)
        for f, to in ((function, torch.float64), (partial(function, compute_dtype=dtype), dtype))
    )
    if "lse" in plain and dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad():
            wide = function(*args, **kwargs, **more, compute_dtype=torch.float32)
        plain["lse"] = wide[1]
    return truth, plain


def assert_accurate(
    ours: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    label: str = "",
    serial: bool = False,
) -> None:
    """Every result's error against float64 is a small multiple of plain dense attention's.

    16 bits: 2 times the largest, 1.5 times the RMS error. float32: 4 and 3 times (its sums run in
    another order than a matrix product's), 8 times the largest if they are `serial`: of a thousand
    numbers, one after the other. float64: 2e-12 of the largest number. Rounding the exact result
    once is always allowed. Infinities must be where the truth has them, NaN nowhere else.
    """
    assert ours.keys() == truth.keys()
    for name, want in truth.items():
        got = ours[name]
        assert got.shape == want.shape, f"{label} {name}: {got.shape}, not {want.shape}"
        problem = inaccuracy(got, want, plain[name], serial)
        assert not problem, f"{label} {name} ({got.dtype}): {problem}"


def inaccuracy(got: Tensor, want: Tensor, plain: Tensor, serial: bool = False) -> str:
    """Empty if `got` is as accurate as it should be, else what is wrong with it."""
    dtype, got, plain = got.dtype, got.double(), plain.double()
    odd = ~want.isfinite()
    if not torch.equal(got[odd].nan_to_num(7), want[odd].nan_to_num(7)):
        return "NaN or infinity is not where float64 has it"
    if not got[~odd].isfinite().all():
        return f"{int((~got[~odd].isfinite()).sum())} numbers of {got.numel()} are not finite"
    if odd.all():
        return ""
    error, usual = (got - want)[~odd].abs(), (plain - want)[~odd].abs()
    usual = usual[usual.isfinite()]  # plain attention may overflow where ours must not
    top = float(want[~odd].abs().max())
    eps = torch.finfo(dtype).eps
    if dtype == torch.float64:
        limit, rms_limit = 2e-12 * max(top, 1e-3), torch.inf
    else:
        times, rms_times, floor = (2, 1.5, 0.75)
        if dtype == torch.float32:
            times, rms_times, floor = (8 if serial else 4, 3, 4)
        smallest = torch.finfo(dtype).smallest_normal * eps  # a float16 result may be subnormal
        limit = times * float(usual.max() if usual.numel() else 0) + floor * eps * top + smallest
        rms_limit = rms_times * _rms(usual) + floor * eps * _rms(want[~odd]) + smallest
    if float(error.max()) > limit:
        return f"largest error {float(error.max()):.3g} > {limit:.3g} (largest number {top:.3g})"
    if _rms(error) > rms_limit:
        return f"RMS error {_rms(error):.3g} > {rms_limit:.3g} (largest number {top:.3g})"
    return ""


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def gradients_with_dead_rows(op: Callable[..., Any], rows: int, arrives: float) -> list[Tensor]:
    """Of query, key, value, bias and sinks, where batch element 1 sees no key and `arrives` is what
    arrives for its outputs and weights."""
    generator = torch.Generator().manual_seed(rows)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    leaves = [numbers(2, 2, rows, 8), numbers(2, 2, 130, 8), numbers(2, 2, 130, 8)]
    leaves += [numbers(1, 2, rows, 130), numbers(2)]
    for x in leaves:
        x.requires_grad_()
    mask = torch.tensor([[True], [False]]).expand(2, 130)
    q, k, v, bias, sinks = leaves
    options = {"key_mask": mask, "attn_bias": bias, "sinks": sinks}
    out, lse, weights = op(q, k, v, **options, return_lse=True, return_weights=True)
    incoming = [numbers(*x.shape) for x in (out, lse, weights)]
    incoming[0][1] = incoming[2][1] = arrives
    return list(torch.autograd.grad((out, lse, weights), leaves, incoming))
