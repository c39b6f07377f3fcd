"""Timing of one row: all sides in one process, one after the other within every repetition.

A neighbour on the machine then slows all sides alike. The limit of a row is measured there, too:
the multiply-add peak, the memory's read bandwidth, or the time of another piece of our work.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.rows import Row
from benchmarks.work import Call, Prepared

SAMPLE = 2e-3  # a sample repeats a short call until it takes about this many seconds
REPETITIONS = 15  # at least, whatever time they take


@dataclass(frozen=True)
class Samples:
    """Seconds a call that a row took, repetition by repetition; `limit` seconds at its limit."""

    spelling: str
    ours: list[float]
    other: list[float]
    limit: float
    flops: float

    def __add__(self, later: Samples) -> Samples:
        """Both as one measurement: the best of either counts."""
        faster = min(self, later, key=lambda samples: min(samples.other))
        return Samples(
            faster.spelling,
            self.ours + later.ours,
            self.other + later.other,
            min(self.limit, later.limit),
            self.flops,
        )


@dataclass(frozen=True)
class Result:
    """Seconds a call; ratios are the other side's time over ours: more than 1 is faster than it."""

    name: str
    other: str
    spelling: str
    ours_best: float
    ours_median: float
    other_best: float
    other_median: float
    ratio: float  # of the best times
    ratio_median: float  # the median over repetitions, and its quartiles
    ratio_low: float
    ratio_high: float
    must: float
    limit: str
    percent_of_limit: float
    other_percent_of_limit: float
    aim: float | None
    aim_ratio: float | None
    gflops: float
    repetitions: int

    @property
    def passed(self) -> bool:
        return self.ratio >= self.must

    @property
    def reached_aim(self) -> bool:
        if self.aim_ratio is not None:
            return self.ratio >= self.aim_ratio
        return self.aim is None or self.percent_of_limit >= self.aim

    @classmethod
    def of(cls, row: Row, samples: Samples) -> Result:
        mine, other, limit = samples.ours, samples.other, samples.limit
        ratios = [b / a for a, b in zip(mine, other, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(
            name=row.name,
            other=row.other,
            spelling=samples.spelling,
            ours_best=min(mine),
            ours_median=statistics.median(mine),
            other_best=min(other),
            other_median=statistics.median(other),
            ratio=min(other) / min(mine),
            ratio_median=middle,
            ratio_low=low,
            ratio_high=high,
            must=row.must,
            limit=row.limit_name,
            percent_of_limit=100 * limit / min(mine),
            other_percent_of_limit=100 * limit / min(other),
            aim=row.aim,
            aim_ratio=row.aim_ratio,
            gflops=samples.flops / min(mine) / 1e9,
            repetitions=len(mine),
        )

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "passed": self.passed, "reached_aim": self.reached_aim}


class Mismatch(RuntimeError):
    """The two sides of a row do not compute the same thing."""


def fma_peak(threads: int, double: bool) -> float:
    """Floating-point operations a second of bare multiply-adds, in 1e9."""
    return float(torch.ops.attention_ext._fma_peak(threads, double))


def measure(row: Row, *, seconds: float, threads: int) -> Samples:
    """Times one row for about `seconds`, at least fifteen repetitions."""
    prepared = row.work.prepare()
    _check_same(row.name, prepared)
    spelling, theirs = _fastest(prepared.others)
    sides = [_Side(prepared.ours), _Side(theirs)]
    limit_seconds = _limit(row, prepared, threads, sides)

    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        done = 0
        while done < REPETITIONS or (time.perf_counter() < end and done < 200):
            # Each side is first equally often.
            for side in sides if done % 2 else reversed(sides):
                time.sleep(prepared.settle)
                side.sample()
            done += 1
    finally:
        gc.enable()
    return Samples(spelling, sides[0].times, sides[1].times, limit_seconds(), prepared.flops)


class _Side:
    """One closure and the seconds that a call of it took, sample by sample."""

    def __init__(self, call: Call) -> None:
        self.call, self.count = call, _count(call)
        self.times: list[float] = []

    def sample(self) -> None:
        self.times.append(_sample(self.call, self.count))


def _limit(row: Row, prepared: Prepared, threads: int, sides: list[_Side]) -> Callable[[], float]:
    """Seconds that the work would take at its limit, to be asked for after the measurement."""
    if row.limit == "peak":
        double = row.work.dtype == torch.float64
        before = fma_peak(threads, double)
        return lambda: prepared.flops / 1e9 / max(before, fma_peak(threads, double))
    if row.limit == "bandwidth":
        memory = torch.ones(int(prepared.memory) // 4)
        sides.append(_Side(memory.sum))
    else:
        sides.append(_Side(row.limit.prepare().ours))
    return lambda: min(sides[2].times)


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
    """The spelling of the other side that takes the least time."""
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
    for spelling, call in prepared.others.items():
        theirs = _tensors((prepared.check or call)())
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
