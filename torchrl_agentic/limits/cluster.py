"""A limiter that processes of one machine or Ray cluster share; calls start without any message."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal, Protocol, TypeAlias

from torchrl_agentic.errors import check_posix
from torchrl_agentic.limits.base import Limiter, LimiterStats, ServiceLimits, Slot, make_breaker
from torchrl_agentic.limits.lease_client import ALIVE, RETRY, LeaseClient
from torchrl_agentic.limits.lease_server import Lease, LeaseRequest, LimitsDiffer
from torchrl_agentic.limits.process_bound import ProcessBound
from torchrl_agentic.limits.ray_actor import RayTransport, is_initialised

logger = logging.getLogger(__name__)

LINGER_S = 5.0
"""Seconds for which the reporting thread stays alive without anything to report."""


class Transport(Protocol):
    """Carries requests to the `LeaseServer` of one service."""

    def sync(self, request: LeaseRequest, timeout: float) -> Lease:
        """Send a request and return the lease. Blocks.

        Args:
            request: State and demand of this process.
            timeout: Longest time to wait for the answer, in seconds.

        Raises:
            LimitsDiffer: If other processes use the limiter with other limits.
            OSError: If the server cannot be reached, or did not answer in time.
        """
        ...

    def close(self) -> None:
        """Close the connection; a later `sync` opens a new one."""
        ...


Over: TypeAlias = Literal["ray", "machine"] | Transport | None


class ClusterRateLimiter(Limiter):
    """The limits of `RateLimiter`, shared by all processes that use the same name.

    Each process holds a lease on a part of the limits, divided by demand (max-min fair), and starts calls
    without asking. The part of a process that dies is free again after `ttl` seconds. A process that loses
    contact starts no calls from half of that time on, and cancels its running calls with InfrastructureError
    before others get its part. An unpickled limiter shares the limits.

    Args:
        name: Name of the service. Limiters with other names share nothing.
        max_concurrent: Largest number of calls of all processes at the same time; None for no limit.
        rate_per_second: Largest number of calls per second in the long run; None for no limit.
        burst: Number of calls that may start at once after a pause; `max(1, rate_per_second)` by default.
        ttl: Time after which a silent process loses its part, in seconds; at least 0.05.
        max_call_seconds: Longest time that the service continues a call whose client has died.
        break_after: Number of failures in a row that open the circuit of this process; None for no circuit
            breaker.
        break_seconds: Time for which an open circuit refuses calls, in seconds.
        over: "ray" for a named actor of the cluster, "machine" for a socket of this machine, or a
            `Transport`. None uses Ray where it is initialised, and this machine otherwise.
        clock: Source of the time in seconds, for tests.

    Attributes:
        requests: Number of requests to the lease server so far.

    Raises:
        LimitsDiffer: If other processes use this name with other limits. It is a ValueError.
        OSError: If the lease server cannot be reached.
        ValueError: If a limit is invalid.
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
            raise ValueError(
                "name must be the name of the service that the limiter protects; got an empty one"
            )
        if not 0.05 <= ttl < math.inf:
            raise ValueError(f"ttl must be finite and at least 0.05 seconds; got {ttl}")
        self.name = name
        self.limits = ServiceLimits.of(max_concurrent, rate_per_second, burst)
        self.ttl = ttl
        self.max_call_seconds = max_call_seconds
        self._break: dict[str, Any] = {"break_after": break_after, "break_seconds": break_seconds}
        self._over: Over = _resolved(over)  # resolved now, because it is pickled with the limiter
        self._begun = ProcessBound[bool]()
        self._begin(clock)

    def _begin(self, clock: Callable[[], float]) -> None:
        """Start as a new client that holds nothing."""
        self._begun.set(True)
        self._client = LeaseClient(uuid.uuid4().hex, self.limits, self.ttl, self.max_call_seconds)
        super().__init__(self._client, make_breaker(**self._break), clock)
        self._changed = threading.Condition(self._lock)
        self._holders: dict[Slot, tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = {}
        self._thread: threading.Thread | None = None
        self._is_asleep = False
        self.requests = 0
        self._transport = _transport(self.name, self._over)
        # Not at exit, when our thread may still read; the connection ends with the process anyway.
        weakref.finalize(self, self._transport.close).atexit = False
        until = time.monotonic() + self.ttl
        while True:
            try:
                return self._exchange()
            except OSError:  # another process may be about to replace the lease server
                if time.monotonic() >= until:
                    raise
                time.sleep(self.ttl * RETRY)

    def stats(self) -> LimiterStats:
        """Return the counters of this process, and the current limits of all processes together."""
        with self._lock:
            lease = self._client.lease
            return self._stats(
                self._clock(),
                math.inf if lease is None or lease.concurrent is None else lease.concurrent,
                math.inf if lease is None or lease.per_second is None else lease.per_second,
                self._client.paused_until,
                0 if lease is None else lease.overloads,
            )

    def try_acquire(self) -> bool:
        """Take a slot of this process if one is free; see `Limiter`."""
        if not self._begun.get():  # after a fork: the lease and the thread are the parent's
            self._begin(self._clock)
        return super().try_acquire()

    def on_acquire(self, slot: Slot) -> None:
        """Remember the task that holds a slot, to cancel it if the lease is lost."""
        try:
            holder = (asyncio.get_running_loop(), asyncio.current_task())
        except RuntimeError:
            return
        with self._lock:
            self._holders[slot] = holder
            if self._is_asleep or self._thread is None:  # the lease has to be kept alive
                self._wake()

    def on_release(self, slot: Slot) -> None:
        """Forget the task that held a slot."""
        with self._lock:
            self._holders.pop(slot, None)

    def record_overload(self, retry_after: float | None = None) -> None:
        """Record that the service was overloaded, and tell the other processes."""
        super().record_overload(retry_after)
        with self._lock:
            self._wake()

    def on_starved(self) -> None:
        """Ask for more as soon as possible. The lock is held."""
        if not self._client.is_starved:
            self._client.is_starved = True
            self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._keep_reporting, name="torchrl_agentic-lease", daemon=True
            )
            self._thread.start()
        self._changed.notify()

    def _keep_reporting(self) -> None:
        """Send requests when they are due, until none has been due for a while."""
        while True:
            with self._changed:
                due = self._client.due()
                if due is None or due > self._clock():
                    wait = LINGER_S if due is None else due - self._clock()
                    self._is_asleep = due is None
                    woken = self._changed.wait(wait)
                    self._is_asleep = False
                    if not woken and due is None and self._client.due() is None:
                        self._thread = None
                        return
                    continue
            self._check_contact()  # this process may have been stopped, and have lost its part
            try:
                self._exchange()
            except LimitsDiffer as error:  # a new server, which others reached first
                self._refuse_all(error)
            except OSError:
                self._check_contact()
            except Exception:  # a bug of a transport; without this thread, calls would wait forever
                logger.exception("the limiter %s could not report to its lease server", self.name)
                self._check_contact()

    def _exchange(self) -> None:
        """Send a request, and apply the lease.

        Raises:
            LimitsDiffer: If a new server has other limits.
            OSError: If there was no answer in time.
        """
        client = self._client
        with self._lock:
            request = client.make_request(self._clock(), len(self._queue))
        self.requests += 1
        try:
            lease = self._transport.sync(request, self.ttl * ALIVE)
        except LimitsDiffer as error:
            raise LimitsDiffer(f"the limiter {self.name!r}: {error}") from None
        with self._lock:
            client.take(lease, self._clock())
            self._serve()

    def _check_contact(self) -> None:
        """Cancel the running calls if others may soon get our part of the limits."""
        with self._lock:
            if not self._client.has_lost(self._clock()):
                return
            holders, self._holders = self._holders, {}
        for slot, (loop, task) in holders.items():
            if task is not None:
                with contextlib.suppress(RuntimeError):  # its event loop is closed
                    loop.call_soon_threadsafe(slot.lose, task)

    def _refuse_all(self, error: Exception) -> None:
        with self._lock:
            self._client.answered, self._client.is_starved = self._client.tried, False
            line = list(self._queue)
            self._queue.clear()
            for waiter in line:
                self._count_down(waiter)
                with contextlib.suppress(RuntimeError):
                    waiter.loop.call_soon_threadsafe(waiter.wake, error)

    def holds_over(self, over: Literal["ray", "machine"]) -> bool:
        """Return whether the limits hold for all processes of a Ray cluster, or of this machine.

        Args:
            over: "ray" or "machine".
        """
        return over == "machine" or self._over != "machine"

    def __reduce__(self) -> tuple[Any, ...]:
        arguments: dict[str, Any] = {
            **asdict(self.limits),
            **self._break,
            "ttl": self.ttl,
            "max_call_seconds": self.max_call_seconds,
            "over": self._over,
        }
        return (functools.partial(ClusterRateLimiter, **arguments), (self.name,))

    def __repr__(self) -> str:
        return f"ClusterRateLimiter({self.name!r}, {self.limits})"


def _resolved(over: Over) -> Over:
    if over is not None:
        return over
    return "ray" if is_initialised() else "machine"


def _transport(name: str, over: Over) -> Transport:
    if over == "ray":
        return RayTransport(name)
    if over == "machine":
        check_posix("ClusterRateLimiter over the processes of a machine")
        from torchrl_agentic.limits.unix_socket import UnixSocketTransport

        return UnixSocketTransport(name)
    if over is None or isinstance(over, str):
        raise ValueError(f"over must be 'ray', 'machine', None or a Transport; got {over!r}")
    return over
