"""`Limiter`, the base class of limiters: a first-come, first-served queue, emptied by a `Quota`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from torchrl_agentic.errors import InfrastructureError, check_above_zero, check_count, check_seconds
from torchrl_agentic.limits.token_bucket import Grant

if TYPE_CHECKING:
    from torchrl_agentic.limits.circuit_breaker import CircuitBreaker, CircuitOpen

logger = logging.getLogger(__name__)

WAITS_KEPT = 512
"""Number of the latest waits that the quantiles of `stats()` cover."""


class Quota(Protocol):
    """The rules for when a call may start.

    An implementation has no clock and knows no tasks; the limiter calls it under a lock. Times are in
    seconds, of any clock.

    Attributes:
        in_flight: Number of calls that have a grant.
    """

    in_flight: int

    def delay(self, now: float) -> float | None:
        """Return the seconds until the next call may start, or None if time alone does not help."""
        ...

    def grant(self, now: float, *, begun: bool = True) -> Grant:
        """Create a grant for one call.

        Args:
            now: Current time.
            begun: False if the call has waited in the queue, and still has to wake up.
        """
        ...

    def begin(self, grant: Grant) -> None:
        """Record that a call which had waited has begun."""
        ...

    def release(self) -> None:
        """Record that a call has ended."""
        ...

    def take_back(self, grant: Grant) -> None:
        """Undo a grant whose call never began."""
        ...

    def record_overload(self, now: float, retry_after: float | None) -> None:
        """Record that the service turned a call away.

        Args:
            now: Current time.
            retry_after: Pause that the service asked for, or None.
        """
        ...

    def record_success(self) -> None:
        """Record that the service answered a call."""
        ...


@dataclass(frozen=True, slots=True)
class LimiterStats:
    """Counters and current limits of a limiter.

    Attributes:
        in_flight: Number of running calls.
        waiting: Number of calls in the queue.
        granted: Number of calls that were let in so far.
        wait_p50_s: Median of the latest waits, in seconds; 0.0 before the first one.
        wait_p99_s: 99th percentile of the latest waits, in seconds.
        concurrent: Current limit of concurrent calls; infinite if there is no limit.
        per_second: Current limit of calls per second; infinite if there is no limit.
        paused_s: Remaining seconds of a pause, in which no call starts.
        overloads: Number of times that the service reported an overload.
        circuit: State of the circuit breaker; see `CircuitBreaker`.
        refused: Number of calls that an open circuit refused.
    """

    in_flight: int
    waiting: int
    granted: int
    wait_p50_s: float
    wait_p99_s: float
    concurrent: float = math.inf
    per_second: float = math.inf
    paused_s: float = 0.0
    overloads: int = 0
    circuit: Literal["closed", "open", "half_open"] = "closed"
    refused: int = 0


class Slot:
    """The right to run one call; `async with limiter.slot():` waits for it and returns it.

    Code that cannot use a `with` block calls `acquire` and `release`; a second `release` does nothing.

    Args:
        limiter: The limiter that the slot belongs to.

    Attributes:
        is_lost: True if the limiter withdrew the slot and cancelled its task, because other processes got
            this process's part of a shared limit.
    """

    __slots__ = ("_held", "_is_closed", "_limiter", "is_lost")

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._held = self._is_closed = False
        self.is_lost = False

    async def acquire(self) -> None:
        """Wait in the queue for the slot. A cancelled wait uses up nothing.

        Raises:
            CircuitOpen: If the circuit breaker refuses calls; see `CircuitBreaker`.
            RuntimeError: If the slot is held already, or was closed.
        """
        if not self.acquire_now():
            await self._limiter.wait()
            self._hold()
            if self._is_closed:  # meanwhile
                self.release()
                raise RuntimeError(CLOSED)

    def acquire_now(self) -> bool:
        """Take the slot if it is free and no call waits for one.

        Returns:
            True if the caller has the slot, and must call `release`.

        Raises:
            CircuitOpen: If the circuit breaker refuses calls; see `CircuitBreaker`.
            RuntimeError: If the slot is held already, or was closed.
        """
        if self._held or self._is_closed:
            raise RuntimeError(CLOSED if self._is_closed else "the slot is held already")
        if not self._limiter.try_acquire():
            return False
        self._hold()
        return True

    def _hold(self) -> None:
        self._held = True
        self._limiter.on_acquire(self)

    def release(self) -> None:
        """Return the slot; any thread may call it."""
        if self._held:
            self._held = False
            self._limiter.on_release(self)
            self._limiter.release()

    def close(self) -> None:
        """Release the slot for good, because its call has ended; acquiring it again raises RuntimeError."""
        self._is_closed = True
        self.release()

    def record(self, *, has_answered: bool, reason: str = "") -> None:
        """Record on the limiter how the call ended; call it before `release`.

        Args:
            has_answered: Whether the service answered.
            reason: Why it did not answer.
        """
        if self._held and not self.is_lost:
            if has_answered:
                self._limiter.record_success()
            else:
                self._limiter.record_failure(reason)

    def lose(self, task: asyncio.Task[Any]) -> None:
        """Cancel the task that holds the slot, unless it was released meanwhile. Runs on the task's loop."""
        if self._held:
            self.is_lost = True
            task.cancel()

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.release()
        if self.is_lost and kind is asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.uncancel() == 0:
                raise InfrastructureError(LOST) from None


CLOSED = "the call that this slot belongs to has ended"
LOST = "the contact to the shared limiter was lost, so that the call had to end"


class _Waiter:
    __slots__ = ("future", "grant", "loop", "since")

    def __init__(self, loop: asyncio.AbstractEventLoop, since: float) -> None:
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.since = since
        self.grant: Grant | None = None

    def wake(self, error: Exception | None = None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class Limiter(ABC):
    """Base class: lets calls start in order of arrival, over event loops and threads.

    Callers report the answers of the service with `record_success`, `record_overload` and `record_failure`.

    Args:
        quota: The rules for when a call may start.
        breaker: Circuit breaker, or None.
        clock: Source of the time in seconds, for tests.
        call_later: Function that runs a callback after some seconds, as on an event loop; for tests.
    """

    def __init__(
        self,
        quota: Quota,
        breaker: CircuitBreaker | None,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], Any] | None = None,
    ) -> None:
        self._quota = quota
        self._breaker = breaker
        self._clock = clock
        self._call_later = call_later
        self._lock = threading.Lock()
        self._queue: deque[_Waiter] = deque()
        self._waiting: Counter[asyncio.AbstractEventLoop] = Counter()
        self._timers: dict[asyncio.AbstractEventLoop | None, float] = {}  # the time that each one is set to
        self._granted = 0
        self._refused = 0
        self._waits: deque[float] = deque(maxlen=WAITS_KEPT)

    @abstractmethod
    def stats(self) -> LimiterStats:
        """Return counters, waiting times and current limits."""

    @property
    def circuit(self) -> Literal["closed", "open", "half_open"]:
        """State of the circuit breaker; see `CircuitBreaker.state`."""
        with self._lock:
            return "closed" if self._breaker is None else self._breaker.state(self._clock())

    def slot(self) -> Slot:
        """Return the right to run one call, as an async context manager."""
        return Slot(self)

    def try_acquire(self) -> bool:
        """Take a slot if one is free and the queue is empty.

        Returns:
            True if the caller has the slot, and must call `release`.

        Raises:
            CircuitOpen: If the circuit breaker refuses calls; see `CircuitBreaker`.
        """
        with self._lock:
            now = self._clock()
            if self._breaker is not None:
                self._check(self._breaker, now)
            if self._queue or self._delay(now) != 0.0:
                return False
            self._grant(now, 0.0)
            return True

    async def wait(self) -> None:
        """Wait in the queue for a slot. The caller must call `release` afterwards.

        Raises:
            CircuitOpen: If the circuit breaker refuses calls; see `CircuitBreaker`.
        """
        waiter = _Waiter(asyncio.get_running_loop(), self._clock())
        with self._lock:
            if self._breaker is not None:
                self._check(self._breaker, waiter.since)
            self._queue.append(waiter)
            self._waiting[waiter.loop] += 1
            self._serve()
        try:
            await waiter.future
        except (asyncio.CancelledError, GeneratorExit):  # GeneratorExit: the event loop has ended
            with self._lock:
                if waiter.grant is not None:
                    self._quota.take_back(waiter.grant)
                    self._granted -= 1
                    if self._breaker is not None:
                        self._breaker.end()
                elif waiter in self._queue:
                    self._queue.remove(waiter)
                    self._count_down(waiter)
                self._serve()
            raise
        with self._lock:
            assert waiter.grant is not None
            self._quota.begin(waiter.grant)

    def release(self) -> None:
        """Return a slot that `try_acquire` or `wait` took."""
        with self._lock:
            self._quota.release()
            if self._breaker is not None:
                self._breaker.end()
            self._serve()

    def record_success(self) -> None:
        """Record that the service answered; reduced limits grow back."""
        with self._lock:
            self._quota.record_success()
            if self._breaker is not None:
                self._breaker.record_success()
            self._serve()

    def record_overload(self, retry_after: float | None = None) -> None:
        """Record that the service was overloaded (HTTP 429, 503): pause, and halve the limits.

        Args:
            retry_after: Pause that the service asked for, in seconds; at most 60 are waited.
        """
        with self._lock:
            self._quota.record_overload(self._clock(), retry_after)
            if self._breaker is not None:
                self._breaker.record_success()  # an overloaded service is not a broken one
            self._serve()

    def record_failure(self, reason: str = "") -> None:
        """Record that the service did not answer, or returned an error; see `CircuitBreaker`.

        Args:
            reason: What it returned, or why it did not answer; logged if the circuit opens. The model does
                not read it, since it may be of another trajectory.
        """
        with self._lock:
            if self._breaker is not None and self._breaker.record_failure(self._clock()):
                logger.warning("a service failed repeatedly, and is not called for a while: %.300s", reason)
            self._serve()

    def on_acquire(self, slot: Slot) -> None:  # noqa: B027  an optional hook
        """Handle that a slot was acquired. The default does nothing."""

    def on_release(self, slot: Slot) -> None:  # noqa: B027
        """Handle that a slot was released. The default does nothing."""

    def on_starved(self) -> None:  # noqa: B027
        """Handle that a call waits for more than time. The lock is held. The default does nothing."""

    def _stats(
        self, now: float, concurrent: float, per_second: float, paused_until: float, overloads: int
    ) -> LimiterStats:
        """Return the figures with those that a subclass knows; called with the lock."""
        waits = sorted(self._waits)
        p50, p99 = (waits[int(q * (len(waits) - 1))] for q in (0.5, 0.99)) if waits else (0.0, 0.0)
        return LimiterStats(
            self._quota.in_flight,
            len(self._queue),
            self._granted,
            p50,
            p99,
            concurrent,
            per_second,
            max(0.0, paused_until - now),
            overloads,
            "closed" if self._breaker is None else self._breaker.state(now),
            self._refused,
        )

    def _check(self, breaker: CircuitBreaker, now: float) -> None:
        refusal = breaker.refusal(now)
        if refusal is not None:
            self._refused += 1
            raise _circuit_open(refusal)

    def _delay(self, now: float) -> float | None:
        if self._breaker is not None and self._breaker.holds(now):
            return None
        return self._quota.delay(now)

    def _grant(self, now: float, waited: float, *, begun: bool = True) -> Grant:
        if self._breaker is not None:
            self._breaker.begin(now)
        self._granted += 1
        self._waits.append(waited)
        return self._quota.grant(now, begun=begun)

    def _serve(self) -> None:
        """Start the calls that may start now, and set a timer for the next one. The lock is held."""
        while self._queue:
            head, now = self._queue[0], self._clock()
            refusal = None if self._breaker is None else self._breaker.refusal(now)
            delay = 0.0 if refusal is not None else self._delay(now)
            if delay is None:
                self.on_starved()
                return
            if delay > 0.0 and not head.loop.is_closed():
                self._arm(now + delay, delay)
                return
            self._queue.popleft()
            self._count_down(head)
            error = None if refusal is None else _circuit_open(refusal)
            try:
                head.loop.call_soon_threadsafe(head.wake, error)
            except RuntimeError:  # the event loop is closed, and its tasks with it
                continue
            if error is None:
                head.grant = self._grant(now, now - head.since, begun=False)
            else:
                self._refused += 1

    def _count_down(self, waiter: _Waiter) -> None:
        self._waiting[waiter.loop] -= 1
        if not self._waiting[waiter.loop]:
            del self._waiting[waiter.loop]

    def _arm(self, due: float, delay: float) -> None:
        """Set a timer on each event loop that has waiting calls, since any of them may be closed before."""
        if self._call_later is not None:
            if self._timers.get(None, math.inf) > due:
                self._timers[None] = due
                self._call_later(delay, functools.partial(self._on_time, None))
            return
        for loop in self._waiting:
            if self._timers.get(loop, math.inf) > due:
                with contextlib.suppress(RuntimeError):  # a closed loop: `_serve` skips its calls
                    loop.call_soon_threadsafe(loop.call_later, delay, functools.partial(self._on_time, loop))
                    self._timers[loop] = due

    def _on_time(self, loop: asyncio.AbstractEventLoop | None) -> None:
        with self._lock:
            self._timers.pop(loop, None)
            self._serve()


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits of a service, as `of` has checked them.

    Attributes:
        max_concurrent: Largest number of calls at the same time; None for no limit.
        rate_per_second: Largest number of calls per second in the long run; None for no limit.
        burst: Number of calls that may start at once after a pause; None without a rate.
    """

    max_concurrent: int | None
    rate_per_second: float | None
    burst: float | None

    @classmethod
    def of(
        cls,
        max_concurrent: int | None = None,
        rate_per_second: float | None = None,
        burst: float | None = None,
    ) -> ServiceLimits:
        """Return checked limits.

        Args:
            max_concurrent: Largest number of calls at the same time; None for no limit.
            rate_per_second: Largest number of calls per second in the long run; None or infinite for no
                limit.
            burst: Number of calls that may start at once after a pause. None stands for `rate_per_second`,
                but at least 1.

        Raises:
            TypeError: If an argument is not a number.
            ValueError: If an argument is 0, negative or NaN, or `burst` is below 1 or comes without a rate.
        """
        check_count("max_concurrent", max_concurrent)
        check_above_zero("rate_per_second", rate_per_second)
        check_above_zero("burst", burst, none="the default")
        rate = None if rate_per_second == math.inf else rate_per_second
        if burst is not None and rate is None:
            raise ValueError("burst requires rate_per_second")
        if burst is not None and burst < 1:
            raise ValueError(f"burst must be 1 or more, since no call could start with less; got {burst}")
        if rate is not None and burst is None:
            burst = max(1.0, rate)
        return cls(max_concurrent, rate, burst)

    def __str__(self) -> str:
        rate = f"rate_per_second={self.rate_per_second}, burst={self.burst}"
        return f"max_concurrent={self.max_concurrent}, {rate}"


def make_breaker(break_after: int | None, break_seconds: float) -> CircuitBreaker | None:
    """Create a circuit breaker.

    Args:
        break_after: Number of failures in a row that open the circuit, or None for no circuit breaker.
        break_seconds: Time for which an open circuit refuses calls, in seconds.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If a number is not above 0.
    """
    check_count("break_after", break_after)
    check_seconds("break_seconds", break_seconds, none="the default")
    if break_after is None:
        return None
    from torchrl_agentic.limits.circuit_breaker import CircuitBreaker  # few limiters have one

    return CircuitBreaker(int(break_after), break_seconds)


def _circuit_open(retry_after: float) -> CircuitOpen:
    from torchrl_agentic.limits.circuit_breaker import CircuitOpen

    return CircuitOpen(retry_after)
