"""Time that passes only when a test says so."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """A clock and its timers, for `RateLimiter(clock=clock, call_later=clock.call_later)`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        """Tell the time, in seconds."""
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Call back once so many seconds have passed."""
        heapq.heappush(self._timers, (self.now + delay, next(self._order), callback))

    def advance(self, seconds: float) -> None:
        """Let time pass, and call back whoever asked for it, in order."""
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, callback = heapq.heappop(self._timers)
            callback()
        self.now = end
