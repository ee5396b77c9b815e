"""A token bucket, and the share of its limits that an overloaded service takes (AIMD)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

MAX_PAUSE_S = 60.0
"""Longest pause in seconds that a service can ask for."""
WINDOW_S = 1.0
"""Shortest time between two cuts, in seconds: running calls would report the same overload again."""
JITTER = 0.25
"""Largest part by which a pause is extended at random, so that callers do not return all at once."""
LEAST_SHARE = 1 / 64


class AIMD:
    """Additive increase, multiplicative decrease: the share of the configured limits that is used.

    An overload halves the share, at most once per window. Successes raise it by about one concurrent call per
    round of calls. All times are in seconds, of any clock.

    Args:
        jitter: Function that returns a random number from 0 to 1.

    Attributes:
        share: Part of the limits in use, above 0 and at most 1.
        paused_until: Time before which no call starts.
        overloads: Number of recorded overloads.
    """

    __slots__ = ("_jitter", "_window_ends", "overloads", "paused_until", "share")

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self.share = 1.0
        self.paused_until = -math.inf
        self.overloads = 0
        self._window_ends = -math.inf
        self._jitter = jitter

    def record_overload(self, now: float, retry_after: float | None = None) -> None:
        """Record that the service turned a call away.

        Args:
            now: Current time.
            retry_after: Pause that the service asked for, or None.
        """
        self.overloads += 1
        # Comparisons with NaN are false, so that it means no pause.
        pause = min(retry_after, MAX_PAUSE_S) if retry_after is not None and retry_after > 0 else 0.0
        self.paused_until = max(self.paused_until, now + pause * (1 + JITTER * self._jitter()))
        if now >= self._window_ends:
            self.share = max(self.share / 2, LEAST_SHARE)
            self._window_ends = max(now + WINDOW_S, self.paused_until)

    def record_success(self, size: float, count: int = 1) -> None:
        """Record that the service answered calls.

        Args:
            size: Number of concurrent calls under the full limits.
            count: Number of successful calls.
        """
        if self.share < 1.0:
            at_once = max(1.0, self.share * size)
            self.share = min(1.0, self.share + count / (at_once * max(1.0, size)))


class TokenBucket:
    """A `Quota` with at most `concurrent` running calls, and `per_second` starts a second after a burst.

    The bucket is a single number, the time from which the next call may start (virtual scheduling, ITU-T
    I.371): a start moves it by one interval, and it may lie up to `burst - 1` intervals ahead.

    Args:
        concurrent: Largest number of concurrent calls; infinite for no limit.
        per_second: Largest number of starts per second; infinite for no limit.
        burst: Number of calls that may start at once after a pause.
        aimd: Adaptation of the limits to overloads; a new one by default.

    Attributes:
        concurrent: Current limit of concurrent calls.
        interval: Current time between two starts, in seconds.
        in_flight: Number of running calls.
        aimd: The adaptation of the limits.
    """

    __slots__ = (
        "_concurrent",
        "_grants",
        "_interval",
        "_is_free",
        "_settled",
        "_size",
        "aimd",
        "concurrent",
        "in_flight",
        "interval",
        "next_start",
        "slack",
    )  # fmt: skip

    def __init__(self, concurrent: float, per_second: float, burst: float, aimd: AIMD | None = None) -> None:
        self._concurrent = self.concurrent = concurrent
        self._interval = self.interval = 1.0 / per_second
        self._size = concurrent if math.isfinite(concurrent) else per_second
        self._is_free = False  # no limit was configured, and one was learned
        self.aimd = aimd or AIMD()
        self.slack = (burst - 1.0) * self.interval if math.isfinite(per_second) else 0.0
        self.in_flight = 0
        self.next_start = -math.inf
        self._settled = -math.inf  # next_start before the first of the grants below
        self._grants: list[Grant] = []  # the first one that has not begun, and all after it

    def delay(self, now: float) -> float | None:
        """Return the seconds until the next call may start, or None if a slot must be released first."""
        if self.in_flight >= self.concurrent:
            return None
        # Sums of intervals carry rounding errors: a nanosecond early is on time.
        wait = max(self.next_start - self.slack, self.aimd.paused_until) - now
        return wait if wait > 1e-9 else 0.0

    def grant(self, now: float, *, begun: bool = True) -> Grant:
        """Take a slot and a token at the same time.

        Args:
            now: Current time.
            begun: False if the call has waited in the queue, and still has to wake up.
        """
        self.in_flight += 1
        grant = Grant(now, begun)
        if not self._grants:
            self._settled = self.next_start
        if self._grants or not begun:
            self._grants.append(grant)
        self.next_start = max(self.next_start, now) + self.interval
        return grant

    def begin(self, grant: Grant) -> None:
        """Record that a call which had waited has begun."""
        grant.begun = True
        while self._grants and self._grants[0].begun:
            self._settled = max(self._settled, self._grants.pop(0).at) + self.interval

    def release(self) -> None:
        """Return the slot of a call."""
        self.in_flight -= 1

    def record_overload(self, now: float, retry_after: float | None) -> None:
        """Record that the service turned a call away.

        Args:
            now: Current time.
            retry_after: Pause that the service asked for, or None.
        """
        if math.isinf(self._size):  # no limit is configured: the calls in flight were too many
            self._size = self._concurrent = max(2.0, self.in_flight)
            self._is_free = True
        self.aimd.record_overload(now, retry_after)
        self._adapt()

    def record_success(self) -> None:
        """Record that the service answered a call."""
        if self.aimd.share < 1.0:
            self.aimd.record_success(self._size)
            if self._is_free and self.aimd.share == 1.0:
                self._size = self._concurrent = self.concurrent = math.inf
            self._adapt()

    def _adapt(self) -> None:
        share = self.aimd.share
        if math.isfinite(self._concurrent):
            self.concurrent = max(1, int(self._concurrent * share + 1e-9))
        self.interval = self._interval / share

    def take_back(self, grant: Grant) -> None:
        """Return the slot and the token of a call that never began, as if it had not been let in."""
        self.in_flight -= 1
        self._grants.remove(grant)
        self.next_start = self._settled
        for other in self._grants:
            self.next_start = max(self.next_start, other.at) + self.interval


class Grant:
    """Permission for one call to start.

    Args:
        at: Time from which the call may start.
        begun: Whether the call has begun.
    """

    __slots__ = ("at", "begun")

    def __init__(self, at: float, begun: bool) -> None:
        self.at = at
        self.begun = begun
