"""What a run leaves behind: lines on the terminal, a JSON file, a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from attention_ext.__main__ import report as build_report
from benchmarks.lengths import Point
from benchmarks.measure import Result

HEADER = (
    f"{'row':<57} {'ours ms':>9} {'other ms':>9} {'ratio':>7} {'median':>7} {'must':>6}"
    f" {'% of limit':>11} {'limit':<9} {'aim':>6} {'GF/s':>7}"
)


def line(result: Result) -> str:
    """One row: best times, the other side's over ours, and ours in percent of the limit."""
    marks = ("" if result.passed else " < must") + ("" if result.reached_aim else " < aim")
    return (
        f"{result.name:<57} {1e3 * result.ours_best:9.4f} {1e3 * result.other_best:9.4f}"
        f" {result.ratio:6.2f}x {result.ratio_median:6.2f}x {result.must:5.2f}x"
        f" {result.percent_of_limit:11.0f} {result.limit:<9} {aim(result):>6}"
        f" {result.gflops:7.1f}{marks}"
    )


def aim(result: Result) -> str:
    """What a row aims at: a ratio, or percent of its limit."""
    if result.aim_ratio is not None:
        return f"{result.aim_ratio:.2f}x"
    return "-" if result.aim is None else f"{result.aim:.0f} %"


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
    """The rows under what they must reach, and those that did not run."""
    under = [result for result in results if not result.passed]
    short = sum(not result.reached_aim for result in results)
    lines = [
        f"{len(results) - len(under)} of {len(results)} rows reach what they must, "
        f"{len(results) - short} what they aim at."
    ]
    if under:
        lines.append("Under what they must reach (ratio of the best times, quartiles of all):")
        lines += [
            f"  {r.name}: {r.ratio:.2f}x of {r.must:.2f}x  [{r.ratio_low:.2f}, {r.ratio_high:.2f}]"
            for r in under
        ]
    if errors:
        lines += [f"{len(errors)} rows did not run:", *(f"  {error}" for error in errors)]
    return "\n".join(lines)


def write_markdown(path: Path, results: Sequence[Result]) -> None:
    """The table of docs/performance.md; rows under what they must reach are bold."""
    lines = [
        "| row | ours ms | other ms | ratio | must | % of limit | aim |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        ratio = f"{r.ratio:.2f}" if r.passed else f"**{r.ratio:.2f}**"
        share = f"{r.percent_of_limit:.0f}" + ("" if r.limit == "peak" else f" of {r.limit}")
        lines.append(
            f"| {r.name} | {1e3 * r.ours_best:.3g} | {1e3 * r.other_best:.3g} | {ratio} "
            f"| {r.must:.2f} | {share} | {aim(r)} |"
        )
    path.write_text("\n".join(lines) + "\n")


def write_json(
    path: Path, results: Sequence[Result], points: Sequence[Point], errors: Sequence[str]
) -> None:
    """Everything measured, with the machine and the build it was measured on."""
    content = {
        "build": build_report().splitlines(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "rows": [result.as_dict() for result in results],
        "lengths": [asdict(point) for point in points],
        "errors": list(errors),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_picture(path: Path, results: Sequence[Result]) -> None:
    """Bars of the ratio (log scale) with what it must reach, and of the share of the limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (ratios, shares) = plt.subplots(
        1, 2, figsize=(14, 1.5 + 0.22 * len(results)), sharey=True
    )
    places = list(range(len(results)))
    colors = ["tab:green" if result.passed else "tab:red" for result in results]
    ratios.barh(places, [r.ratio - 1 for r in results], left=1, color=colors, height=0.7)
    ratios.plot([r.must for r in results], places, "k|", markersize=9, label="must")
    ratios.axvline(1, color="black", linewidth=0.8)
    ratios.set_xscale("log")
    ratios.set_xlabel("times as fast as the other side (log scale)")
    ratios.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
    ratios.set_yticks(places, [result.name for result in results], fontsize=8)
    ratios.invert_yaxis()
    ratios.set_ylim(len(results) - 0.4, -0.6)
    shares.barh(places, [r.percent_of_limit for r in results], 0.7, label="ours")
    aims = [(r.aim, place) for r, place in zip(results, places, strict=True) if r.aim is not None]
    shares.plot([x for x, _ in aims], [y for _, y in aims], "k|", markersize=9, label="aim")
    shares.set_xlabel("% of the limit measured beside each row")
    for axis in (ratios, shares):
        axis.legend(loc="lower right")
        axis.grid(axis="x", alpha=0.3)
    figure.suptitle(
        f"attention_ext, torch {torch.__version__}, {torch.get_num_threads()} threads, "
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
