"""What a process holds at a moment: memory, and everything that can be counted. Linux only, by /proc."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = "torchrl_agentic"
PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20
SLACK = {"tasks": 1, "threads": 3, "files": 3, "children": 2, "folders": 2, "objects": 500}
"""How much higher a count may be in the last third of a run than in the first one after warm-up."""
LEFT_OVER = {"tasks": 2, "threads": 8, "files": 16, "children": 4, "folders": 4}
"""How much higher a count may be after a run than before it, where one reading is compared with one."""
POOLS = (f"{PACKAGE}.sandbox.", f"{PACKAGE}.repl.")
POOLED = 24
"""Objects of a class in `POOLS` that may be left over: empty control groups, for example, wait for reuse."""
SLOPE_MIB_PER_HOUR = 24.0
"""Bound on the growth of the memory of this process and of its children, each, after warm-up."""
NOISE_MIB = 8.0
"""Growth that a run of any length may have."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What is held at a moment.

    Attributes:
        at_s: Time since the begin of the run, in seconds of the loop's clock.
        memory_mib: Resident memory of this process.
        children_mib: Memory of all processes below it but the engine's, shared pages counted once.
        engine_mib: Memory of the processes of the engine; what they do with it is not this package's.
        counts: Numbers by name; `SLACK` bounds their growth.
        objects: Instances of classes of the package, by the name of the class.
    """

    at_s: float
    memory_mib: float
    children_mib: float
    engine_mib: float
    counts: dict[str, int]
    objects: Counter[str] = field(repr=False)


def take(at_s: float, folder: Path, engine: Collection[int] = ()) -> Reading:
    """Return what this process holds; to be called on its event loop.

    Args:
        at_s: Time since the begin of the run, in seconds.
        folder: Where the program creates its temporary folders.
        engine: Ids of the processes of the engine.
    """
    gc.collect()
    _return_free_memory()
    objects = count_objects()
    below = descendants(os.getpid())
    children = [pid for pid in below if pid not in engine]
    return Reading(
        at_s,
        int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / MIB,
        sum(map(_proportional_mib, children)),
        sum(map(_proportional_mib, engine)),
        {
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
            "children": len(children),
            "folders": sum(1 for _ in folder.iterdir()),
            "objects": objects.total(),
        },
        objects,
    )


async def take_last(at_s: float, folder: Path, engine: Collection[int] = ()) -> Reading:
    """Return what is held once a collector is garbage, which ends in tasks of event loops.

    Args:
        at_s: Time since the begin of the run, in seconds.
        folder: Where the program creates its temporary folders.
        engine: Ids of the processes of the engine.
    """
    for _ in range(3):
        gc.collect()
        await asyncio.sleep(1)
        await asyncio.to_thread(time.sleep, 0.2)  # the loop of the package has a clock of its own
    return take(at_s, folder, engine)


def count_objects() -> Counter[str]:
    """Count the instances of the classes of the package."""
    found: Counter[type] = Counter(map(type, gc.get_objects()))
    return Counter(
        {
            f"{kind.__module__}.{kind.__qualname__}": count
            for kind, count in found.items()
            if str(kind.__module__).startswith(PACKAGE)
        }
    )


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes below a process, zombies included.

    Args:
        pid: Id of the process.
    """
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:  # it has ended
                continue
            below.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        waiting += (children := below.get(waiting.pop(), []))
        found += children
    return found


def _proportional_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended, or belongs to another user
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def _return_free_memory() -> None:
    if sys.platform == "linux":
        trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs of points, which single peaks do not change.

    Args:
        times: Times, in any unit.
        values: A value for each time.
    """
    points = list(zip(times, values, strict=True))
    slopes = [
        (after[1] - before[1]) / (after[0] - before[0])
        for index, before in enumerate(points)
        for after in points[index + 1 :]
        if after[0] > before[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def growth(readings: Sequence[Reading]) -> list[str]:
    """Return a line for everything that grew in a run; the first fifth of it is warm-up.

    Args:
        readings: Readings of the run, in their order, each taken while the collector was idle.
    """
    steady = list(readings[max(1, len(readings) // 5) :])
    if len(steady) < 4:
        return []
    found: list[str] = []
    hours = (steady[-1].at_s - steady[0].at_s) / 3600
    for name in ("memory_mib", "children_mib"):
        per_hour = slope([one.at_s / 3600 for one in steady], [getattr(one, name) for one in steady])
        bound = max(SLOPE_MIB_PER_HOUR, NOISE_MIB / hours)
        if per_hour > bound:
            found.append(f"{name} grows by {per_hour:.1f} MiB per hour; the bound is {bound:.1f}")
    third = len(steady) // 3
    for name, slack in SLACK.items():
        first = max(one.counts[name] for one in steady[: max(1, third)])
        last = min(one.counts[name] for one in steady[-max(1, third) :])
        if last > first + slack:
            found.append(f"{name}: at most {first} soon after warm-up, at least {last} at the end")
    return found


def left_over(before: Reading, after: Reading) -> list[str]:
    """Return a line for everything that a collector left behind that was not there before.

    Args:
        before: Reading after an earlier collector of the same kind was closed.
        after: Reading after the last one was closed.
    """
    found = [
        f"{name}: {before.counts[name]} before, {after.counts[name]} after"
        for name, slack in LEFT_OVER.items()
        if after.counts[name] > before.counts[name] + slack
    ]
    more = after.objects - before.objects
    return found + [
        f"{count} more {name}"
        for name, count in more.most_common()
        if count > (POOLED if name.startswith(POOLS) else 2)
    ]
