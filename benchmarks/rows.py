"""The rows of the benchmark: name, work, floor. Fixed shapes, layouts and seeds.

A floor is the least ratio (torch's time over ours) that counts as good enough. A call that takes
torch less than SMALL_CALL seconds has a floor of its own: there the fixed cost of a call is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.work import Direction, Mask, ModuleStep, Work

FLOOR = 0.95
FLOOR_SMALL_CALL = 0.6
FLOOR_DROPOUT = 2.0
FLOOR_16_BIT_BACKWARD = 2.0
FLOOR_LEARNED_BIAS = 1.3
SMALL_CALL = 20e-6

FULL_AND_CAUSAL: tuple[Mask, ...] = ("full", "causal")
BOTH: tuple[Direction, ...] = ("fwd", "bwd")
DENSE: tuple[Mask, ...] = ("bool", "float", "padding")


@dataclass(frozen=True)
class Row:
    name: str
    work: Work | ModuleStep
    floor: float = FLOOR


def all_rows() -> list[Row]:
    """Every row, in the order of the report."""
    return [
        *_plain(),
        *_masks(),
        *_backward(),
        *_dropout_and_bias(),
        *_small_and_decode(),
        *_dtypes(),
        *_shapes(),
        *_modules(),
    ]


def _plain() -> list[Row]:
    return [
        Row(
            f"fp32 fwd {mask} D{e} S{s}",
            Work(L=s, E=e, mask=mask),
        )
        for mask in FULL_AND_CAUSAL
        for e in (64, 128)
        for s in (512, 1024, 2048)
    ]


def _masks() -> list[Row]:
    rows = [
        Row("fp32 fwd bool mask D64 S1024", Work(L=1024, mask="bool")),
        Row("fp32 fwd float mask D64 S1024", Work(L=1024, mask="float")),
        Row("fp32 fwd padding half D64 S1024", Work(L=1024, mask="padding")),
        Row("fp32 fwd window 127,0 D64 S4096", Work(L=4096, mask="window", window=127)),
    ]
    for mask in DENSE:
        work = Work(L=1024, mask=mask, direction="bwd")
        rows.append(Row(f"fp32 bwd {mask} D64 S1024", work))
    return rows


def _backward() -> list[Row]:
    rows = [
        Row(
            f"fp32 bwd {mask} D{e} S{s}",
            Work(L=s, E=e, mask=mask, direction="bwd"),
        )
        for mask in FULL_AND_CAUSAL
        for e in (64, 128)
        for s in (577, 1024)
    ]
    for direction in BOTH:
        work = Work(B=1, H=1, L=2048, direction=direction)
        rows.append(Row(f"fp32 {direction} one head D64 S2048", work))
    return rows


def _dropout_and_bias() -> list[Row]:
    return [
        Row("fp32 fwd dropout 0.1 D64 S1024", Work(L=1024, dropout=0.1), FLOOR_DROPOUT),
        Row(
            "fp32 fwd+bwd dropout 0.1 D64 S1024",
            Work(L=1024, dropout=0.1, direction="fwd+bwd"),
            FLOOR_DROPOUT,
        ),
        Row(
            "fp32 fwd+bwd learned bias (1,H,L,S) D64 S512",
            Work(L=512, learned_bias=True, direction="fwd+bwd"),
            FLOOR_LEARNED_BIAS,
        ),
        Row(
            "fp32 bwd learned bias (1,H,L,S) D64 S1024",
            Work(L=1024, learned_bias=True, direction="bwd"),
            FLOOR_LEARNED_BIAS,
        ),
    ]


def _small_and_decode() -> list[Row]:
    rows = [
        Row(f"fp32 {direction} B{b} H{h} S{s} D64", Work(B=b, H=h, L=s, direction=direction))
        for b, h, s in ((8, 12, 128), (64, 8, 32))
        for direction in BOTH
    ]
    decode = {
        "decode 32 heads S4096 D128": Work(B=1, H=32, L=1, S=4096, E=128),
        "decode 2 heads S16384 D128": Work(B=1, H=2, L=1, S=16384, E=128),
        "decode 32 heads grouped 8:1 S4096 D128": Work(B=1, H=32, Hkv=4, L=1, S=4096, E=128),
        "smallest call B1 H1 L1 S1 D8": Work(B=1, H=1, L=1, E=8),
        "small call B1 H4 S16 D32": Work(B=1, H=4, L=16, E=32),
    }
    return rows + [Row(f"fp32 fwd {name}", work) for name, work in decode.items()]


def _dtypes() -> list[Row]:
    rows: list[Row] = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for mask in FULL_AND_CAUSAL:
            forward = Work(L=1024, dtype=dtype, mask=mask)
            backward = Work(L=1024, dtype=dtype, mask=mask, direction="bwd")
            rows.append(Row(f"{name} fwd {mask} D64 S1024", forward))
            rows.append(Row(f"{name} bwd {mask} D64 S1024", backward, FLOOR_16_BIT_BACKWARD))
    for direction in BOTH:
        work = Work(L=512, dtype=torch.float64, direction=direction)
        rows.append(Row(f"fp64 {direction} full D64 S512", work))
    return rows


def _shapes() -> list[Row]:
    rows = [Row(f"fp32 fwd full D{e} S577", Work(L=577, E=e)) for e in (40, 72, 80, 96, 200, 256)]
    rows += [Row(f"fp32 bwd full D{e} S577", Work(L=577, E=e, direction="bwd")) for e in (80, 256)]
    return [
        *rows,
        Row("fp32 fwd full D64 S1500", Work(L=1500)),
        Row("fp32 fwd full D64 S1024 transposed heads", Work(L=1024, transposed=True)),
        Row(
            "fp32 bwd full D64 S1024 transposed heads",
            Work(L=1024, transposed=True, direction="bwd"),
        ),
    ]


def _modules() -> list[Row]:
    return [
        Row(
            f"module train step E512 H8 B4 S512 need_weights={need_weights}",
            ModuleStep(need_weights=need_weights),
        )
        for need_weights in (True, False)
    ]
