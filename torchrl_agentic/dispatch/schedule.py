"""From effects to order, as a pure function."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_agentic.tool import Effects


def conflict(first: Effects, second: Effects) -> bool:
    """Whether two calls of one trajectory must not overlap."""
    if first.exclusive or second.exclusive:
        return True
    return bool(first.writes & (second.reads | second.writes) or second.writes & first.reads)


def dependencies(effects: Sequence[Effects]) -> list[set[int]]:
    """Give for each call the earlier calls it has to wait for, numbered in the order the model wrote them.

    Only the latest conflicts are given, the others follow: if 2 waits for 1 and 1 for 0, 2 names only 1. The
    work is linear in the calls and their resources.
    """
    waits: list[set[int]] = []
    barrier: int | None = None  # the latest exclusive call
    since_barrier: list[int] = []
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}  # since that resource was last written
    for index, effect in enumerate(effects):
        if effect.exclusive:
            waits.append(set(since_barrier) or ({barrier} if barrier is not None else set()))
            barrier, since_barrier = index, []
            writer.clear()
            readers.clear()
            continue
        found: set[int] = set()
        for name in effect.reads | effect.writes:
            if name in writer:
                found.add(writer[name])
        for name in effect.writes:
            found.update(readers.get(name, ()))
        if not found and barrier is not None:
            found.add(barrier)
        for name in effect.writes:
            writer[name] = index
            readers[name] = []
        for name in effect.reads - effect.writes:
            readers.setdefault(name, []).append(index)
        waits.append(found)
        since_barrier.append(index)
    return waits
