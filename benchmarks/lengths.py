"""Time and memory against sequence length: ours, torch's fused attention, plain dense attention.

Training steps of causal attention (B1 H8 D64, float32), forward and backward. Memory is the most
that torch's allocator held during a step, beyond what was there before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import attention_ext as ae

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
DENSE_MOST = 4096  # beyond, dense attention's scores take gigabytes
HEADS, SIZE = 8, 64

Step = Callable[[], object]


@dataclass(frozen=True)
class Point:
    """One side at one length: best seconds of a step, and its peak memory in bytes."""

    side: str
    length: int
    seconds: float
    memory: int


def _ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = ae.attention(query, key, value, is_causal=True)
    assert isinstance(out, Tensor)
    return out


def _dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    length = query.size(-2)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (query @ key.mT * query.size(-1) ** -0.5).masked_fill(future, -torch.inf)
    weights: Tensor = scores.softmax(-1)
    return weights @ value


SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "attention_ext": _ours,
    "torch, fused": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "plain, dense": _dense,
}


def measure_lengths(progress: Callable[[str], object], seconds: float = 0.5) -> list[Point]:
    """Every side at every length, the sides in turn; `progress` is told each length."""
    points: list[Point] = []
    for length in LENGTHS:
        progress(f"length {length}")
        torch.manual_seed(0)
        leaves = [torch.randn(1, HEADS, length, SIZE, requires_grad=True) for _ in range(3)]
        grad = torch.randn(1, HEADS, length, SIZE)
        steps = {
            name: _step(function, leaves, grad)
            for name, function in SIDES.items()
            if function is not _dense or length <= DENSE_MOST
        }
        best = dict.fromkeys(steps, float("inf"))
        end = time.perf_counter() + seconds
        rounds = 0
        while rounds < 5 or (time.perf_counter() < end and rounds < 50):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                best[name] = min(best[name], time.perf_counter() - start)
            rounds += 1
        points += [Point(name, length, best[name], peak_memory(steps[name])) for name in steps]
    return points


def _step(function: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> Step:
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


def peak_memory(step: Step) -> int:
    """The most bytes that torch's CPU allocator held at once during the step."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler prints two lines a use
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    held = most = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def write_lengths_picture(path: Path, points: list[Point]) -> None:
    """Two log-log panels: seconds and bytes of a training step against the length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (time_axis, memory_axis) = plt.subplots(1, 2, figsize=(11, 4.5))
    for side, marker in zip(SIDES, "os^", strict=True):
        mine = [point for point in points if point.side == side]
        lengths = [point.length for point in mine]
        time_axis.plot(lengths, [1e3 * p.seconds for p in mine], marker=marker, label=side)
        memory_axis.plot(lengths, [p.memory / 2**20 for p in mine], marker=marker, label=side)
    time_axis.set_ylabel("milliseconds of a training step")
    memory_axis.set_ylabel("MiB held at its peak")
    for axis in (time_axis, memory_axis):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
        axis.set_xlabel("sequence length")
        axis.grid(alpha=0.3, which="both")
        axis.legend()
    figure.suptitle(
        f"Causal attention, B1 H{HEADS} D{SIZE} float32, forward and backward, "
        f"{torch.get_num_threads()} threads"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
