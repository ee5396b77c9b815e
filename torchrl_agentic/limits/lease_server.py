"""Shares of limits that many processes keep together: who may use how much, and for how long.

    client ── Report: what I hold, use and wait for ──▶ LeaseServer
    client ◀── Lease: what you may use until when ───── LeaseServer

A client starts calls without asking as long as its lease lasts. Nothing is ever granted twice, because

- what a client holds is taken from others only after it has said that it does not hold it any more;
- of a client that is silent for `ttl_s`, all is taken back; it stops at half of that time, see `cluster`;
- a new server, which does not know yet what others hold, grants nothing for one `ttl_s`.

Time comes in as a number; how reports travel is up to `ray` and `machine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.limits.base import Limits
from torchrl_agentic.limits.token_bucket import Adaptation

CONTENDED_S, CALM_S = 0.04, 0.2
"""How often clients report where more is wanted than there is, and where there is enough."""
TURN_S = 1.0
"""How long a client keeps what others have an equal claim to."""
KEPT_S = 10.0
"""How long the limits of a name stay after its last client has gone."""
HORIZON_S = 0.25
"""How far ahead starts are given out."""


class LimitsDiffer(ValueError, InfrastructureError):
    """Others use a limiter of the same name with other limits."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a client says.

    number: of its reports. held: how many calls it may run at once until it hears otherwise. in_use: how many
    run, wanted: how many more would. starts_wanted: for how many it has no time to start yet. successes,
    overloads: since the last report; retry_after: the longest that was asked for. call_s: how long calls may
    go on at the service after their client has died; ttl_s: see above.
    """

    client: str
    number: int
    limits: Limits
    ttl_s: float
    held: int = 0
    in_use: int = 0
    wanted: int = 0
    starts_wanted: int = 0
    successes: int = 0
    overloads: int = 0
    retry_after: float | None = None
    call_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Lease:
    """What a client may do.

    held: how many calls it may run at once, until `ttl_s` / 2 after it sent its report. target: to how many
    it should come down as soon as it can. starts: times at which calls may start, in seconds from now.
    period_s: how soon to report again. paused_s: for how long nothing may start. concurrent, per_second:
    the limits at the moment, of all together; None where there is none.
    """

    held: int
    target: int
    starts: tuple[float, ...]
    period_s: float
    paused_s: float
    concurrent: int | None
    per_second: float | None
    overloads: int


@dataclass(slots=True)
class _Client:
    number: int = 0
    held: int = 0
    demand: int = 0
    wants_starts: bool = False
    seen: float = 0.0
    silent_s: float = 0.0  # how long it may be
    served: int = 0  # the number of the report with which it got something last
    since: float = 0.0  # and when that was

    def rank(self, now: float) -> tuple[int, int]:
        """Say who comes first of those with an equal claim: for a turn who has more, then who waits longest.

        What is passed on lies idle for a report or two, so it is not passed on with each report.
        """
        return (-self.held if now - self.since < TURN_S else 0, self.served)


def fair_shares(limit: int, demand: Mapping[str, int], rank: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Divide a limit max-min fairly: who wants less than an equal part gets it, the others share the rest.

    rank: of two with an equal claim to the last one, it goes to who has the lower rank.
    """
    share: dict[str, int] = dict.fromkeys(demand, 0)
    left = limit
    wanting: list[str] = sorted((one for one in demand if demand[one] > 0), key=rank.__getitem__)
    while left > 0 and wanting:
        equal = max(1, left // len(wanting))
        for client in wanting:
            more = min(equal, demand[client] - share[client], left)
            share[client] += more
            left -= more
        wanting = [client for client in wanting if share[client] < demand[client]]
    return share


@dataclass(slots=True)
class LeaseServer:
    """Divides the limits of one service among the clients that report to it.

    began: until then there may have been another server, whose leases may still be held, for settle_s or
    the `ttl_s` of the clients.
    """

    began: float
    settle_s: float = 0.0
    adaptation: Adaptation = field(default_factory=Adaptation)
    reports: int = 0
    _limits: Limits | None = None
    _ttl_s: float = 0.0
    _seen: float = float("-inf")
    _clients: dict[str, _Client] = field(default_factory=dict[str, _Client])
    _next_start: float = float("-inf")

    def sync(self, report: Report, now: float) -> Lease:
        """Take a report, and give what its client may do from now on.

        Raises:
            LimitsDiffer: others are here with other limits.
            ConnectionError: a later report of this client came first; it does not wait for this one any more.
        """
        self._drop_silent(now)
        asked = (report.limits, report.ttl_s)
        if asked != (self._limits, self._ttl_s):
            if self._limits is not None and (self._clients or now - self._seen < KEPT_S):
                raise LimitsDiffer(
                    f"a shared limiter has the limits of whoever came first, {self._limits}, "
                    f"ttl={self._ttl_s}, and others use it, or did {KEPT_S:g} s ago; this one asks for "
                    f"{report.limits}, ttl={report.ttl_s}: give it another name, or the same limits"
                )
            self._limits, self._ttl_s = asked
        self._seen = now
        self.reports += 1
        if report.client in self._clients and report.number <= self._clients[report.client].number:
            raise ConnectionError("a later report came first")
        client = self._clients.setdefault(report.client, _Client())
        client.number = report.number
        client.held = max(report.held, report.in_use)
        client.demand = report.in_use + report.wanted
        client.wants_starts = report.starts_wanted > 0
        client.seen = now
        client.silent_s = max(report.ttl_s, report.call_s if client.held else 0.0)
        self._learn(report, now)
        limit = self._concurrent()
        starts = self._starts(report, now)
        if limit is None:
            held = target = 0
        else:
            held, target = self._grant(client, report.client, limit, now)
        contended = limit is not None and sum(each.demand for each in self._clients.values()) > limit
        lease = Lease(
            held,
            target,
            starts,
            CONTENDED_S if contended or client.wants_starts else CALM_S,
            max(0.0, self.adaptation.paused_until - now),
            limit,
            self._per_second(),
            self.adaptation.overloads,
        )
        if not (held or client.demand or client.wants_starts):
            del self._clients[report.client]
        return lease

    def _drop_silent(self, now: float) -> None:
        for name, client in list(self._clients.items()):
            if now - client.seen > client.silent_s:
                del self._clients[name]

    def _learn(self, report: Report, now: float) -> None:
        for _ in range(report.overloads):
            self.adaptation.overloaded(now, report.retry_after)
        if report.successes:
            limits = report.limits
            self.adaptation.succeeded(limits.max_concurrent or limits.rate_per_second or 1, report.successes)

    def _concurrent(self) -> int | None:
        assert self._limits is not None
        most = self._limits.max_concurrent
        return None if most is None else max(1, int(most * self.adaptation.share + 1e-9))

    def _per_second(self) -> float | None:
        assert self._limits is not None
        rate = self._limits.rate_per_second
        return None if rate is None else rate * self.adaptation.share

    def _is_settling(self, now: float) -> bool:
        return now - self.began < max(self._ttl_s, self.settle_s)

    def _grant(self, client: _Client, name: str, limit: int, now: float) -> tuple[int, int]:
        """Give how many calls a client may run at once, and how many it should."""
        demand = {other: each.demand for other, each in self._clients.items()}
        rank = {other: each.rank(now) for other, each in self._clients.items()}
        target = fair_shares(limit, demand, rank)[name]
        free = limit - sum(each.held for each in self._clients.values())
        if client.demand:
            # What nobody wants is lent too, half of it in all: who comes next finds something at once.
            spare = limit - sum(demand.values())
            target += max(0, spare) // (2 * sum(d > 0 for d in demand.values()))
        if self._is_settling(now):
            free = 0
        if not any(each.demand > each.held for each in self._clients.values() if each is not client):
            target = max(target, client.held)  # nobody lacks what it has
        more = min(max(0, free), max(0, target - client.held))
        if more:
            client.served, client.since = self.reports, now
        client.held += more
        return client.held, target

    def _starts(self, report: Report, now: float) -> tuple[float, ...]:
        """Give times at which a client's next calls may start, as far as the horizon and its part go."""
        rate = self._per_second()
        if rate is None or not report.starts_wanted or self._is_settling(now):
            return ()
        assert self._limits is not None
        assert self._limits.burst is not None
        interval = 1 / rate
        slack = (self._limits.burst - 1) / (self._limits.rate_per_second or 1)
        if self._next_start == float("-inf"):  # whoever gave out starts before us has used the burst up
            self._next_start = self.began + slack
        wanting = sum(each.wants_starts for each in self._clients.values())
        # The burst is there for whoever comes first; what lies ahead is shared.
        ahead = max(1, int(rate * HORIZON_S / wanting))
        found: list[float] = []
        earliest = max(now, self.adaptation.paused_until)
        for _ in range(report.starts_wanted):
            start = max(earliest, self._next_start - slack)
            if start > earliest and (start > earliest + HORIZON_S + interval or len(found) >= ahead):
                break
            self._next_start = max(self._next_start, start) + interval
            found.append(start - now)
        return tuple(found)
