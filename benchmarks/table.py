"""Turn pytest-benchmark's JSON into a table with ratios: `python benchmarks/table.py results.json`."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def rows(data: dict[str, Any]) -> dict[str, list[tuple[str, float]]]:
    """Return the median of each contender by group, in seconds, in the order of the runs."""
    groups: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for item in data["benchmarks"]:
        params = item["params"] or {}
        name = (
            item["extra_info"].get("which") or params.get("which") or params.get("statement") or item["name"]
        )
        groups[item["group"]].append((name, item["stats"]["median"] / item["extra_info"].get("divide", 1)))
    return groups


def table(data: dict[str, Any]) -> str:
    """Return the table in Markdown; ratios are relative to the first contender of a group."""
    lines = ["| question | contender | median | ratio |", "| --- | --- | ---: | ---: |"]
    for group, contenders in rows(data).items():
        first = contenders[0][1]
        for index, (name, seconds) in enumerate(contenders):
            lines.append(
                f"| {'' if index else group} | {name} | {seconds_in_words(seconds)} | {seconds / first:.2f} |"
            )
    return "\n".join(lines)


def seconds_in_words(seconds: float) -> str:
    """Return a time with a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


if __name__ == "__main__":
    source = Path(sys.argv[1])
    text = table(json.loads(source.read_text()))
    source.with_name("results.md").write_text(text + "\n")
    print(text)
