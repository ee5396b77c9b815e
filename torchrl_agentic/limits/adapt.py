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
