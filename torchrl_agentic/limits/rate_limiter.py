"""The rate limiter of one process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from torchrl_agentic.limits.base import Limiter, LimiterStats, Limits, make_breaker
from torchrl_agentic.limits.token_bucket import Gate


class RateLimiter(Limiter):
    """At most `max_concurrent` calls at once, and `rate_per_second` starts a second after the first `burst`.

    None means no such limit; `burst` defaults to max(1, rate_per_second). First come, first served, also
    between event loops and threads. A limiter belongs to the service it protects: share one object among all
    environments that use it. A pickled limiter arrives as a new one with the same limits.

    It learns from what callers report: `overloaded` (HTTP 429, 503) pauses all and halves the limits, once a
    second at most; each `succeeded` lets them grow back, up to what was configured. With break_after, that
    many `failed` in a row open the circuit: calls raise `CircuitOpen` for break_seconds, then one at a time
    is tried.

    clock, call_later: where time comes from, for tests; `call_later(seconds, callback)` as on an event loop.

    Raises:
        TypeError: a limit is no number.
        ValueError: a limit is zero, negative or NaN, `burst` is below 1, or comes without a rate.
    """

    def __init__(
        self,
        *,
        max_concurrent: int | None = None,
        rate_per_second: float | None = None,
        burst: float | None = None,
        break_after: int | None = None,
        break_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], Any] | None = None,
    ) -> None:
        self.limits = Limits(max_concurrent, rate_per_second, burst)
        self._break = (break_after, break_seconds)
        self._own_gate = Gate(max_concurrent or math.inf, rate_per_second or math.inf, self.burst)
        super().__init__(self._own_gate, make_breaker(break_after, break_seconds), clock, call_later)

    @property
    def max_concurrent(self) -> int | None:
        """How many calls may be under way at once."""
        return self.limits.max_concurrent

    @property
    def rate_per_second(self) -> float | None:
        """How many calls may start in a second."""
        return self.limits.rate_per_second

    @property
    def burst(self) -> float:
        """How many calls may start at once after a time without any."""
        return self.limits.burst or 1.0

    def stats(self) -> LimiterStats:
        """Tell what is going on now, and how long calls have waited."""
        with self._lock:
            gate, now = self._own_gate, self._clock()
            return LimiterStats(
                gate.in_flight,
                len(self._line),
                self._granted,
                *self._quantiles(),
                gate.concurrent,
                math.inf if gate.interval == 0 else 1 / gate.interval,
                max(0.0, gate.adaptation.paused_until - now),
                gate.adaptation.overloads,
                "closed" if self._breaker is None else self._breaker.state(now),
                self._refused,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.limits, self._break))

    def __repr__(self) -> str:
        return f"RateLimiter({self.limits})"


def _rebuild(limits: Limits, breaking: tuple[int | None, float]) -> RateLimiter:
    return RateLimiter(
        max_concurrent=limits.max_concurrent,
        rate_per_second=limits.rate_per_second,
        burst=limits.burst,
        break_after=breaking[0],
        break_seconds=breaking[1],
    )
