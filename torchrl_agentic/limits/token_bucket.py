"""How much of its limits a service takes at the moment, learnt from what it answers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

MAX_PAUSE_S = 60.0
"""A service that asks for a longer pause does not get it."""
WINDOW_S = 1.0
"""After a cut there is no other for this long, or until the pause ends: others were on their way already."""
JITTER = 0.25
"""A pause is longer by up to this part of it, so that not all come back at once."""
LEAST_SHARE = 1 / 64


class Adaptation:
    """The share of the configured limits that is used: halved on overload, grown back by one call per window.

    share: above 0, at most 1. paused_until: until then nothing starts. overloads: how often the service said
    that it has too much to do. Time comes in as a number.
    """

    __slots__ = ("_jitter", "_window_ends", "overloads", "paused_until", "share")

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self.share = 1.0
        self.paused_until = -math.inf
        self.overloads = 0
        self._window_ends = -math.inf
        self._jitter = jitter

    def overloaded(self, now: float, retry_after: float | None = None) -> None:
        """Take note that a call was turned away; retry_after: the seconds that were asked for, if any."""
        self.overloads += 1
        # Written so that NaN, of which every comparison is false, is no pause.
        pause = min(retry_after, MAX_PAUSE_S) if retry_after is not None and retry_after > 0 else 0.0
        self.paused_until = max(self.paused_until, now + pause * (1 + JITTER * self._jitter()))
        if now >= self._window_ends:
            self.share = max(self.share / 2, LEAST_SHARE)
            self._window_ends = max(now + WINDOW_S, self.paused_until)

    def succeeded(self, size: float, count: int = 1) -> None:
        """Take note that calls went well; size: how many may be under way at once if nothing is wrong."""
        if self.share < 1.0:
            at_once = max(1.0, self.share * size)
            self.share = min(1.0, self.share + count / (at_once * max(1.0, size)))


class Gate:
    """At most `concurrent` calls in flight, and `per_second` starts a second after a burst.

    Less of both while the service says that it has too much to do. Time comes in as a number. The bucket is
    one number, the time from which the next call may start (virtual scheduling, ITU-T I.371): a start moves
    it on by one interval, and it may lie up to `burst - 1` intervals ahead.
    """

    __slots__ = (
        "_concurrent", "_grants", "_interval", "_is_free", "_settled", "_size", "adaptation", "concurrent",
        "in_flight", "interval", "next_start", "slack",
    )  # fmt: skip

    def __init__(
        self, concurrent: float, per_second: float, burst: float, adaptation: Adaptation | None = None
    ) -> None:
        self._concurrent = self.concurrent = concurrent
        self._interval = self.interval = 1.0 / per_second
        self._size = concurrent if math.isfinite(concurrent) else per_second
        self._is_free = False  # no limit is configured, and one is learnt
        self.adaptation = adaptation or Adaptation()
        self.slack = (burst - 1.0) * self.interval if math.isfinite(per_second) else 0.0
        self.in_flight = 0
        self.next_start = -math.inf
        self._settled = -math.inf  # next_start before the first of the grants below
        self._grants: list[Grant] = []  # from the first that has not begun on

    def delay(self, now: float) -> float | None:
        """Seconds until the next call may start; None: a slot has to come back first."""
        if self.in_flight >= self.concurrent:
            return None
        # Sums of intervals carry rounding errors; a billionth of a second early is on time.
        wait = max(self.next_start - self.slack, self.adaptation.paused_until) - now
        return wait if wait > 1e-9 else 0.0

    def grant(self, now: float, *, begun: bool = True) -> Grant:
        """Take slot and token in the same instant, for a call that begins now or, if it waited, soon."""
        self.in_flight += 1
        granted = Grant(now, begun)
        if not self._grants:
            self._settled = self.next_start
        if self._grants or not begun:
            self._grants.append(granted)
        self.next_start = max(self.next_start, now) + self.interval
        return granted

    def begin(self, granted: Grant) -> None:
        """Take note that a call has begun."""
        granted.begun = True
        while self._grants and self._grants[0].begun:
            self._settled = max(self._settled, self._grants.pop(0).at) + self.interval

    def release(self) -> None:
        """Give the slot back."""
        self.in_flight -= 1

    def overloaded(self, now: float, retry_after: float | None) -> None:
        """Take note that the service turned a call away."""
        if math.isinf(self._size):  # nothing is configured: what was tried was too much
            self._size = self._concurrent = max(2.0, self.in_flight)
            self._is_free = True
        self.adaptation.overloaded(now, retry_after)
        self._adapt()

    def succeeded(self) -> None:
        """Take note that a call went well."""
        if self.adaptation.share < 1.0:
            self.adaptation.succeeded(self._size)
            if self._is_free and self.adaptation.share == 1.0:
                self._size = self._concurrent = self.concurrent = math.inf
            self._adapt()

    def _adapt(self) -> None:
        share = self.adaptation.share
        if math.isfinite(self._concurrent):
            self.concurrent = max(1, int(self._concurrent * share + 1e-9))
        self.interval = self._interval / share

    def take_back(self, granted: Grant) -> None:
        """Give slot and token back of a call that never began, as if it had not been let in."""
        self.in_flight -= 1
        self._grants.remove(granted)
        self.next_start = self._settled
        for other in self._grants:
            self.next_start = max(self.next_start, other.at) + self.interval


class Grant:
    """That a call was let in at some time, and whether it has begun."""

    __slots__ = ("at", "begun")

    def __init__(self, at: float, begun: bool) -> None:
        self.at = at
        self.begun = begun
