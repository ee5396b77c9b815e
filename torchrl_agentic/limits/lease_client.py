"""A client of the `LeaseServer`: which calls it may start, and when to ask again. It does no I/O."""

from __future__ import annotations

import math
from collections import deque

from torchrl_agentic.limits.base import ServiceLimits
from torchrl_agentic.limits.lease_server import Lease, LeaseRequest
from torchrl_agentic.limits.token_bucket import MAX_PAUSE_S, Grant

STOP, CANCEL = 0.5, 0.8
"""Parts of `ttl_s` without contact after which no call starts, and running calls are cancelled."""
ALIVE, RETRY = 1 / 8, 1 / 16
"""Parts of `ttl_s` after which a client repeats its request, and after which it retries a failed one."""
LATE_S = 0.25
"""Seconds after which an unused start expires, so that saved starts never come all at once."""


class LeaseClient:
    """A `Quota` that lets calls in as far as its lease goes. All times are in seconds, of any clock.

    Args:
        name: Unique name of the client.
        limits: Limits of the service.
        ttl_s: Time without contact after which the server takes back a lease.
        call_s: Longest time that the service continues a call whose client has died.

    Attributes:
        held: Number of calls that may run at once.
        target: Number to which `held` has to fall.
        in_flight: Number of running calls.
        peak: Largest number of concurrent calls since the last request.
        used: Number of calls started since the last request.
        lease: The latest lease, or None.
        is_starved: Whether calls wait for an answer of the server.
    """

    def __init__(self, name: str, limits: ServiceLimits, ttl_s: float, call_s: float = 0.0) -> None:
        self.name, self.limits, self.ttl_s, self.call_s = name, limits, ttl_s, call_s
        self.has_slots = limits.max_concurrent is not None
        self.has_rate = limits.rate_per_second is not None
        self.held = self.target = 0
        self.in_flight = self.peak = self.used = 0
        self.starts: deque[float] = deque()
        self.lease: Lease | None = None
        self.valid_until = self.paused_until = -math.inf
        self.successes = self.overloads = 0
        self.retry_after: float | None = None
        self._reported = (0, 0)  # successes and overloads in the last request
        self.is_starved = False
        self.is_unmet = False  # the last lease had less than its request asked for
        self.asked = self.asked_starts = 0
        self.tried = -math.inf  # time of the last request
        self.answered = -math.inf  # time of the last request that was answered
        self.number = 0

    def delay(self, now: float) -> float | None:
        """Return the seconds until the next call may start, or None if the lease allows no more."""
        # Slots above `target` are not used again, so that the next request can return them to others.
        if now >= self.valid_until or (self.has_slots and self.in_flight >= min(self.held, self.target)):
            return None
        start = self.paused_until
        if self.has_rate:
            while self.starts and self.starts[0] < now - LATE_S:
                self.starts.popleft()
            if not self.starts:
                return None
            start = max(start, self.starts[0])
        return start - now if start - now > 1e-9 else 0.0

    def grant(self, now: float, *, begun: bool = True) -> Grant:
        """Use a slot and a start of the lease.

        Args:
            now: Current time.
            begun: False if the call has waited in the queue, and still has to wake up.
        """
        self.in_flight += 1
        self.used += 1
        self.peak = max(self.peak, self.in_flight)
        return Grant(self.starts.popleft() if self.has_rate else now, begun)

    def begin(self, grant: Grant) -> None:
        """Record that a call which had waited has begun."""
        grant.begun = True

    def release(self) -> None:
        """Return the slot of a call."""
        self.in_flight -= 1

    def take_back(self, grant: Grant) -> None:
        """Return the slot and the start of a call that never began."""
        self.in_flight -= 1
        if self.has_rate:
            self.starts.appendleft(grant.at)

    def record_overload(self, now: float, retry_after: float | None) -> None:
        """Record, for the next request, that the service turned a call away; a pause begins at once.

        Args:
            now: Current time.
            retry_after: Pause that the service asked for, or None.
        """
        self.overloads += 1
        if retry_after is not None and retry_after > (self.retry_after or 0.0):
            self.retry_after = retry_after
            self.paused_until = max(self.paused_until, now + min(retry_after, MAX_PAUSE_S))

    def record_success(self) -> None:
        """Record, for the next request, that the service answered a call."""
        self.successes += 1

    def due(self) -> float | None:
        """Return the time of the next request, or None if there is nothing to report."""
        when: list[float] = []
        if self.overloads or (self.is_starved and not self.is_unmet):
            when.append(self.answered)
        period = 0.0 if self.lease is None else self.lease.period_s
        if self.is_starved or (self.has_slots and self.held > self.in_flight):
            when.append(self.answered + period)
        if self.has_slots and self.in_flight:
            when.append(self.answered + self.ttl_s * ALIVE)
        if not when:
            return None
        failed = self.tried > self.answered
        return max(min(when), self.tried + self.ttl_s * RETRY) if failed else min(when)

    def make_request(self, now: float, waiting: int) -> LeaseRequest:
        """Release what is not needed, and create the request that says what is held, used and wanted.

        Args:
            now: Current time.
            waiting: Number of calls in the queue.
        """
        self._let_go(now, waiting)
        self.tried = now
        self.number += 1
        wanted = max(self.peak, self.in_flight + waiting) - self.in_flight
        starts = waiting + self.used - len(self.starts) if self.has_rate and waiting else 0
        self.asked, self.asked_starts = self.in_flight + wanted, max(0, starts)
        request = LeaseRequest(
            self.name,
            self.number,
            self.limits,
            self.ttl_s,
            self.held,
            self.in_flight if self.has_slots else 0,
            wanted if self.has_slots else 0,
            self.asked_starts,
            self.successes,
            self.overloads,
            self.retry_after,
            self.call_s,
        )
        self.peak, self.used = self.in_flight, 0
        self._reported = (self.successes, self.overloads)
        return request

    def _let_go(self, now: float, waiting: int) -> None:
        if not self.has_slots:
            return
        if now >= self.valid_until:  # others may have the slots by now
            self.held = self.in_flight
        elif not self.peak and not waiting:
            self.held = 0
        elif self.held > self.target:
            self.held = max(self.in_flight, self.target)

    def take(self, lease: Lease, now: float) -> None:
        """Apply the lease that answers the last request.

        Args:
            lease: The answer of the server.
            now: Current time.
        """
        self.lease, self.answered, self.is_starved = lease, self.tried, False
        self.successes -= self._reported[0]
        self.overloads -= self._reported[1]
        self.retry_after = self.retry_after if self.overloads else None
        # The request did not count the calls that came after it: for them, the next one goes out at once.
        self.is_unmet = (self.has_slots and lease.held < self.asked) or len(lease.starts) < self.asked_starts
        self.valid_until = self.tried + self.ttl_s * STOP
        self.held, self.target = lease.held, lease.target
        self.starts.extend(now + start for start in lease.starts)
        if lease.paused_s:
            self.paused_until = max(self.paused_until, now + lease.paused_s)

    def has_lost(self, now: float) -> bool:
        """Return whether other clients are about to get the slots of our running calls."""
        return self.has_slots and self.in_flight > 0 and now >= self.answered + CANCEL * self.ttl_s
