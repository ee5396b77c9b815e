"""All descendants of this process, which must be a subreaper: list them, reap them, kill them."""

from __future__ import annotations

import os
import signal
import time

_ANY_KIND = 0x40000000  # __WALL: also children of clone(2)


def children(pid: int) -> list[int]:
    """Return the PIDs of the children of a process, adopted ones included."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended
    return found


def descendants() -> dict[int, list[int]]:
    """Return every descendant of this process, with its threads."""
    found: dict[int, list[int]] = {}
    waiting = children(os.getpid())
    while waiting:
        pid = waiting.pop()
        try:
            found[pid] = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
        except (FileNotFoundError, ProcessLookupError):
            continue
        waiting += children(pid)
    return found


def reap() -> dict[int, int]:
    """Reap all children that have ended. Return their exit codes by PID, -n for signal n."""
    codes: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | _ANY_KIND)
        except ChildProcessError:
            return codes
        if not pid:
            return codes
        codes[pid] = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def kill_all() -> None:
    """Kill every descendant of this process. Return when they have ended.

    Children of a killed process become children of this one. This terminates if no new processes can be
    started meanwhile.
    """
    while True:
        for pid in children(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        reap()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _ANY_KIND)
        except ChildProcessError:
            return
        time.sleep(0.001)
