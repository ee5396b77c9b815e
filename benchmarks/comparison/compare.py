"""Run both libraries in turn, and print figures: `python compare.py --ours PYTHON --trl PYTHON`.

Each PYTHON is the interpreter of an environment with that library. Rollouts alternate, one at a time, with
one thread for torch. A run that has not ended after --limit seconds is stopped.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import statistics
import subprocess
import tokenize
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FAULTS = ("hang", "raise", "exit", "large", "control")


def count_lines(path: Path) -> int:
    """Count lines with code, as `ruff format` writes them; not blank lines, comments and docstrings."""
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    is_first = True
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type in skipped:
            is_first = is_first or token.type == tokenize.NEWLINE
        elif not (token.type == tokenize.STRING and is_first):
            lines.update(range(token.start[0], token.end[0] + 1))
            is_first = False
    return len(lines)


def run(python: str, library: str, fault: str, limit: float) -> dict[str, Any]:
    """Run one measure in a process of its own; return its figures."""
    process = subprocess.Popen(
        [python, "-W", "ignore", str(HERE / "measure_rollout.py"), library],
        env={**os.environ, "TOOL_FAULT": fault, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"library": library, "fault": fault, "ended": False, "limit": limit}
    if process.returncode != 0:
        return {
            "library": library,
            "fault": fault,
            "ended": False,
            "error": err.strip().splitlines()[-1][:200],
        }
    return {"ended": True, **json.loads(out)}


def main() -> None:
    """Measure, print each run, and write all of them as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", required=True)
    parser.add_argument("--trl", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120)
    parser.add_argument("--faults", nargs="*", default=FAULTS)
    parser.add_argument("--out", type=Path, default=HERE / "results.jsonl")
    options = parser.parse_args()
    pythons = {"torchrl_agentic": options.ours, "trl": options.trl}
    for library in pythons:
        print(f"{library}: {count_lines(HERE / f'train_{library}.py')} lines", flush=True)
    found: list[dict[str, Any]] = []
    with options.out.open("w") as file:
        order = [fault for fault in ("", "slow") for _ in range(options.repeats)] + list(options.faults)
        for number, fault in enumerate(order):
            for library in sorted(pythons, reverse=bool(number % 2)):
                found.append(run(pythons[library], library, fault, options.limit))
                line = json.dumps(found[-1])
                print(line, flush=True)
                file.write(line + "\n")
    for fault in ("", "slow"):
        for library in pythons:
            runs = [
                one for one in found if (one["library"], one["fault"]) == (library, fault) and one["ended"]
            ]
            rates = [one["answers"] / one["seconds"] for one in runs]
            cpu = [1000 * one["cpu_seconds"] / one["answers"] for one in runs]
            if runs:
                name = f"{library} {fault or 'instant'}"
                print(
                    f"{name}: {statistics.median(rates):.1f} answers/s"
                    f" ({min(rates):.1f} to {max(rates):.1f}), {statistics.median(cpu):.0f} ms each"
                )


if __name__ == "__main__":
    main()
