"""A limiter that processes share, on one machine or over a Ray cluster; calls start without asking."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias

from torchrl_agentic.limits.base import Limiter, LimiterStats, Limits, Slot, make_breaker
from torchrl_agentic.limits.lease_client import ALIVE, RETRY, Lessee
from torchrl_agentic.limits.lease_server import Lease, LimitsDiffer, Report
from torchrl_agentic.limits.process_bound import ProcessBound
from torchrl_agentic.limits.ray_actor import RayTransport, is_initialised

logger = logging.getLogger(__name__)

LINGER_S = 5.0
"""How long the thread that reports stays when there is nothing to report."""


class Transport(Protocol):
    """What brings reports to the `LeaseServer` of one name."""

    def sync(self, report: Report, timeout: float) -> Lease:
        """Exchange a report for a lease; blocks.

        Raises:
            LimitsDiffer: others use the limiter with other limits.
            OSError: the server cannot be reached, or did not answer in time.
        """
        ...

    def close(self) -> None:
        """Hang up; a later `sync` calls again."""
        ...


Over: TypeAlias = Literal["ray", "machine"] | Transport | None


class ClusterRateLimiter(Limiter):
    """The limits of `RateLimiter`, kept by all processes that name the same limiter, together.

    Each holds a lease on a part of them, by what it needs (max-min fair), and starts calls without asking.
    The part of a process that dies is free again after `ttl` seconds. One that loses contact starts nothing
    from half of that time on, and cancels its calls before others get its part: InfrastructureError.

    name: of the service; limiters of other names share nothing. over: "ray", a named actor of the cluster;
    "machine", a socket of this machine; None: Ray where it is initialised. Or a `Transport` of your own.
    max_call_seconds: how long the service goes on with a call whose client has died, if it does.
    The rest is as for `RateLimiter`. A limiter that is unpickled elsewhere shares the limits.

    Raises:
        LimitsDiffer: a ValueError: others use this name with other limits.
        OSError: whoever gives out the leases cannot be reached.
        ValueError: limits that mean nothing.
    """

    def __init__(
        self,
        name: str,
        *,
        max_concurrent: int | None = None,
        rate_per_second: float | None = None,
        burst: float | None = None,
        ttl: float = 2.0,
        max_call_seconds: float = 0.0,
        break_after: int | None = None,
        break_seconds: float = 10.0,
        over: Over = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not name:
            raise ValueError("a shared limiter needs the name of the service that it protects")
        if not 0.05 <= ttl < math.inf:
            raise ValueError(f"ttl must be at least 0.05 seconds; got {ttl}")
        self.name = name
        self.limits = Limits(max_concurrent, rate_per_second, burst)
        self.ttl = ttl
        self.max_call_seconds = max_call_seconds
        self._break = (break_after, break_seconds)
        self._over: Over = _resolved(over)  # so that it is pickled with the limiter
        self._begun = ProcessBound[bool]()
        self._begin(clock)

    def _begin(self, clock: Callable[[], float]) -> None:
        """Start with nothing held, as a client of its own."""
        self._begun.set(True)
        self._lessee = Lessee(uuid.uuid4().hex, self.limits, self.ttl, self.max_call_seconds)
        super().__init__(self._lessee, make_breaker(*self._break), clock)
        self._changed = threading.Condition(self._lock)
        self._holders: dict[Slot, tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = {}
        self._thread: threading.Thread | None = None
        self._is_asleep = False
        self.reports = 0
        self._transport = _transport(self.name, self._over)
        # Not at exit, when our thread may still read: the connection ends with the process anyway.
        weakref.finalize(self, self._transport.close).atexit = False
        until = time.monotonic() + self.ttl
        while True:
            try:
                return self._exchange()
            except OSError:  # whoever gives out the leases may be about to be replaced
                if time.monotonic() >= until:
                    raise
                time.sleep(self.ttl * RETRY)

    def stats(self) -> LimiterStats:
        """Tell what is going on in this process, and the limits of all together at the moment."""
        with self._lock:
            gate, lease, now = self._lessee, self._lessee.lease, self._clock()
            return LimiterStats(
                gate.in_flight,
                len(self._line),
                self._granted,
                *self._quantiles(),
                math.inf if lease is None or lease.concurrent is None else lease.concurrent,
                math.inf if lease is None or lease.per_second is None else lease.per_second,
                max(0.0, gate.paused_until - now),
                0 if lease is None else lease.overloads,
                "closed" if self._breaker is None else self._breaker.state(now),
                self._refused,
            )

    def try_acquire(self) -> bool:
        """Take a slot of ours if one is free; whoever gets True owes a `release`. See `Limiter`."""
        if not self._begun.get():  # after a fork: the lease and the thread are the parent's
            self._begin(self._clock)
        return super().try_acquire()

    def taken(self, slot: Slot) -> None:
        """Remember who holds a slot, to cancel them if the lease is lost."""
        try:
            holder = (asyncio.get_running_loop(), asyncio.current_task())
        except RuntimeError:
            return
        with self._lock:
            self._holders[slot] = holder
            if self._is_asleep or self._thread is None:  # somebody has to keep the lease alive
                self._wake()

    def given_back(self, slot: Slot) -> None:
        """Forget who held a slot."""
        with self._lock:
            self._holders.pop(slot, None)

    def overloaded(self, retry_after: float | None = None) -> None:
        """Tell all who share the limits that the service has too much to do."""
        super().overloaded(retry_after)
        with self._lock:
            self._wake()

    def starved(self) -> None:
        """Ask for more, as soon as it is time. Locked."""
        if not self._lessee.is_starved:
            self._lessee.is_starved = True
            self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._keep_reporting, name="torchrl_agentic-lease", daemon=True
            )
            self._thread.start()
        self._changed.notify()

    def _keep_reporting(self) -> None:
        """Report whenever there is something to say, until there has been nothing for a while."""
        while True:
            with self._changed:
                due = self._lessee.due()
                if due is None or due > self._clock():
                    wait = LINGER_S if due is None else due - self._clock()
                    self._is_asleep = due is None
                    woken = self._changed.wait(wait)
                    self._is_asleep = False
                    if not woken and due is None and self._lessee.due() is None:
                        self._thread = None
                        return
                    continue
            self._check_contact()  # we may have stood still ourselves, and others have our part by now
            try:
                self._exchange()
            except LimitsDiffer as error:  # of a new server, to which others came first
                self._refuse_all(error)
            except OSError:
                self._check_contact()
            except Exception:  # a bug of a transport; without this thread, calls would wait for ever
                logger.exception("the limiter %s could not report", self.name)
                self._check_contact()

    def _exchange(self) -> None:
        """Send a report, and take what comes back.

        Raises:
            LimitsDiffer: see there. OSError: there was no answer in time.
        """
        lessee = self._lessee
        with self._lock:
            report = lessee.report(self._clock(), len(self._line))
        self.reports += 1
        lease = self._transport.sync(report, self.ttl * ALIVE)
        with self._lock:
            lessee.take(lease, self._clock())
            self._serve()

    def _check_contact(self) -> None:
        """Cancel what runs once others may get our part of the limits."""
        with self._lock:
            if not self._lessee.has_lost(self._clock()):
                return
            holders, self._holders = self._holders, {}
        for slot, (loop, task) in holders.items():
            if task is not None:
                with contextlib.suppress(RuntimeError):  # its event loop is closed
                    loop.call_soon_threadsafe(slot.lose, task)

    def _refuse_all(self, error: Exception) -> None:
        with self._lock:
            self._lessee.answered, self._lessee.is_starved = self._lessee.tried, False
            line = list(self._line)
            self._line.clear()
            for waiter in line:
                self._left(waiter)
                with contextlib.suppress(RuntimeError):
                    waiter.loop.call_soon_threadsafe(waiter.wake, error)

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = {
            "max_concurrent": self.limits.max_concurrent,
            "rate_per_second": self.limits.rate_per_second,
            "burst": self.limits.burst if self.limits.rate_per_second is not None else None,
            "ttl": self.ttl,
            "max_call_seconds": self.max_call_seconds,
            "break_after": self._break[0],
            "break_seconds": self._break[1],
            "over": self._over,
        }
        return (_rebuild, (self.name, arguments))

    def __repr__(self) -> str:
        return f"ClusterRateLimiter({self.name!r}, {self.limits})"


def _rebuild(name: str, arguments: dict[str, Any]) -> ClusterRateLimiter:
    return ClusterRateLimiter(name, **arguments)


def _resolved(over: Over) -> Over:
    if over is not None:
        return over
    return "ray" if is_initialised() else "machine"


def _transport(name: str, over: Over) -> Transport:
    if over == "ray":
        return RayTransport(name)
    if over == "machine":
        from torchrl_agentic.limits.unix_socket import MachineTransport

        return MachineTransport(name)
    if over is None or isinstance(over, str):
        raise ValueError(f"a shared limiter goes over 'ray' or 'machine'; got {over!r}")
    return over
