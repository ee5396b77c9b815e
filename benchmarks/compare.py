"""Compare two checkouts: `python benchmarks/compare.py OLD NEW [--rounds N] [--wall] [pytest arguments]`.

Each round runs the benchmarks of OLD, then those of NEW, each with its own copy of the package; a benchmark's
figure is its least time over all rounds. Turns and least times make the ratios hold on a machine that other
programs load too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from table import seconds_in_words

Times = dict[str, float]


def measure(checkout: Path, selection: list[str], timer: str) -> Times:
    """Run benchmarks once.

    Args:
        checkout: Root of a working tree of this repository.
        selection: Arguments for pytest, with paths relative to `checkout`.
        timer: Function that reads the time, as pytest-benchmark names it.

    Returns:
        The least time of each benchmark, in seconds, by its test id.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        options = ["-o", "timeout=0", "--benchmark-only"]
        options += [f"--benchmark-json={path}", f"--benchmark-timer={timer}"]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        command = [sys.executable, "-m", "pytest", *options, *selection]
        run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"{checkout}: pytest failed\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        found = json.loads(path.read_text("utf-8"))["benchmarks"]
    return {item["name"]: item["stats"]["min"] / item["extra_info"].get("divide", 1) for item in found}


def least(runs: list[Times]) -> Times:
    """Return the least time of each benchmark over all runs."""
    return {name: min(run[name] for run in runs if name in run) for run in runs for name in run}


def table(old: Times, new: Times) -> str:
    """Return the comparison in Markdown; a dash where only one of the two has a benchmark."""
    lines = ["| benchmark | before | after | ratio |", "| --- | ---: | ---: | ---: |"]
    for name in {**old, **new}:
        before, after = (seconds_in_words(times[name]) if name in times else "–" for times in (old, new))
        ratio = f"{new[name] / old[name]:.2f}" if name in old and name in new else "–"
        lines.append(f"| {name} | {before} | {after} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, measure in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout, such as one of `git worktree add --detach`")
    parser.add_argument("new", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5, help="number of runs of each (default: 5)")
    parser.add_argument(
        "--wall", action="store_true", help="measure time that passes; else processor time of this process"
    )
    arguments, selection = parser.parse_known_args()
    timer = "time.perf_counter" if arguments.wall else "time.process_time"
    runs: dict[Path, list[Times]] = {arguments.old.resolve(): [], arguments.new.resolve(): []}
    for _ in range(arguments.rounds):
        for checkout, times in runs.items():
            times.append(measure(checkout, selection or ["benchmarks"], timer))
    print(table(*map(least, runs.values())))


if __name__ == "__main__":
    main()
