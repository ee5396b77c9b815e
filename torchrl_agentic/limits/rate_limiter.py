"""`RateLimiter`, the rate limiter of one process."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

from torchrl_agentic.limits.base import Limiter, LimiterStats, ServiceLimits, make_breaker
from torchrl_agentic.limits.token_bucket import TokenBucket


class RateLimiter(Limiter):
    """Limits the concurrent calls, and the calls per second after an initial burst.

    Calls start in order of arrival, also between event loops and threads. A limiter belongs to the service it
    protects: share one object among all environments that use the service. Unpickling creates a new limiter
    with the same limits.

    The limits follow what callers record: `record_overload` (HTTP 429, 503) pauses all calls and halves the
    limits, at most once a second; each `record_success` raises them, up to the configured ones. With
    `break_after`, that many `record_failure` in a row open the circuit: calls raise `CircuitOpen` for
    `break_seconds`, then one trial call at a time runs.

    Args:
        max_concurrent: Largest number of calls at the same time; None for no limit.
        rate_per_second: Largest number of calls per second in the long run; None for no limit.
        burst: Number of calls that may start at once after a pause; `max(1, rate_per_second)` by default.
        break_after: Number of failures in a row that open the circuit; None for no circuit breaker.
        break_seconds: Time for which an open circuit refuses calls, in seconds.
        clock: Source of the time in seconds, for tests.
        call_later: Function that runs a callback after some seconds, as on an event loop; for tests.

    Raises:
        TypeError: If a limit is not a number.
        ValueError: If a limit is 0, negative or NaN, or `burst` is below 1 or comes without a rate.
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
        self.limits = ServiceLimits.of(max_concurrent, rate_per_second, burst)
        self._break: dict[str, Any] = {"break_after": break_after, "break_seconds": break_seconds}
        self._bucket = TokenBucket(max_concurrent or math.inf, rate_per_second or math.inf, self.burst)
        super().__init__(self._bucket, make_breaker(break_after, break_seconds), clock, call_later)

    @property
    def max_concurrent(self) -> int | None:
        """Largest number of calls at the same time, or None for no limit."""
        return self.limits.max_concurrent

    @property
    def rate_per_second(self) -> float | None:
        """Largest number of calls per second in the long run, or None for no limit."""
        return self.limits.rate_per_second

    @property
    def burst(self) -> float:
        """Number of calls that may start at once after a pause."""
        return self.limits.burst or 1.0

    def stats(self) -> LimiterStats:
        """Return counters, waiting times and current limits."""
        with self._lock:
            bucket, aimd = self._bucket, self._bucket.aimd
            rate = math.inf if bucket.interval == 0 else 1 / bucket.interval
            return self._stats(self._clock(), bucket.concurrent, rate, aimd.paused_until, aimd.overloads)

    def clone(self) -> RateLimiter:
        """Return a new limiter with the same limits, for another service."""
        make, arguments = self.__reduce__()
        return make(*arguments)

    def reduce_shared(self, name: str, over: Literal["ray", "machine"]) -> tuple[Any, ...]:
        """Return how to unpickle this limiter as a `ClusterRateLimiter` with the same limits.

        Args:
            name: Name of the service, under which all processes share the limits.
            over: What carries its leases; see `ClusterRateLimiter`.
        """
        from torchrl_agentic.limits.cluster import ClusterRateLimiter

        arguments: dict[str, Any] = {**asdict(self.limits), **self._break, "over": over}
        return (functools.partial(ClusterRateLimiter, **arguments), (name,))

    def __reduce__(self) -> tuple[Any, ...]:
        arguments: dict[str, Any] = {**asdict(self.limits), **self._break}
        return (functools.partial(RateLimiter, **arguments), ())

    def __repr__(self) -> str:
        return f"RateLimiter({self.limits})"
