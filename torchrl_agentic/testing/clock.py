"""A clock that a test advances by hand."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """A clock and its timers, for `RateLimiter(clock=clock, call_later=clock.call_later)`.

    Args:
        now: Time at the start, in seconds.

    Attributes:
        now: The current time, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        """Return the current time, in seconds."""
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Call a function once some time has passed.

        Args:
            delay: Seconds from now.
            callback: Called by `advance`, without arguments.
        """
        heapq.heappush(self._timers, (self.now + delay, next(self._order), callback))

    @property
    def due(self) -> list[float]:
        """Times of the callbacks that have not run yet, in seconds, the earliest first."""
        return sorted(time for time, _, _ in self._timers)

    def advance(self, seconds: float) -> None:
        """Move the time on, and call the functions that fall due, in their order.

        Args:
            seconds: Seconds to add to the current time.
        """
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, callback = heapq.heappop(self._timers)
            callback()
        self.now = end
