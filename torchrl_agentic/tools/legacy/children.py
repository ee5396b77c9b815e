"""The processes that a thread of ours has started; known on Linux only, elsewhere there seem to be none."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path


def children_of(thread: int) -> list[int]:
    """Give the processes that a thread of this process, by its native id, has started and that still run."""
    return listed(Path(f"/proc/self/task/{thread}/children"))


def end_trees(pids: Iterable[int]) -> None:
    """Kill processes and all that they have started."""
    for pid in pids:
        below = [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in listed(path)]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        end_trees(below)


def listed(path: Path) -> list[int]:
    """Read a file of /proc that lists processes."""
    try:
        return [int(pid) for pid in path.read_text().split()]
    except OSError:
        return []
