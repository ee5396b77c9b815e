"""The end of a program, by Ctrl-C or by itself, closes what a collector holds open, and says nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from helpers.limit import limit
from helpers.processes import started

TESTS = Path(__file__).parents[1]


def ended(*programs, interrupts=0):
    """Run programs to their end; return their lines. Each of the first `interrupts` ones is interrupted."""
    with started(
        [sys.executable, "-W", "ignore", "-m", "helpers.collector_exits", *programs],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        lines, seen = [], set()
        while interrupts:
            seen.add(line := process.stdout.readline().strip())
            lines.append(line)
            assert line, process.communicate()
            if {"batch", "ready"} <= seen:
                process.send_signal(signal.SIGINT)
                seen = {"signalled"}
            if line == "interrupted":
                interrupts, seen = interrupts - 1, set()
            elif "signalled" in seen:
                seen = {"signalled"}
        rest, said = process.communicate(timeout=limit(60))
    lines += rest.splitlines()
    for word in ("destroyed", "never retrieved", "Traceback", "Fatal", "never awaited"):
        assert word not in said, said
    assert process.returncode == 0, said
    assert lines.count("open") == lines.count("closed") > 0
    return lines


def test_ctrl_c_closes_what_is_open():
    lines = ended("interrupted", "interrupted_in_the_body", "interrupted_async", interrupts=3)
    assert lines.count("interrupted") == 3


def test_programs_that_end_or_forget_their_collectors_close_what_is_open():
    lines = ended("leaves_async", *["ends_meanwhile"] * 10, "garbage", "forked", "leaves")
    assert lines.count("left") == 14
    assert "child 7" in lines
