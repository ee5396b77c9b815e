"""Processes of this machine and what they have started, from /proc."""

import contextlib
from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def family(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    return {pid}.union(*map(family, children(pid)))


def command(pid: int) -> str | None:
    """Return the name of a process; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None


def runs(pid: int) -> bool:
    """Return whether a process runs, zombies excluded."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
