"""What every limiter is: a line, first come, first served, that a gate lets calls out of."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from torchrl_agentic.errors import InfrastructureError, check_above_zero, check_count, check_seconds
from torchrl_agentic.limits.circuit_breaker import Breaker, CircuitOpen
from torchrl_agentic.limits.token_bucket import Grant

WAITS_KEPT = 512
"""How many of the latest waits the quantiles of `stats()` are over."""


class AnyGate(Protocol):
    """What decides when a call may start; it knows no clock and no tasks, and is called under a lock."""

    in_flight: int

    def delay(self, now: float) -> float | None:
        """Seconds until the next call may start; None: something else has to happen first."""
        ...

    def grant(self, now: float, *, begun: bool = True) -> Grant:
        """Let a call in."""
        ...

    def begin(self, granted: Grant) -> None:
        """Take note that a call that had waited has begun."""
        ...

    def release(self) -> None:
        """Take note that a call has ended."""
        ...

    def take_back(self, granted: Grant) -> None:
        """Undo a grant of a call that never began."""
        ...

    def overloaded(self, now: float, retry_after: float | None) -> None:
        """Take note that the service turned a call away."""
        ...

    def succeeded(self) -> None:
        """Take note that a call went well."""
        ...


@dataclass(frozen=True, slots=True)
class LimiterStats:
    """What a limiter is doing.

    wait_p50_s, wait_p99_s: seconds, over the latest waits; 0.0 before the first. concurrent, per_second: the
    limits at the moment, infinite where there are none. paused_s: how long nothing starts from now on.
    overloads: how often the service said that it has too much to do. circuit: see `Breaker`. refused: calls
    that an open circuit kept away.
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
    """The right to run one call; `async with limiter.slot():` waits for it and gives it back.

    Whoever cannot use a `with` block calls `acquire` and `release`; a second `release` does nothing.
    is_lost: the limiter took it away, and cancelled who held it: its part of a shared limit went to others.
    """

    __slots__ = ("_held", "_limiter", "is_lost")

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._held = False
        self.is_lost = False

    async def acquire(self) -> None:
        """Wait in line. A cancelled wait takes nothing with it.

        Raises:
            CircuitOpen: the service does not work, see `Breaker`.
        """
        if not self._limiter.try_acquire():
            await self._limiter.wait()
        self._held = True
        self._limiter.taken(self)

    def release(self) -> None:
        """Give slot back; any thread may do it."""
        if self._held:
            self._held = False
            self._limiter.given_back(self)
            self._limiter.release()

    def lose(self, task: asyncio.Task[Any]) -> None:
        """Cancel who holds the slot, on its event loop, unless it has been given back meanwhile."""
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


LOST = "contact to the shared limiter was lost, and with it the right to go on"


class _Waiter:
    __slots__ = ("future", "granted", "loop", "since")

    def __init__(self, loop: asyncio.AbstractEventLoop, since: float) -> None:
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.since = since
        self.granted: Grant | None = None

    def wake(self, error: Exception | None = None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class Limiter(ABC):
    """Lets calls start when its gate says so: first come, first served, over event loops and threads.

    What a service answers is told to it by `succeeded`, `overloaded` and `failed`, by whoever called.
    clock, call_later: where time comes from, for tests; `call_later(seconds, callback)` as on an event loop.
    """

    def __init__(
        self,
        gate: AnyGate,
        breaker: Breaker | None,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], Any] | None = None,
    ) -> None:
        self._gate = gate
        self._breaker = breaker
        self._clock = clock
        self._call_later = call_later
        self._lock = threading.Lock()
        self._line: deque[_Waiter] = deque()
        self._waiting: Counter[asyncio.AbstractEventLoop] = Counter()
        self._timers: dict[asyncio.AbstractEventLoop | None, float] = {}  # when each will ring
        self._granted = 0
        self._refused = 0
        self._waits: deque[float] = deque(maxlen=WAITS_KEPT)

    @abstractmethod
    def stats(self) -> LimiterStats:
        """Tell what is going on now, and how long calls have waited."""

    @property
    def circuit(self) -> Literal["closed", "open", "half_open"]:
        """Whether calls are let through, refused, or tried one at a time; see `Breaker`."""
        with self._lock:
            return "closed" if self._breaker is None else self._breaker.state(self._clock())

    def slot(self) -> Slot:
        """Give the right to run one call, as an async context manager."""
        return Slot(self)

    def try_acquire(self) -> bool:
        """Take a slot if one is free and nobody stands in line; whoever gets True owes a `release`.

        Raises:
            CircuitOpen: the service does not work, see `Breaker`.
        """
        with self._lock:
            now = self._clock()
            if self._breaker is not None:
                self._check(self._breaker, now)
            if self._line or self._delay(now) != 0.0:
                return False
            self._let_in(now, 0.0)
            return True

    async def wait(self) -> None:
        """Stand in line until a slot is ours; whoever returns from it owes a `release`.

        Raises:
            CircuitOpen: the service does not work, see `Breaker`.
        """
        waiter = _Waiter(asyncio.get_running_loop(), self._clock())
        with self._lock:
            if self._breaker is not None:
                self._check(self._breaker, waiter.since)
            self._line.append(waiter)
            self._waiting[waiter.loop] += 1
            self._serve()
        try:
            await waiter.future
        except (asyncio.CancelledError, GeneratorExit):  # the second: its event loop has ended
            with self._lock:
                if waiter.granted is not None:
                    self._gate.take_back(waiter.granted)
                    self._granted -= 1
                    if self._breaker is not None:
                        self._breaker.end()
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
            if self._breaker is not None:
                self._breaker.end()
            self._serve()

    def succeeded(self) -> None:
        """Tell that the service answered as it should: limits that were cut grow back."""
        with self._lock:
            self._gate.succeeded()
            if self._breaker is not None:
                self._breaker.succeeded()
            self._serve()

    def overloaded(self, retry_after: float | None = None) -> None:
        """Tell that the service had too much to do (HTTP 429, 503): pause, and go on with half of the limits.

        retry_after: seconds that the service asked for; 60 at most are waited.
        """
        with self._lock:
            self._gate.overloaded(self._clock(), retry_after)
            if self._breaker is not None:
                self._breaker.succeeded()  # it is there, and says so
            self._serve()

    def failed(self) -> None:
        """Tell that the service did not answer, or not as it should; see `Breaker`."""
        with self._lock:
            if self._breaker is not None:
                self._breaker.failed(self._clock())
            self._serve()

    def taken(self, slot: Slot) -> None:  # noqa: B027  only those that can take slots away want to know
        """Take note of who holds a slot."""

    def given_back(self, slot: Slot) -> None:  # noqa: B027
        """Take note that a slot is not held any more."""

    def starved(self) -> None:  # noqa: B027
        """Take note that somebody waits, and that time alone does not help. Locked."""

    def _quantiles(self) -> tuple[float, float]:
        waits = sorted(self._waits)
        p50, p99 = (waits[int(q * (len(waits) - 1))] for q in (0.5, 0.99)) if waits else (0.0, 0.0)
        return p50, p99

    def _check(self, breaker: Breaker, now: float) -> None:
        refusal = breaker.refusal(now)
        if refusal is not None:
            self._refused += 1
            raise CircuitOpen(refusal)

    def _delay(self, now: float) -> float | None:
        if self._breaker is not None and self._breaker.holds(now):
            return None
        return self._gate.delay(now)

    def _let_in(self, now: float, waited: float, *, begun: bool = True) -> Grant:
        if self._breaker is not None:
            self._breaker.begin(now)
        self._granted += 1
        self._waits.append(waited)
        return self._gate.grant(now, begun=begun)

    def _serve(self) -> None:
        """Let in who may start now; have the line looked at again when the head's time comes. Locked."""
        while self._line:
            head, now = self._line[0], self._clock()
            refusal = None if self._breaker is None else self._breaker.refusal(now)
            delay = 0.0 if refusal is not None else self._delay(now)
            if delay is None:
                self.starved()
                return
            if delay > 0.0 and not head.loop.is_closed():
                self._arm(now + delay, delay)
                return
            self._line.popleft()
            self._left(head)
            error = None if refusal is None else CircuitOpen(refusal)
            try:
                head.loop.call_soon_threadsafe(head.wake, error)
            except RuntimeError:  # its event loop is closed: nobody waits there any more
                continue
            if error is None:
                head.granted = self._let_in(now, now - head.since, begun=False)
            else:
                self._refused += 1

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


@dataclass(frozen=True, slots=True)
class _LimitsFields:
    """Stored fields of `Limits`; see `messages._ToolResultFields` for why they have a class of their own."""

    max_concurrent: int | None
    rate_per_second: float | None
    burst: float | None


@dataclass(frozen=True, init=False)
class Limits(_LimitsFields):
    """Limits of a service.

    Args:
        max_concurrent: Largest number of calls at the same time; None for no limit.
        rate_per_second: Largest number of calls per second in the long run; None or infinite for no limit.
        burst: Number of calls that may start at once after a pause. None stands for `rate_per_second`, but at
            least 1.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is 0, negative or NaN, or `burst` is below 1 or comes without a rate.
    """

    __slots__ = ()

    def __init__(
        self,
        max_concurrent: int | None = None,
        rate_per_second: float | None = None,
        burst: float | None = None,
    ) -> None:
        check_count("max_concurrent", max_concurrent)
        check_above_zero("rate_per_second", rate_per_second)
        check_above_zero("burst", burst, none="the default")
        rate = None if rate_per_second == math.inf else rate_per_second
        if burst is not None and rate is None:
            raise ValueError("burst has a meaning only together with rate_per_second")
        if burst is not None and burst < 1:
            raise ValueError(
                f"burst must be 1 or more: a burst of less would never let a call start; got {burst}"
            )
        if rate is not None and burst is None:
            burst = max(1.0, rate)
        super().__init__(max_concurrent, rate, burst)

    def __str__(self) -> str:
        rate = f"rate_per_second={self.rate_per_second}, burst={self.burst}"
        return f"max_concurrent={self.max_concurrent}, {rate}"


def make_breaker(break_after: int | None, break_seconds: float) -> Breaker | None:
    """Make what keeps calls from a broken service; None: nothing does.

    Raises:
        TypeError: one is no number.
        ValueError: a number that is not above 0.
    """
    check_count("break_after", break_after)
    check_seconds("break_seconds", break_seconds, none="the default")
    if break_after is None:
        return None
    return Breaker(int(break_after), break_seconds)
