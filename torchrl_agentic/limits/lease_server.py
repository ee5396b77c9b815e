"""Division of shared limits among processes, by leases.

    client ── LeaseRequest: slots held, used and wanted ──▶ LeaseServer
    client ◀── Lease: slots and starts, for a time ──────── LeaseServer

A client starts calls without asking while its lease is valid. Nothing is granted twice, because

- a slot goes to another client only after its holder has reported that it no longer holds it;
- a client that is silent for `ttl_s` loses everything; it stops at half of that time, see `cluster`;
- a new server, which does not know the existing leases, grants nothing for one `ttl_s`.

All times are in seconds, of any clock. `ray_actor` and `unix_socket` transport the requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.limits.base import ServiceLimits
from torchrl_agentic.limits.token_bucket import AIMD

CONTENDED_S, CALM_S = 0.04, 0.2
"""Seconds between the requests of a client if the limit is contended, and if it is not."""
TURN_S = 1.0
"""Seconds for which a client keeps a slot that other clients have an equal claim to."""
KEPT_S = 10.0
"""Seconds for which the limits of a name are kept after its last client has gone."""
HORIZON_S = 0.25
"""Seconds for which starts are given out in advance."""


class LimitsDiffer(ValueError, InfrastructureError):
    """Another process uses a limiter of the same name with other limits."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """The state of a client, and its demand.

    Attributes:
        client: Unique name of the client.
        number: Number of the request; increases with each one.
        limits: Limits of the service that the client was created with.
        ttl_s: Time without contact after which the server takes back a lease, in seconds.
        held: Number of calls that the client may run at once until it gets an answer.
        in_use: Number of running calls.
        wanted: Number of further calls that would run.
        starts_wanted: Number of calls that have no start time yet.
        successes: Number of successful calls since the last request.
        overloads: Number of overloads since the last request.
        retry_after: Longest pause that the service asked for, in seconds, or None.
        call_s: Longest time that the service continues a call whose client has died, in seconds.
    """

    client: str
    number: int
    limits: ServiceLimits
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
    """The permissions of a client.

    Attributes:
        held: Number of calls it may run at once, until `ttl_s` / 2 after it sent its request.
        target: Number to which it should reduce `held` as soon as it can.
        starts: Times at which calls may start, in seconds from now.
        period_s: Seconds until the next request.
        paused_s: Seconds for which no call may start.
        concurrent: Current limit of concurrent calls of all clients together, or None for no limit.
        per_second: Current limit of starts per second of all clients together, or None for no limit.
        overloads: Number of overloads so far.
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
class _Holder:
    number: int = 0
    held: int = 0
    demand: int = 0
    wants_starts: bool = False
    seen: float = 0.0
    silent_s: float = 0.0  # longest silence before the client counts as dead
    served: int = 0  # number of the request that last added a slot
    since: float = 0.0  # time of that request

    def rank(self, now: float) -> tuple[int, int]:
        """Return the rank among clients with an equal claim; lower ranks come first.

        For one turn, the client that holds more comes first; after it, the one that was served longest ago. A
        slot that changes its holder is unused for a request or two, so that it should not change with each
        request.
        """
        return (-self.held if now - self.since < TURN_S else 0, self.served)


def fair_shares(limit: int, demand: Mapping[str, int], rank: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Divide a limit max-min fairly.

    Clients that want less than an equal part get what they want, and the others share the rest equally.

    Args:
        limit: Number of slots.
        demand: Number of slots that each client wants.
        rank: Rank of each client. A slot that two clients have an equal claim to goes to the lower rank.

    Returns:
        Number of slots of each client.
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
    """Divides the limits of one service among its clients.

    Attributes:
        began: Time before which another server may have given out leases.
        settle_s: Time for which such leases may still be held; at least the `ttl_s` of the clients.
        aimd: Adaptation of the limits to overloads.
        requests: Number of requests so far.
    """

    began: float
    settle_s: float = 0.0
    aimd: AIMD = field(default_factory=AIMD)
    requests: int = 0
    _limits: ServiceLimits | None = None
    _ttl_s: float = 0.0
    _seen: float = float("-inf")
    _clients: dict[str, _Holder] = field(default_factory=dict[str, _Holder])
    _next_start: float = float("-inf")

    def sync(self, request: LeaseRequest, now: float) -> Lease:
        """Record the request of a client, and return its lease.

        Args:
            request: State and demand of the client.
            now: Current time.

        Raises:
            LimitsDiffer: If other clients use other limits.
            ConnectionError: If a later request of this client has already arrived.
        """
        self._drop_silent(now)
        asked = (request.limits, request.ttl_s)
        if asked != (self._limits, self._ttl_s):
            if self._limits is not None and (self._clients or now - self._seen < KEPT_S):
                raise LimitsDiffer(
                    f"other processes use this limiter, or did {KEPT_S:g} s ago, with the limits "
                    f"{self._limits}, ttl={self._ttl_s}; this process asks for {request.limits}, "
                    f"ttl={request.ttl_s}: use the same limits, or another name"
                )
            self._limits, self._ttl_s = asked
        self._seen = now
        self.requests += 1
        if request.client in self._clients and request.number <= self._clients[request.client].number:
            raise ConnectionError("a later request of this client has already arrived")
        client = self._clients.setdefault(request.client, _Holder())
        client.number = request.number
        client.held = max(request.held, request.in_use)
        client.demand = request.in_use + request.wanted
        client.wants_starts = request.starts_wanted > 0
        client.seen = now
        client.silent_s = max(request.ttl_s, request.call_s if client.held else 0.0)
        self._learn(request, now)
        limit = self._concurrent()
        starts = self._starts(request, now)
        if limit is None:
            held = target = 0
        else:
            held, target = self._grant(client, request.client, limit, now)
        contended = limit is not None and sum(each.demand for each in self._clients.values()) > limit
        lease = Lease(
            held,
            target,
            starts,
            CONTENDED_S if contended or client.wants_starts else CALM_S,
            max(0.0, self.aimd.paused_until - now),
            limit,
            self._per_second(),
            self.aimd.overloads,
        )
        if not (held or client.demand or client.wants_starts):
            del self._clients[request.client]
        return lease

    def _drop_silent(self, now: float) -> None:
        for name, client in list(self._clients.items()):
            if now - client.seen > client.silent_s:
                del self._clients[name]

    def _learn(self, request: LeaseRequest, now: float) -> None:
        for _ in range(request.overloads):
            self.aimd.record_overload(now, request.retry_after)
        if request.successes:
            limits = request.limits
            self.aimd.record_success(limits.max_concurrent or limits.rate_per_second or 1, request.successes)

    def _concurrent(self) -> int | None:
        assert self._limits is not None
        most = self._limits.max_concurrent
        return None if most is None else max(1, int(most * self.aimd.share + 1e-9))

    def _per_second(self) -> float | None:
        assert self._limits is not None
        rate = self._limits.rate_per_second
        return None if rate is None else rate * self.aimd.share

    def _is_settling(self, now: float) -> bool:
        return now - self.began < max(self._ttl_s, self.settle_s)

    def _grant(self, client: _Holder, name: str, limit: int, now: float) -> tuple[int, int]:
        """Return how many calls a client may run at once, and how many it should."""
        demand = {other: each.demand for other, each in self._clients.items()}
        rank = {other: each.rank(now) for other, each in self._clients.items()}
        target = fair_shares(limit, demand, rank)[name]
        free = limit - sum(each.held for each in self._clients.values())
        if client.demand:
            # Half of the unused slots are lent too; the other half is there for the next client at once.
            spare = limit - sum(demand.values())
            target += max(0, spare) // (2 * sum(d > 0 for d in demand.values()))
        if self._is_settling(now):
            free = 0
        if not any(each.demand > each.held for each in self._clients.values() if each is not client):
            target = max(target, client.held)  # no other client lacks these slots
        more = min(max(0, free), max(0, target - client.held))
        if more:
            client.served, client.since = self.requests, now
        client.held += more
        return client.held, target

    def _starts(self, request: LeaseRequest, now: float) -> tuple[float, ...]:
        """Return the times at which a client's next calls may start, within the horizon and its fair part."""
        rate = self._per_second()
        if rate is None or not request.starts_wanted or self._is_settling(now):
            return ()
        assert self._limits is not None
        assert self._limits.burst is not None
        interval = 1 / rate
        slack = (self._limits.burst - 1) / (self._limits.rate_per_second or 1)
        if self._next_start == float("-inf"):  # assume that an earlier server has used up the burst
            self._next_start = self.began + slack
        wanting = sum(each.wants_starts for each in self._clients.values())
        # The first client may use the whole burst; the starts after it are shared.
        ahead = max(1, int(rate * HORIZON_S / wanting))
        found: list[float] = []
        earliest = max(now, self.aimd.paused_until)
        for _ in range(request.starts_wanted):
            start = max(earliest, self._next_start - slack)
            if start > earliest and (start > earliest + HORIZON_S + interval or len(found) >= ahead):
                break
            self._next_start = max(self._next_start, start) + interval
            found.append(start - now)
        return tuple(found)
