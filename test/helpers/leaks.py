"""Files and processes that a test leaves behind make this test fail, and not a later one that finds them."""

import contextlib
import gc
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path

from helpers.limit import limit
from helpers.processes import children, runs

KEPT = (
    b"multiprocessing.resource_tracker",
    b"multiprocessing.forkserver",
    b"--dir /work --chdir / --remount-ro /",  # a zygote, which a pool keeps
)
"""Parts of the command lines of processes that are started once and kept."""


def open_files() -> set[str]:
    """Return the descriptors of this process; none where /proc is missing."""
    try:
        return set(os.listdir("/proc/self/fd"))
    except OSError:
        return set()


def started_programs() -> dict[int, bytes]:
    """Return the running children of this process with their command lines, but for those that are kept."""
    found: dict[int, bytes] = {}
    for pid in children(os.getpid()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            if runs(pid) and not any(kept in words for kept in KEPT):
                found[pid] = words
    return found


@contextlib.contextmanager
def no_leaks(test: str, left: dict[int, str]) -> Generator[None]:
    """Collect files that the body forgot, so that they warn at once, and note processes that it leaves.

    A warning is an error of the test that runs meanwhile. A collection takes long, hence only if files
    are open that were not before.

    Args:
        test: Name of the test.
        left: Where processes are noted, with the test: one that a fixture of the file restarted may stay.
    """
    files, programs = open_files(), started_programs()
    yield
    if open_files() - files:
        gc.collect()
    for pid, words in started_programs().items():
        if pid not in programs:
            left[pid] = f"{test} started {words.decode('utf-8', 'replace')[:500]}"


def check_ended(left: dict[int, str]) -> None:
    """Wait until the processes of `no_leaks` have ended; kill those that do not.

    Raises:
        AssertionError: If any does not end.
    """
    until = time.monotonic() + limit(1)
    while running := [pid for pid in left if pid in started_programs()]:
        if time.monotonic() > until:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError("processes were left: " + "; ".join(left[pid] for pid in running))
        time.sleep(0.01)
