"""All processes behind this one, which has to be a subreaper: which there are, and ending them."""

from __future__ import annotations

import os
import signal
import time

_ANY_KIND = 0x40000000  # __WALL: children of clone(2), too


def children(pid: int) -> list[int]:
    """Give the children of a process, those that it took in among them."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended meanwhile
    return found


def descendants() -> dict[int, list[int]]:
    """Give every process behind this one, with its threads."""
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
    """Take note of all children that have ended; gives their exit codes, negative for a signal."""
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
    """Kill every process behind this one; returns when they are gone.

    What a killed one leaves behind becomes a child of ours, as long as nothing new can be started meanwhile
    this comes to an end.
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
