"""python -m benchmarks: every row against its other side, printed, and written to out/."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from tqdm import tqdm

from attention_ext.__main__ import report as build_report
from benchmarks.lengths import Point, measure_lengths, write_lengths_picture
from benchmarks.measure import Mismatch, Result, Samples, measure
from benchmarks.report import (
    HEADER,
    line,
    load_warning,
    verdict,
    write_json,
    write_markdown,
    write_picture,
)
from benchmarks.rows import all_rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", metavar="REGEX", help="the rows whose name matches")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time for each row")
    parser.add_argument("--seconds", type=float, default=1.5, help="time for each row (1.5)")
    parser.add_argument(
        "--passes",
        type=int,
        default=1,
        help="passes over all rows, the best of all counts: for a machine that is not alone (1)",
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of both sides (2)")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="for JSON and PNG")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    arguments = parser.parse_args()

    if arguments.passes < 1:
        parser.error(f"--passes must be at least 1, got {arguments.passes}")
    rows = [row for row in all_rows() if re.search(arguments.only or "", row.name)]
    if arguments.list:
        print(*(row.name for row in rows), sep="\n")
        return
    if not rows:
        parser.error(f"no row matches {arguments.only!r}; --list names them all")

    torch.set_num_threads(arguments.threads)
    print(build_report())
    print("\nratio = the other side's best time / ours, both timed in turn\n")
    print(load_warning() + HEADER)
    measured: dict[str, Samples] = {}
    errors: dict[str, str] = {}
    seconds = arguments.seconds / 5 if arguments.quick else arguments.seconds
    for number in range(arguments.passes):
        if arguments.passes > 1:
            print(f"pass {number + 1} of {arguments.passes}")
        todo = [row for row in rows if row.name not in errors]
        bar = tqdm(todo, unit="row", leave=False, disable=None)  # a bar on terminals only
        for row in bar:
            bar.set_postfix_str(row.name)
            try:
                samples = measure(row, seconds=seconds, threads=arguments.threads)
            except (Mismatch, RuntimeError, NotImplementedError, ImportError) as error:
                errors[row.name] = str(error).splitlines()[0]
                tqdm.write(f"{row.name:<57} did not run: {errors[row.name]}")
            else:
                before = measured.get(row.name)
                measured[row.name] = samples if before is None else before + samples
                tqdm.write(line(Result.of(row, measured[row.name])))
    failures = [f"{name}: {why}" for name, why in errors.items()]
    results = [Result.of(row, measured[row.name]) for row in rows if row.name in measured]
    print("\n" + verdict(results, failures))
    points: list[Point] = []
    if not arguments.only:
        print("\nTime and memory against sequence length ...")
        points = measure_lengths(tqdm.write, seconds / 3)
    if results:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out / "benchmarks.json", results, points, failures)
        write_markdown(arguments.out / "benchmarks.md", results)
        write_picture(arguments.out / "benchmarks.png", results)
        if points:
            write_lengths_picture(arguments.out / "lengths.png", points)
        print(f"Written to {arguments.out}:", *sorted(x.name for x in arguments.out.iterdir()))


if __name__ == "__main__":
    main()
