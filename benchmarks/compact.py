"""Keep the results that the site shows: `python benchmarks/compact.py results.json benchmarks.json`."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from table import rows


def compact(data: dict[str, Any]) -> dict[str, Any]:
    """Return the medians of each group, in seconds, and the machine on which they were measured."""
    machine = {
        "cores": data["machine_info"]["cpu"]["count"],
        "Python": data["machine_info"]["python_version"],
        **{name: version(name) for name in ("torch", "torchrl", "torchrl-agentic")},
        "load average": round(os.getloadavg()[0], 1),
        "date": data["datetime"][:10],
    }
    groups = {
        group: [[name, float(f"{seconds:.3g}")] for name, seconds in contenders]
        for group, contenders in rows(data).items()
    }
    return {"machine": machine, "groups": groups}


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    found = compact(json.loads(source.read_text("utf-8")))
    target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
