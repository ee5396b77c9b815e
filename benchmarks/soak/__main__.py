"""Run a soak test: `python -m soak simulated --hours 6`, or `python -m soak real --minutes 60`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Run the soak test that the arguments name, and return the exit status."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    simulated = kinds.add_parser("simulated", help="on the skip clock, in minutes")
    simulated.add_argument("--hours", type=float, default=6.0, help="simulated hours")
    real = kinds.add_parser("real", help="with vLLM, sandboxes and servers that fail")
    real.add_argument("--minutes", type=float, default=60.0)
    for one in (simulated, real):
        one.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and vLLM end, too
    for name in ("torchrl_agentic", "mcp"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are the point
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        if given.kind == "simulated":
            from soak.simulated import Plan, soak

            seconds = 3600 * given.hours
            found = soak(Path(folder), Plan(seconds, period_s=max(60, seconds / 36)), seed=given.seed)
        else:
            from soak.real import soak_real

            found = soak_real(Path(folder), seconds=60 * given.minutes, seed=given.seed)
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
