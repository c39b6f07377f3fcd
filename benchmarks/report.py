"""What a run leaves behind: lines on the terminal, a JSON file, a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from attention_ext.__main__ import report as build_report
from benchmarks.measure import Result

HEADER = (
    f"{'row':<54} {'ours ms':>9} {'torch ms':>9} {'ratio':>7} {'best':>7} {'floor':>6}"
    f" {'GF/s':>7} {'% peak':>7} {'torch':>6}"
)


def line(result: Result) -> str:
    """One row: medians, torch over ours, and both sides in per cent of the multiply-add peak."""
    ours, theirs = result.percent_of_peak, result.torch_percent_of_peak
    share = (
        f"{ours:7.1f} {theirs:6.1f}"
        if ours is not None and theirs is not None
        else f"{'-':>7} {'-':>6}"
    )
    mark = "" if result.passed else "  < floor"
    return (
        f"{result.name:<54} {1e3 * result.ours_median:9.4f} {1e3 * result.torch_median:9.4f}"
        f" {result.ratio:6.2f}x {result.ratio_of_bests:6.2f}x {result.floor:5.2f}x"
        f" {result.gflops:7.1f} {share}{mark}"
    )


def load_warning() -> str:
    """A line if other processes compete for the cores, else nothing."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load < cores / 2:
        return ""
    return (
        f"\nThe machine is busy: load {load:.1f} on {cores} cores. Times say little now, ratios of "
        "short calls neither.\n"
    )


def verdict(results: Sequence[Result], errors: Sequence[str]) -> str:
    """The rows under their floor, with the spread of their ratio, and those that did not run."""
    under = [result for result in results if not result.passed]
    lines = [f"{len(results) - len(under)} of {len(results)} rows at or above their floor."]
    if under:
        lines.append("Under their floor (median ratio, its quartiles, ratio of the best times):")
        lines += [
            f"  {r.name}: {r.ratio:.2f}x of {r.floor:.2f}x"
            f"  [{r.ratio_low:.2f}, {r.ratio_high:.2f}]  best {r.ratio_of_bests:.2f}x"
            for r in under
        ]
    if errors:
        lines += [f"{len(errors)} rows did not run:", *(f"  {error}" for error in errors)]
    return "\n".join(lines)


def write_json(path: Path, results: Sequence[Result], errors: Sequence[str]) -> None:
    """Everything measured, with the machine and the build it was measured on."""
    content = {
        "build": build_report().splitlines(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "rows": [result.as_dict() for result in results],
        "errors": list(errors),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_picture(path: Path, results: Sequence[Result]) -> None:
    """Bars of the ratio (log scale, floors as ticks), and both sides in per cent of the peak."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    has_peak = any(result.percent_of_peak is not None for result in results)
    figure, axes = plt.subplots(
        1, 2 if has_peak else 1, figsize=(14, 1.5 + 0.22 * len(results)), sharey=True, squeeze=False
    )
    places = list(range(len(results)))
    ratios = axes[0][0]
    colors = ["tab:green" if result.passed else "tab:red" for result in results]
    ratios.barh(places, [r.ratio - 1 for r in results], left=1, color=colors, height=0.7)
    ratios.plot([r.floor for r in results], places, "k|", markersize=9, label="floor")
    ratios.axvline(1, color="black", linewidth=0.8)
    ratios.set_xscale("log")
    ratios.set_xlabel("times as fast as torch (log scale)")
    ratios.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    ratios.set_yticks(places, [result.name for result in results], fontsize=8)
    ratios.invert_yaxis()
    ratios.set_ylim(len(results) - 0.4, -0.6)
    ratios.legend(loc="lower right")
    ratios.grid(axis="x", alpha=0.3)
    if has_peak:
        peak = axes[0][1]
        upper = [place - 0.18 for place in places]
        lower = [place + 0.18 for place in places]
        peak.barh(upper, [r.percent_of_peak or 0 for r in results], 0.34, label="ours")
        peak.barh(lower, [r.torch_percent_of_peak or 0 for r in results], 0.34, label="torch")
        peak.set_xlabel("% of the multiply-add peak, measured beside each row")
        peak.set_xlim(0, 100)
        peak.legend(loc="lower right")
        peak.grid(axis="x", alpha=0.3)
    figure.suptitle(
        f"attention_ext against torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{_processor()}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [
        row.split(":", 1)[1].strip() for row in text.splitlines() if row.startswith("model name")
    ]
    return names[0] if names else platform.machine()
