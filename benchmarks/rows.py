"""The rows of the benchmark: name, work, what it must reach and what it aims at.

Fixed shapes, layouts and seeds. `must` is a ratio: the other side's time over ours. `aim` is a
share of a limit measured beside the row: the multiply-add peak, the memory's read bandwidth, or the
time of another piece of our own work. Where no such limit says much, `aim_ratio` is a ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.others import FlexAttention, JaxAttention, Kind, OnnxRuntime
from benchmarks.work import Attention, Direction, ModuleStep, RawCall, TwoThreads, Work
from cases import Case

BOTH: tuple[Direction, ...] = ("fwd", "bwd")
NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
FLEX: tuple[tuple[Kind, int, float, float], ...] = (
    ("full", 1024, 1.3, 1.6),
    ("causal", 1024, 1.7, 2.2),
    ("window", 4096, 2.0, 2.8),
)
HAS_BF16 = torch.cpu._is_avx512_bf16_supported()

Limit = Literal["peak", "bandwidth"] | Work
PEAK: Limit = "peak"


@dataclass(frozen=True)
class Row:
    name: str
    work: Work
    must: float = 1.0
    aim: float | None = None  # percent of the limit
    limit: Limit = PEAK
    limit_name: str = "peak"
    aim_ratio: float | None = None
    other: str = "torch"


def row(
    what: str,
    direction: Direction = "fwd",
    *,
    L: int,
    S: int | None = None,
    E: int = 64,
    B: int = 2,
    H: int = 8,
    dtype: torch.dtype = torch.float32,
    learned_bias: bool = False,
    must: float = 1.0,
    aim: float | None = None,
    aim_ratio: float | None = None,
    beside: str = "",
    **options: Any,
) -> Row:
    """A row named after its type, direction, `what`, and sizes; `options` are those of Case.

    `beside` names the work that sets the limit: "none", the same without options; "fp32", the same
    in float32; "bandwidth".
    """
    keys = L if S is None else S
    name = f"{NAMES[dtype]} {direction} {what} D{E} S{keys}"

    def attention(dtype: torch.dtype, **options: Any) -> Attention:
        case = Case(name, L, keys, E, batch=(B,), heads=H, hidden_bias=False, **options)
        return Attention(case, dtype, direction, learned_bias and "bias" in options)

    limits: dict[str, Limit] = {"": PEAK, "bandwidth": "bandwidth"}
    limits["none"] = attention(dtype)
    limits["fp32"] = attention(torch.float32, **options)
    names = {"": "peak", "bandwidth": "bandwidth", "none": "no option", "fp32": "our fp32"}
    return Row(
        name,
        attention(dtype, **options),
        must,
        aim,
        limits[beside],
        names[beside],
        aim_ratio,
    )


def all_rows() -> list[Row]:
    """Every row, in the order of the report."""
    return [
        *_plain(),
        *_masks(),
        *_dropout_and_bias(),
        *_small_and_decode(),
        *_dtypes(),
        *_shapes(),
        *_modules(),
        *_others(),
        *_threads(),
    ]


def _plain() -> list[Row]:
    causal: dict[str, Any] = {"is_causal": True}
    return [
        *(row("full", L=s, must=1.15, aim=88) for s in (512, 1024, 2048)),
        *(row("full", L=s, E=128, must=1.08, aim=90) for s in (512, 1024, 2048)),
        row("causal", L=1024, must=1.5, aim=80, **causal),
        row("causal", L=2048, must=1.35, aim=84, **causal),
        *(row("causal", L=s, E=128, must=1.3, aim=84, **causal) for s in (1024, 2048)),
        row("full", "bwd", L=577, must=1.3, aim=85),
        row("full", "bwd", L=1024, must=1.3, aim=90),
        row("full", "bwd", L=1024, E=128, must=1.15, aim=90),
        row("causal", "bwd", L=577, must=1.3, aim=85, **causal),
        row("causal", "bwd", L=1024, must=1.6, aim=87, **causal),
        row("causal", "bwd", L=1024, E=128, must=1.4, aim=88, **causal),
        row("one head", L=2048, B=1, H=1, must=1.1, aim=87),
        row("one head", "bwd", L=2048, B=1, H=1, must=1.4, aim=90),
        row("one head causal", "bwd", L=2048, B=1, H=1, must=1.6, aim=85, **causal),
    ]


def _masks() -> list[Row]:
    return [
        row("bool mask", L=1024, must=1.25, aim=100 / 1.07, beside="none", mask="LS"),
        row("float mask", L=1024, must=1.15, aim=100 / 1.09, beside="none", bias="LS"),
        row("padding half", L=1024, must=2.2, aim=100 / 0.53, beside="none", key_mask="bool"),
        row("padding half", "bwd", L=1024, must=2.2, beside="none", key_mask="bool"),
        row("window 127,0", L=4096, must=10, aim_ratio=16, window=(127, 0)),
    ]


def _dropout_and_bias() -> list[Row]:
    dropout, bias = "dropout 0.1", "learned bias (1,H,L,S)"
    p: dict[str, Any] = {"dropout_p": 0.1, "beside": "none"}
    learned: dict[str, Any] = {"bias": "1HLS", "learned_bias": True}
    return [
        row(dropout, L=1024, must=4, aim=100 / 1.12, **p),
        row(dropout, "fwd+bwd", L=1024, must=3, aim=100 / 1.15, **p),
        *(row(bias, "fwd+bwd", L=s, must=1.8, aim_ratio=2.3, **learned) for s in (512, 1024)),
    ]


def _small_and_decode() -> list[Row]:
    decode: dict[str, Any] = {"L": 1, "E": 128, "B": 1, "must": 1.6, "aim": 85}
    decode["beside"] = "bandwidth"
    small: dict[str, Any] = {"L": 8, "E": 8, "B": 1, "H": 1, "must": 0.7, "aim_ratio": 0.9}
    both: tuple[Direction, ...] = ("fwd", "fwd+bwd")
    return [
        *(row("B8 H12", d, L=128, B=8, H=12, must=1.4, aim=75) for d in BOTH),
        *(row("B64 H8", d, L=32, B=64, must=1.5, aim=55) for d in BOTH),
        row("decode 32 heads", S=4096, H=32, **decode),
        row("decode 2 heads", S=16384, H=2, **decode),
        row("decode 32 heads grouped 8:1", S=4096, H=32, kv_heads=4, **decode),
        *(
            Row(f"fp32 {d} smallest call, raw op D8 S8", RawCall(d), 0.95, aim_ratio=1.1)
            for d in both
        ),
        *(row("smallest call", d, **small) for d in both),
    ]


def _dtypes() -> list[Row]:
    bf16, fp16, fp64 = torch.bfloat16, torch.float16, torch.float64
    aims = (170, 170) if HAS_BF16 else (96, 93)
    half: dict[str, Any] = {"L": 1024, "beside": "fp32"}
    return [
        row("full", dtype=bf16, must=1.2 if HAS_BF16 else 1.05, aim=aims[0], **half),
        row("full", "bwd", dtype=bf16, must=5, aim=aims[1], **half),
        row("full", dtype=fp16, must=1.6, aim=96, **half),
        row("full", "bwd", dtype=fp16, must=9, aim=93, **half),
        row("full", L=512, dtype=fp64, must=1.4, aim=78),
        row("full", "bwd", L=512, dtype=fp64, must=1.4, aim=80),
    ]


def _shapes() -> list[Row]:
    return [
        *(row("odd sizes", L=577, E=e, aim=80) for e in (40, 72, 80, 96, 200, 256)),
        *(row("odd sizes", "bwd", L=577, E=e, aim=80) for e in (80, 256)),
        row("odd length", L=1500, aim=80),
        *(row("transposed heads", d, L=1024, layout="heads_last", aim=80) for d in BOTH),
    ]


def _modules() -> list[Row]:
    name = "module train step E512 H8 B4 S512 need_weights="
    goals = {True: (1.15, 1.4), False: (1.05, 1.2)}
    return [
        Row(f"{name}{wanted}", ModuleStep(wanted), must, aim_ratio=aim)
        for wanted, (must, aim) in goals.items()
    ]


def _others() -> list[Row]:
    onnx, flex = "ONNX Runtime MultiHeadAttention", "compiled FlexAttention"
    return [
        Row(f"{onnx} full D64 S1024", OnnxRuntime(), 1.02, aim_ratio=1.12, other="ONNX Runtime"),
        *(
            Row(
                f"{flex} {kind} D64 S{s}", FlexAttention(kind, s), must, aim_ratio=aim, other="Flex"
            )
            for kind, s, must, aim in FLEX
        ),
        Row("jitted JAX full D64 S1024", JaxAttention(), 3, aim_ratio=4.5, other="JAX"),
    ]


def _threads() -> list[Row]:
    """Two threads against one: of our own time."""
    pieces = {
        "fwd full D64 S1024": row("", L=1024),
        "bwd causal D64 S1024": row("", "bwd", L=1024, is_causal=True),
        "bwd one head D64 S2048": row("", "bwd", L=2048, B=1, H=1),
    }
    return [
        Row(f"fp32 two threads, {name}", TwoThreads(piece.work), 1.9, other="one thread")
        for name, piece in pieces.items()
        if isinstance(piece.work, Attention)
    ]
