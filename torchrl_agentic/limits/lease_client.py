"""A client of the `LeaseServer`: what it may start, and what to report when. Plain functions of time."""

from __future__ import annotations

import math
from collections import deque

from torchrl_agentic.limits.base import Limits
from torchrl_agentic.limits.lease_server import Lease, Report
from torchrl_agentic.limits.token_bucket import MAX_PAUSE_S, Grant

STOP, CANCEL = 0.5, 0.8
"""At these parts of `ttl`, without contact, no call starts any more, and those under way are cancelled."""
ALIVE, RETRY = 1 / 8, 1 / 16
"""After these parts of it a client reports that it is still there, and tries again where that failed."""
LATE_S = 0.25
"""A start that is not used for so long after its time is lost, so that those saved up never come at once."""


class Lessee:
    """Lets calls in as far as its lease goes; an `AnyGate`.

    held: how many may run at once, target: to how many that has to come down. peak, used: how many ran at
    once, and started, since the last report.
    """

    def __init__(self, name: str, limits: Limits, ttl_s: float, call_s: float = 0.0) -> None:
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
        self._told = (0, 0)  # of these, in the last report
        self.is_starved = False  # calls wait for a report
        self.is_unmet = False  # the last one asked for more than there is
        self.asked = self.asked_starts = 0
        self.tried = -math.inf  # when the last report went out
        self.answered = -math.inf  # when the last one that was answered did
        self.number = 0

    def delay(self, now: float) -> float | None:
        """Seconds until the next call may start; None: we need more than we have."""
        # Of what others want, no more is used, so that it can be let go at the next report.
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
        """Use up a slot, and a start."""
        self.in_flight += 1
        self.used += 1
        self.peak = max(self.peak, self.in_flight)
        return Grant(self.starts.popleft() if self.has_rate else now, begun)

    def begin(self, granted: Grant) -> None:
        """Take note that a call has begun."""
        granted.begun = True

    def release(self) -> None:
        """Give the slot back."""
        self.in_flight -= 1

    def take_back(self, granted: Grant) -> None:
        """Give slot and start back of a call that never began."""
        self.in_flight -= 1
        if self.has_rate:
            self.starts.appendleft(granted.at)

    def overloaded(self, now: float, retry_after: float | None) -> None:
        """Keep for the next report that the service turned a call away; a pause begins at once."""
        self.overloads += 1
        if retry_after is not None and retry_after > (self.retry_after or 0.0):
            self.retry_after = retry_after
            self.paused_until = max(self.paused_until, now + min(retry_after, MAX_PAUSE_S))

    def succeeded(self) -> None:
        """Keep for the next report that a call went well."""
        self.successes += 1

    def due(self) -> float | None:
        """When to report next; None: there is nothing to say."""
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

    def report(self, now: float, waiting: int) -> Report:
        """Say what we hold, use and want, having let go of what is not needed; waiting: how many calls do."""
        self._let_go(now, waiting)
        self.tried = now
        self.number += 1
        wanted = max(self.peak, self.in_flight + waiting) - self.in_flight
        starts = waiting + self.used - len(self.starts) if self.has_rate and waiting else 0
        self.asked, self.asked_starts = self.in_flight + wanted, max(0, starts)
        report = Report(
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
        self._told = (self.successes, self.overloads)
        return report

    def _let_go(self, now: float, waiting: int) -> None:
        if not self.has_slots:
            return
        if now >= self.valid_until:  # others may have it by now
            self.held = self.in_flight
        elif not self.peak and not waiting:
            self.held = 0
        elif self.held > self.target:
            self.held = max(self.in_flight, self.target)

    def take(self, lease: Lease, now: float) -> None:
        """Go by the lease that answers the last report."""
        self.lease, self.answered, self.is_starved = lease, self.tried, False
        self.successes -= self._told[0]
        self.overloads -= self._told[1]
        self.retry_after = self.retry_after if self.overloads else None
        # Of calls that came after the report nobody knows yet: with them, the next one goes out at once.
        self.is_unmet = (self.has_slots and lease.held < self.asked) or len(lease.starts) < self.asked_starts
        self.valid_until = self.tried + self.ttl_s * STOP
        self.held, self.target = lease.held, lease.target
        self.starts.extend(now + start for start in lease.starts)
        if lease.paused_s:
            self.paused_until = max(self.paused_until, now + lease.paused_s)

    def has_lost(self, now: float) -> bool:
        """Whether others are about to get what our calls use."""
        return self.has_slots and self.in_flight > 0 and now >= self.answered + CANCEL * self.ttl_s
