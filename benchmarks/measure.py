"""Timing of one row: both sides in one process, one after the other within every repetition.

A neighbour on the machine then slows both sides alike, and the ratio is taken repetition by
repetition. The machine's own multiply-add peak is measured right before the row,
for the same reason.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.rows import FLOOR_SMALL_CALL, SMALL_CALL, Row
from benchmarks.work import Call, Prepared

SAMPLE = 2e-3  # a sample repeats a short call until it takes about this many seconds


@dataclass(frozen=True)
class Result:
    """Seconds a call; ratios are torch's time over ours, so more than 1 is faster than torch."""

    name: str
    spelling: str
    ours_best: float
    ours_median: float
    torch_best: float
    torch_median: float
    ratio: float
    ratio_low: float
    ratio_high: float
    ratio_of_bests: float
    floor: float
    gflops: float
    torch_gflops: float
    peak_gflops: float | None
    repetitions: int

    @property
    def passed(self) -> bool:
        return self.ratio >= self.floor

    @property
    def percent_of_peak(self) -> float | None:
        return 100 * self.gflops / self.peak_gflops if self.peak_gflops else None

    @property
    def torch_percent_of_peak(self) -> float | None:
        return 100 * self.torch_gflops / self.peak_gflops if self.peak_gflops else None

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "passed": self.passed, "percent_of_peak": self.percent_of_peak}


class Mismatch(RuntimeError):
    """The two sides of a row do not compute the same thing."""


def fma_peak(threads: int, double: bool) -> float | None:
    """GFLOP/s of the machine's multiply-adds now, or None where the library cannot tell."""
    probe = getattr(torch.ops.attention_ext, "_fma_peak", None)
    return float(probe(threads, double)) if probe is not None else None


def measure(row: Row, *, seconds: float, threads: int) -> Result:
    """Times one row for about `seconds`, at least three repetitions."""
    prepared = row.work.prepare()
    _check_same(row.name, prepared)
    spelling, theirs = _fastest(prepared.torch)
    ours = prepared.ours
    peak = fma_peak(threads, double=row.work.dtype == torch.float64)

    ours_count, theirs_count = _count(ours), _count(theirs)
    pairs: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        while len(pairs) < 3 or (time.perf_counter() < end and len(pairs) < 200):
            if len(pairs) % 2:  # either side goes first equally often
                second = _sample(theirs, theirs_count)
                pairs.append((_sample(ours, ours_count), second))
            else:
                first = _sample(ours, ours_count)
                pairs.append((first, _sample(theirs, theirs_count)))
    finally:
        gc.enable()

    mine, other = zip(*pairs, strict=True)
    ratios = sorted(b / a for a, b in pairs)
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    small = statistics.median(other) < SMALL_CALL
    return Result(
        name=row.name,
        spelling=spelling,
        ours_best=min(mine),
        ours_median=statistics.median(mine),
        torch_best=min(other),
        torch_median=statistics.median(other),
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
        ratio_of_bests=min(other) / min(mine),
        floor=FLOOR_SMALL_CALL if small else row.floor,
        gflops=prepared.flops / statistics.median(mine) / 1e9,
        torch_gflops=prepared.flops / statistics.median(other) / 1e9,
        peak_gflops=peak,
        repetitions=len(pairs),
    )


def _sample(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _count(call: Call) -> int:
    """How many calls make up a sample."""
    call()
    once = min(_sample(call, 1) for _ in range(3))
    return max(1, round(SAMPLE / once))


def _fastest(spellings: dict[str, Call]) -> tuple[str, Call]:
    """The spelling of torch's side that takes the least time."""
    if len(spellings) == 1:
        return next(iter(spellings.items()))
    times = {}
    for name, call in spellings.items():
        call()
        times[name] = min(_sample(call, _count(call)) for _ in range(3))
    best = min(times, key=times.__getitem__)
    return best, spellings[best]


def _check_same(name: str, prepared: Prepared) -> None:
    """Every spelling gives our result, to the accuracy of the dtype."""
    ours = _tensors(prepared.ours())
    for spelling, call in prepared.torch.items():
        theirs = _tensors(call())
        if len(ours) != len(theirs) or any(a.shape != b.shape for a, b in zip(ours, theirs)):  # noqa: B905
            raise Mismatch(f"{name}: ours and {spelling} return different shapes")
        for a, b in zip(ours, theirs, strict=True):
            scale = b.abs().max().item()
            allowed = {torch.float64: 1e-9, torch.float32: 1e-3}.get(b.dtype, 3e-2)
            difference = (a.double() - b.double()).abs().max().item()
            if prepared.comparable and not difference <= allowed * max(scale, 1e-30):
                raise Mismatch(
                    f"{name}: ours and {spelling} differ by {difference:.2e}, {scale=:.2e}"
                )


def _tensors(result: object) -> list[Tensor]:
    found = [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]
    return [x.detach() for x in found]
