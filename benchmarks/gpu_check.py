"""The parts of gpu_check.sh that run Python on a GPU.

    python -m benchmarks.gpu_check small               small calls of every kernel, for a sanitizer
    python -m benchmarks.gpu_check speed --out FOLDER  against each backend of torch's, pinned

Needs a CUDA device and a build with CUDA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention_ext as ae
from cases import CASES, DTYPES, PACKED_CASES, Case, evaluate

# ---- Small calls --------------------------------------------------------------------------------

SMALL = ("odd", "unbatched", "grouped", "mask_of_batch", "bias_of_heads", "bias_full", "everything")
SMALL_PACKED = ("packed_causal", "packed_everything")


def run_small() -> None:
    """Forward, backward and weights of small cases in every dtype, on both paths of 16 bits."""
    tuned = [
        Case("tuned_64", 97, 130, 64, mask="B1LS", bias="1HLS", dropout_p=0.2),
        Case("tuned_128", 65, 70, 128, batch=(1,), is_causal=True),
        Case("tuned_256", 33, 70, 256, batch=(1,), key_mask="bool"),
    ]
    count = 0
    for dtype in DTYPES:
        for case in [*(c for c in CASES if c.name in SMALL), *tuned]:
            args, kwargs = case.make(dtype, "cuda", requires_grad=True)
            for how in (False, True):
                evaluate(ae.attention, args, kwargs, return_lse=True, return_weights=how)
            count += 1
        for packed in PACKED_CASES:
            if packed.name in SMALL_PACKED:
                tensors, kwargs = packed.make(dtype, "cuda", requires_grad=True)
                evaluate(ae.varlen_attention, tensors, kwargs, return_lse=True)
                count += 1
    torch.cuda.synchronize()
    print(f"{count} cases ran")


# ---- Speed --------------------------------------------------------------------------------------

Kind = Literal["plain", "causal", "mask", "bias", "learned bias"]
KINDS: tuple[Kind, ...] = ("plain", "causal", "mask", "bias", "learned bias")
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Row:
    """One shape: 16,384 tokens and 2,048 features, as the papers of flash attention have it."""

    kind: Kind
    size: int
    length: int
    dtype: str = "bfloat16"

    @property
    def heads(self) -> int:
        return 2048 // self.size

    @property
    def batch(self) -> int:
        return max(1, 16384 // self.length)

    def flops(self, backward: bool) -> float:
        """Two products forward, five backward; half of them if causal. A mask hides nothing."""
        pairs = self.batch * self.heads * self.length**2 / (2 if self.kind == "causal" else 1)
        return (10 if backward else 4) * pairs * self.size


@dataclass
class Timing:
    """Median milliseconds of one side, or why it did not run."""

    row: Row
    side: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    refused: str = ""

    @property
    def forward_tflops(self) -> float | None:
        return self.row.flops(False) / self.forward_ms * 1e-9 if self.forward_ms else None

    @property
    def backward_tflops(self) -> float | None:
        return self.row.flops(True) / self.backward_ms * 1e-9 if self.backward_ms else None


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def median_ms(call: Callable[[], object], budget: float = 0.15, least: int = 5) -> float:
    """Median over single calls between CUDA events, after a warm-up."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.monotonic() + budget
    while len(times) < least or (time.monotonic() < end and len(times) < 50):
        before, after = _event(), _event()
        before.record()
        call()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    return statistics.median(times)


def measure(row: Row) -> Iterator[Timing]:
    """Ours, then each of torch's backends on the same numbers."""
    torch.manual_seed(0)
    dtype = getattr(torch, row.dtype)
    shape = (row.batch, row.heads, row.length, row.size)
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    causal, mask = row.kind == "causal", None
    if row.kind == "mask":
        mask = torch.rand(row.batch, 1, row.length, row.length, device="cuda") > 0.1
    elif "bias" in row.kind:
        mask = torch.randn(1, row.heads, row.length, row.length, device="cuda", dtype=dtype)
    if row.kind == "learned bias" and mask is not None:
        leaves.append(mask.requires_grad_())

    def ours() -> Tensor:
        return ae.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)

    yield timed(Timing(row, "ours"), ours, leaves, grad)
    for name, backend in BACKENDS.items():
        if name == "math" and row.length > 4096:
            continue  # its scores would fill the memory
        with sdpa_kernel(backend):
            yield timed(Timing(row, name), theirs, leaves, grad)


def timed(timing: Timing, call: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> Timing:
    """Fills the times; a side that refuses the call says why."""
    try:
        with torch.no_grad():
            timing.forward_ms = median_ms(call)
        out = call()
        timing.backward_ms = median_ms(
            lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)
        )
    except (RuntimeError, torch.OutOfMemoryError) as error:
        timing.refused = str(error).splitlines()[0]
        torch.cuda.empty_cache()
    return timing


def run_speed(out: Path, seconds: float) -> None:
    """Writes speed.json and speed.md; rows that the time does not allow are named."""
    rows = [Row(kind, d, n) for n in (1024, 4096, 16384) for d in (64, 128) for kind in KINDS]
    rows = [r for r in rows if r.length < 16384 or r.kind in ("plain", "causal")]
    end = time.monotonic() + seconds
    found: list[Timing] = []
    left: list[Row] = []
    for row in rows:
        if time.monotonic() > end:
            left.append(row)
            continue
        found += measure(row)
        write(out, found, left)
        print(lines(found[-1 - len(BACKENDS) :])[-1], flush=True)
    write(out, found, left)
    print(f"{len(rows) - len(left)} of {len(rows)} rows measured")


def lines(found: list[Timing]) -> list[str]:
    def number(x: float | None) -> str:
        return "" if x is None else f"{x:.0f}"

    return [
        f"| {t.row.kind} | {t.row.size} | {t.row.length} | {t.side} | {number(t.forward_tflops)} "
        f"| {number(t.backward_tflops)} | {t.refused} |"
        for t in found
    ]


def write(out: Path, found: list[Timing], left: list[Row]) -> None:
    device = torch.cuda.get_device_properties(0)
    about = f"{device.name}, torch {torch.__version__}, bfloat16, TFLOP/s (forward, backward)"
    head = [
        "| kind | D | S | side | forward | backward | refused |",
        "|---|---|---|---|---|---|---|",
    ]
    text = [about, "", *head, *lines(found)]
    text += ["", *(f"not measured, no time: {row}" for row in left)]
    (out / "speed.md").write_text("\n".join(text) + "\n")
    data = [
        {**asdict(t), "forward_tflops": t.forward_tflops, "backward_tflops": t.backward_tflops}
        for t in found
    ]
    (out / "speed.json").write_text(json.dumps({"device": device.name, "rows": data}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["small", "speed"])
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--seconds", type=float, default=80.0)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu_check needs a CUDA device, and torch sees none")
    if arguments.what == "small":
        run_small()
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        run_speed(arguments.out, arguments.seconds)


if __name__ == "__main__":
    main()
