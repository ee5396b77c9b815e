"""`Capacity`: how many trajectories are open at once, so that the engine is busy while others use tools."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Literal

from torchrl_agentic.errors import check_count

MAX_FACTOR = 16
"""Largest number of open trajectories with "auto", as a multiple of the engine's concurrent requests."""
HEADROOM = 1 / 8
"""Share of the engine's concurrent requests that should wait in it, so that it never runs short."""
GROWTH = 1 / 2
"""How much an answer raises the limit if it leaves the engine short of requests, in trajectories."""
DECAY = 1 / 16
"""How much an answer lowers a limit that is not used, in trajectories."""


class Capacity:
    """Bound the number of open trajectories.

    A trajectory heads for the engine when it begins, is away while its tools, simulated user or reward run,
    and returns to the engine until it ends. With "auto", trajectories begin while fewer than
    `engine_concurrent * (1 + HEADROOM)` are at the engine, whatever share of their time they are away.

    That alone would open more and more of them while tools hang, and flood the engine when all return. So a
    limit on open trajectories grows as slowly as it must: by `GROWTH` with each answer that leaves the engine
    short of requests. Since answers come from requests, the growth ends when nothing returns from the tools:
    n requests lead to n / (1 - GROWTH) answers, that is, to n more trajectories. While tools work, the number
    doubles with each round of calls until the engine is busy. A limit that is not used decays.

    No clock is involved. If the KV cache of the engine holds fewer requests than it works on at once, fewer
    are wanted: `RequestPermits` finds out how many fit.

    Args:
        limit: Largest number of open trajectories, or "auto".
        engine_concurrent: Number of requests that the engine works on at once.

    Attributes:
        open: Number of trajectories that have begun and not ended.
        at_engine: Number of open trajectories that are at the engine or head for it.
        max_open: Largest number of open trajectories: `limit`, or `MAX_FACTOR * engine_concurrent`.
        fitting: Number of requests that the KV cache of the engine holds; None: at least `engine_concurrent`.
    """

    def __init__(self, limit: int | Literal["auto"], *, engine_concurrent: int) -> None:
        check_count("engine_concurrent", engine_concurrent, optional=False)
        self._is_fixed = limit != "auto"
        if limit != "auto":
            if isinstance(limit, str):
                raise ValueError(f"limit is a number of trajectories or 'auto'; got {limit!r}")
            check_count("limit", limit, optional=False)
        self._concurrent = int(engine_concurrent)
        self.open = 0
        self.at_engine = 0
        self.fitting: int | None = None
        self.max_open = MAX_FACTOR * self._concurrent if limit == "auto" else int(limit)
        self._limit = float(self.max_open if self._is_fixed else self.wanted)

    @property
    def wanted(self) -> int:
        """Number of trajectories that should be at the engine; more than it works on at once."""
        fitting = self._concurrent if self.fitting is None else min(self.fitting, self._concurrent)
        return math.ceil(fitting * (1 + HEADROOM))

    @property
    def limit(self) -> int:
        """Number of trajectories that may be open now; "auto" adapts it."""
        return int(self._limit)

    @property
    def free(self) -> int:
        """Number of further trajectories that may begin now."""
        room = self.limit - self.open
        if not self._is_fixed:
            room = min(room, self.wanted - self.at_engine)
        return max(0, room)

    def enter(self) -> Slot:
        """Begin a trajectory, which heads for the engine.

        Raises:
            RuntimeError: If `free` is 0.
        """
        if not self.free:
            raise RuntimeError(f"no trajectory may begin now, because {self.open} are open; check free first")
        self.open += 1
        self.at_engine += 1
        return Slot(self)

    def observe_answer(self) -> None:
        """Adapt the limit after an answer, which `Slot.answered` reports."""
        if self._is_fixed:
            return
        if self._limit >= self.open + 1:
            self._limit = max(self._limit - DECAY, self.open + 1, self.wanted)
        elif self.at_engine < self.wanted:
            self._limit = min(self._limit + GROWTH, self.max_open)


class Slot:
    """Place of one open trajectory in a `Capacity`, which `Capacity.enter` returns.

    Each method may be called in any state. As a context manager, it leaves at the end of the block.

    Args:
        capacity: The capacity that the place is part of.

    Attributes:
        is_open: Whether the trajectory has not ended.
        is_at_engine: Whether the trajectory is at the engine or heads for it.
    """

    __slots__ = ("_capacity", "is_at_engine", "is_open")

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self.is_open = True
        self.is_at_engine = True

    def ask(self) -> None:
        """Record that the trajectory asks the engine."""
        if self.is_open and not self.is_at_engine:
            self.is_at_engine = True
            self._capacity.at_engine += 1

    def answered(self) -> None:
        """Record that the engine answered, and the trajectory is away until it asks again.

        An answer that a weight update aborted is no answer: the trajectory stays at the engine.
        """
        if self.is_at_engine:
            self._away()
            self._capacity.observe_answer()

    def leave(self) -> None:
        """Record that the trajectory ended, for whatever reason."""
        if self.is_open:
            self._away()
            self.is_open = False
            self._capacity.open -= 1

    def _away(self) -> None:
        if self.is_at_engine:
            self.is_at_engine = False
            self._capacity.at_engine -= 1

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
