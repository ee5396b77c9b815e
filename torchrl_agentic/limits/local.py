"""The rate limiter of one process: decisions in `Gate`, which is pure, and the waiting in `RateLimiter`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WAITS_KEPT = 512
"""How many of the latest waits the quantiles of `stats()` are over."""


class Gate:
    """At most `concurrent` calls in flight, and `per_second` starts a second after a burst.

    Time comes in as a number. The bucket is one number, the time from which the next call may start (virtual
    scheduling, ITU-T I.371): a start moves it on by one interval, and it may lie up to `burst - 1` intervals
    ahead.
    """

    __slots__ = ("_grants", "_settled", "concurrent", "in_flight", "interval", "next_start", "slack")

    def __init__(self, concurrent: float, per_second: float, burst: float) -> None:
        self.concurrent = concurrent
        self.interval = 1.0 / per_second
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
        wait = self.next_start - self.slack - now
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


@dataclass(frozen=True, slots=True)
class LimiterStats:
    """What a limiter is doing.

    wait_p50_s, wait_p99_s: seconds, over the latest waits; 0.0 before the first.
    """

    in_flight: int
    waiting: int
    granted: int
    wait_p50_s: float
    wait_p99_s: float


class Slot:
    """The right to run one call; `async with limiter.slot():` waits for it and gives it back.

    Whoever cannot use a `with` block calls `acquire` and `release`; a second `release` does nothing.
    """

    __slots__ = ("_held", "_limiter")

    def __init__(self, limiter: RateLimiter) -> None:
        self._limiter = limiter
        self._held = False

    async def acquire(self) -> None:
        """Wait in line. A cancelled wait takes nothing with it."""
        if not self._limiter.try_acquire():
            await self._limiter.wait()
        self._held = True

    def release(self) -> None:
        """Give slot back; any thread may do it."""
        if self._held:
            self._held = False
            self._limiter.release()

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()


class _Waiter:
    __slots__ = ("future", "granted", "loop", "since")

    def __init__(self, loop: asyncio.AbstractEventLoop, since: float) -> None:
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.since = since
        self.granted: Grant | None = None

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class RateLimiter:
    """At most `max_concurrent` calls at once, and `rate_per_second` starts a second after the first `burst`.

    None means no such limit; `burst` defaults to max(1, rate_per_second). First come, first served, also
    between event loops and threads. A limiter belongs to the service it protects: share one object among all
    environments that use it. A pickled limiter arrives as a new one with the same limits.

    clock, call_later: where time comes from, for tests; `call_later(seconds, callback)` as on an event loop.

    Raises:
        ValueError: a limit is zero, negative or NaN, `burst` is below 1, or comes without a rate.
    """

    def __init__(
        self,
        *,
        max_concurrent: int | None = None,
        rate_per_second: float | None = None,
        burst: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], Any] | None = None,
    ) -> None:
        # Written so that NaN, of which every comparison is false, is refused too.
        if max_concurrent is not None and not (max_concurrent >= 1 and max_concurrent == int(max_concurrent)):
            raise ValueError(f"max_concurrent must be 1 or more, and whole, or None; got {max_concurrent}")
        if rate_per_second is not None and not rate_per_second > 0:
            raise ValueError(f"rate_per_second must be above 0, or None for no limit; got {rate_per_second}")
        if burst is not None and rate_per_second is None:
            raise ValueError("burst has a meaning only together with rate_per_second")
        if burst is not None and not burst >= 1:
            raise ValueError(
                f"burst must be 1 or more: a burst of less would never let a call start; got {burst}"
            )
        self.max_concurrent = max_concurrent
        self.rate_per_second = rate_per_second
        self.burst = burst if burst is not None else max(1.0, rate_per_second or 1.0)
        self._gate = Gate(max_concurrent or math.inf, rate_per_second or math.inf, self.burst)
        self._clock = clock
        self._call_later = call_later
        self._lock = threading.Lock()
        self._line: deque[_Waiter] = deque()
        self._waiting: Counter[asyncio.AbstractEventLoop] = Counter()
        self._timers: dict[asyncio.AbstractEventLoop | None, float] = {}  # when each will ring
        self._granted = 0
        self._waits: deque[float] = deque(maxlen=WAITS_KEPT)

    def slot(self) -> Slot:
        """Give the right to run one call, as an async context manager."""
        return Slot(self)

    def try_acquire(self) -> bool:
        """Take a slot if one is free and nobody stands in line; whoever gets True owes a `release`."""
        with self._lock:
            now = self._clock()
            if self._line or self._gate.delay(now) != 0.0:
                return False
            self._gate.grant(now)
            self._granted += 1
            self._waits.append(0.0)
            return True

    async def wait(self) -> None:
        """Stand in line until a slot is ours; whoever returns from it owes a `release`."""
        waiter = _Waiter(asyncio.get_running_loop(), self._clock())
        with self._lock:
            self._line.append(waiter)
            self._waiting[waiter.loop] += 1
            self._serve()
        try:
            await waiter.future
        except asyncio.CancelledError:
            with self._lock:
                if waiter.granted is not None:
                    self._gate.take_back(waiter.granted)
                    self._granted -= 1
                elif waiter in self._line:
                    self._line.remove(waiter)
                    self._left(waiter)
                self._serve()
            raise
        with self._lock:
            assert waiter.granted is not None
            self._gate.begin(waiter.granted)

    def release(self) -> None:
        """Give back what `try_acquire` or `wait` took."""
        with self._lock:
            self._gate.release()
            self._serve()

    def stats(self) -> LimiterStats:
        """Tell what is going on now, and how long calls have waited."""
        with self._lock:
            waits = sorted(self._waits)
            p50, p99 = (waits[int(q * (len(waits) - 1))] for q in (0.5, 0.99)) if waits else (0.0, 0.0)
            return LimiterStats(self._gate.in_flight, len(self._line), self._granted, p50, p99)

    def _serve(self) -> None:
        """Let in who may start now; have the line looked at again when the head's time comes. Locked."""
        while self._line:
            head, now = self._line[0], self._clock()
            delay = self._gate.delay(now)
            if delay is None:
                return
            if delay > 0.0 and not head.loop.is_closed():
                self._arm(now + delay, delay)
                return
            self._line.popleft()
            self._left(head)
            try:
                head.loop.call_soon_threadsafe(head.wake)
            except RuntimeError:  # its event loop is closed: nobody waits there any more
                continue
            head.granted = self._gate.grant(now, begun=False)
            self._granted += 1
            self._waits.append(now - head.since)

    def _left(self, waiter: _Waiter) -> None:
        self._waiting[waiter.loop] -= 1
        if not self._waiting[waiter.loop]:
            del self._waiting[waiter.loop]

    def _arm(self, due: float, delay: float) -> None:
        """Set a timer on each event loop that somebody waits on: any of them may be closed meanwhile."""
        if self._call_later is not None:
            if self._timers.get(None, math.inf) > due:
                self._timers[None] = due
                self._call_later(delay, functools.partial(self._on_time, None))
            return
        for loop in self._waiting:
            if self._timers.get(loop, math.inf) > due:
                with contextlib.suppress(RuntimeError):  # closed: those who wait there are passed over
                    loop.call_soon_threadsafe(loop.call_later, delay, functools.partial(self._on_time, loop))
                    self._timers[loop] = due

    def _on_time(self, loop: asyncio.AbstractEventLoop | None) -> None:
        with self._lock:
            self._timers.pop(loop, None)
            self._serve()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.max_concurrent, self.rate_per_second, self.burst))

    def __repr__(self) -> str:
        rate = f"rate_per_second={self.rate_per_second}, burst={self.burst}"
        return f"RateLimiter(max_concurrent={self.max_concurrent}, {rate})"


def _rebuild(max_concurrent: int | None, rate: float | None, burst: float) -> RateLimiter:
    return RateLimiter(
        max_concurrent=max_concurrent, rate_per_second=rate, burst=None if rate is None else burst
    )
