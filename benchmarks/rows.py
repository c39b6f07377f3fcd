"""The rows of the benchmark: name, work, floor. Fixed shapes, layouts and seeds.

A floor is the least ratio (torch's time over ours) that counts as good enough. A call that takes
torch less than SMALL_CALL seconds has a floor of its own: it measures the fixed cost of a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.work import Attention, Direction, ModuleStep
from cases import Case

FLOOR = 0.95
FLOOR_SMALL_CALL = 0.6
FLOOR_DROPOUT = 2.0
FLOOR_16_BIT_BACKWARD = 2.0
FLOOR_LEARNED_BIAS = 1.3
SMALL_CALL = 20e-6

BOTH: tuple[Direction, ...] = ("fwd", "bwd")
NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@dataclass(frozen=True)
class Row:
    name: str
    work: Attention | ModuleStep
    floor: float = FLOOR


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
    floor: float = FLOOR,
    **options: Any,
) -> Row:
    """A row named after its type, direction, `what`, and sizes; `options` are those of Case."""
    keys = L if S is None else S
    name = f"{NAMES[dtype]} {direction} {what} D{E} S{keys}"
    case = Case(name, L, keys, E, batch=(B,), heads=H, hidden_bias=False, **options)
    return Row(name, Attention(case, dtype, direction, learned_bias), floor)


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
    ]


def _kind(causal: bool) -> str:
    return "causal" if causal else "full"


def _plain() -> list[Row]:
    sizes: dict[Direction, tuple[int, ...]] = {"fwd": (512, 1024, 2048), "bwd": (577, 1024)}
    rows = [
        row(_kind(causal), direction, L=s, E=e, is_causal=causal)
        for direction in BOTH
        for causal in (False, True)
        for e in (64, 128)
        for s in sizes[direction]
    ]
    return rows + [row("one head", direction, L=2048, B=1, H=1) for direction in BOTH]


def _masks() -> list[Row]:
    masks: dict[str, dict[str, Any]] = {
        "bool mask": {"mask": "LS"},
        "float mask": {"bias": "LS"},
        "padding half": {"key_mask": "bool"},
    }
    rows = [row(k, direction, L=1024, **mask) for k, mask in masks.items() for direction in BOTH]
    return [*rows, row("window 127,0", L=4096, window=(127, 0))]


def _dropout_and_bias() -> list[Row]:
    dropout, bias = "dropout 0.1", "learned bias (1,H,L,S)"
    learned: dict[str, Any] = {"bias": "1HLS", "learned_bias": True, "floor": FLOOR_LEARNED_BIAS}
    return [
        row(dropout, L=1024, dropout_p=0.1, floor=FLOOR_DROPOUT),
        row(dropout, "fwd+bwd", L=1024, dropout_p=0.1, floor=FLOOR_DROPOUT),
        row(bias, "fwd+bwd", L=512, **learned),
        row(bias, "fwd+bwd", L=1024, **learned),
        row(bias, "bwd", L=1024, **learned),
    ]


def _small_and_decode() -> list[Row]:
    return [
        *(row("B8 H12", direction, L=128, B=8, H=12) for direction in BOTH),
        *(row("B64 H8", direction, L=32, B=64) for direction in BOTH),
        row("decode 32 heads", L=1, S=4096, E=128, B=1, H=32),
        row("decode 2 heads", L=1, S=16384, E=128, B=1, H=2),
        row("decode 32 heads grouped 8:1", L=1, S=4096, E=128, B=1, H=32, kv_heads=4),
        row("smallest call B1 H1", L=1, E=8, B=1, H=1),
        row("small call B1 H4", L=16, E=32, B=1, H=4),
    ]


def _dtypes() -> list[Row]:
    half = [
        row(
            _kind(causal),
            direction,
            L=1024,
            dtype=dtype,
            is_causal=causal,
            floor=FLOOR_16_BIT_BACKWARD if direction == "bwd" else FLOOR,
        )
        for dtype in (torch.bfloat16, torch.float16)
        for direction in BOTH
        for causal in (False, True)
    ]
    return half + [row("full", direction, L=512, dtype=torch.float64) for direction in BOTH]


def _shapes() -> list[Row]:
    return [
        *(row("odd sizes", L=577, E=e) for e in (40, 72, 80, 96, 200, 256)),
        *(row("odd sizes", "bwd", L=577, E=e) for e in (80, 256)),
        row("odd length", L=1500),
        *(row("transposed heads", direction, L=1024, layout="heads_last") for direction in BOTH),
    ]


def _modules() -> list[Row]:
    name = "module train step E512 H8 B4 S512 need_weights="
    return [Row(f"{name}{wanted}", ModuleStep(wanted)) for wanted in (True, False)]
