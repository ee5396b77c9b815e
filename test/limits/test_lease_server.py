"""Leases: all clients together never exceed the limit, after losses, delays, kills and restarts."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic.limits.base import ServiceLimits
from torchrl_agentic.limits.lease_client import LATE_S, LeaseClient
from torchrl_agentic.limits.lease_server import (
    HORIZON_S,
    KEPT_S,
    Lease,
    LeaseRequest,
    LeaseServer,
    LimitsDiffer,
    fair_shares,
)

TTL = 1.0


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=8),
)
def test_shares_are_max_min_fair_and_satisfy_demand(limit, wishes):
    demand = {str(i): wish for i, (wish, _) in enumerate(wishes)}
    rank = {str(i): (0, when) for i, (_, when) in enumerate(wishes)}
    share = fair_shares(limit, demand, rank)
    assert sum(share.values()) == min(limit, sum(demand.values()))
    for one, other in itertools.permutations(demand, 2):
        assert 0 <= share[one] <= demand[one]
        # Nobody who wants more has over one less than another one.
        assert share[one] == demand[one] or share[other] <= share[one] + 1


def test_last_share_goes_to_the_least_recently_served():
    assert fair_shares(3, {"a": 2, "b": 2}, {"a": (0, 5), "b": (0, 1)}) == {"a": 1, "b": 2}


def test_indivisible_remainder_is_used_and_rotates():
    """Of ten for four, two have one more, for a turn; passed on too often, it would lie idle."""
    world = _settled(10, 4)
    most, used = [0] * 4, []
    for _ in range(600):
        world.waiting = [30] * 4
        _run(world, 0.01)
        used.append(sum(client.in_flight for client in world.clients))
        for index, client in enumerate(world.clients):
            most[index] = max(most[index], client.in_flight) if len(used) > 100 else 0
            client.in_flight = 0  # calls are short
    assert most == [3] * 4
    assert sum(used[100:]) / 500 > 9.8


def test_where_there_is_less_than_one_each_all_have_their_turn():
    world = _settled(2, 6)
    had = set()
    for _ in range(200):
        world.waiting = [9] * 6
        _run(world, 0.05)
        for index, client in enumerate(world.clients):
            if client.in_flight:
                had.add(index)
                client.in_flight -= 1
    assert had == set(range(6))


class _World:
    """Clients of a server that comes and goes, over a network that loses and delays."""

    def __init__(self, limits: ServiceLimits, clients: int) -> None:
        self.limits, self.now = limits, 0.0
        self.server = LeaseServer(-math.inf)
        self.clients = [self._new(number) for number in range(clients)]
        self.names = itertools.count(clients)
        self.waiting = [0] * clients
        self.starts: list[float] = []

    def _new(self, number: int) -> LeaseClient:
        return LeaseClient(str(number), self.limits, TTL)

    def pass_time(self, seconds: float) -> None:
        """Let time pass in steps; each client notices by itself when it has lost contact."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TTL / 20)
            for client in self.clients:
                if client.has_lost(self.now):
                    client.in_flight = 0
            self.serve()

    def serve(self) -> None:
        for index, client in enumerate(self.clients):
            while self.waiting[index] and client.delay(self.now) == 0.0:
                client.grant(self.now)
                self.starts.append(self.now)
                self.waiting[index] -= 1
        used = sum(client.in_flight for client in self.clients)
        assert self.limits.max_concurrent is None or used <= self.limits.max_concurrent

    def report(self, index: int, there: float, back: float, fate: str) -> None:
        client = self.clients[index]
        request = client.make_request(self.now, self.waiting[index])
        if fate == "request lost":
            return
        self.pass_time(there)
        lease = self.server.sync(request, self.now)
        if fate == "answer lost":
            return
        self.pass_time(back)
        if client is self.clients[index]:
            client.take(lease, self.now)
            self.serve()


EVENTS = st.one_of(
    st.tuples(st.just("want"), st.integers(0, 3), st.integers(1, 8)),
    st.tuples(st.just("end"), st.integers(0, 3), st.integers(1, 8)),
    st.tuples(
        st.just("report"),
        st.integers(0, 3),
        st.floats(0, 2 * TTL),
        st.floats(0, 2 * TTL),
        st.sampled_from(["fine", "fine", "fine", "request lost", "answer lost"]),
    ),
    st.tuples(st.just("quick report"), st.integers(0, 3)),
    st.tuples(st.just("kill"), st.integers(0, 3)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("pass"), st.floats(0, 2 * TTL)),
)


@settings(max_examples=8 * settings.default.max_examples, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.integers(1, 6))
def test_all_together_never_run_more_than_the_limit(events, limit):
    world = _World(ServiceLimits.of(limit), 4)
    for kind, *rest in events:
        if kind == "want":
            world.waiting[rest[0]] += rest[1]
            world.serve()
        elif kind == "end":
            client = world.clients[rest[0]]
            client.in_flight = max(0, client.in_flight - rest[1])
            world.serve()
        elif kind == "report":
            world.report(*rest)
        elif kind == "quick report":
            world.report(rest[0], 0.001, 0.001, "fine")
        elif kind == "kill":  # its calls end with it, and a new process comes in its place
            world.clients[rest[0]] = world._new(next(world.names))
        elif kind == "restart":
            world.server = LeaseServer(world.now)
        else:
            world.pass_time(rest[0])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.floats(0, 0.3)), max_size=60),
    st.floats(0.5, 50),
    st.floats(1, 10),
)
def test_all_together_start_no_more_than_the_rate(events, rate, burst):
    """In any time span: the rate times its length, plus the burst and delayed starts."""
    world = _World(ServiceLimits.of(None, rate, burst), 4)
    for index, wanted, later in events:
        world.waiting[index] += wanted
        world.report(index, 0.0, 0.0, "fine")
        world.pass_time(later)
    for first, start in enumerate(world.starts):
        for count, other in enumerate(world.starts[first:], 1):
            assert count <= rate * (other - start + LATE_S) + burst + 1e-6


def _settled(limit: int, clients: int) -> _World:
    return _World(ServiceLimits.of(limit), clients)


def _run(world: _World, seconds: float) -> None:
    """Let each client report at any time, with endless calls."""
    end = world.now + seconds
    while world.now < end:
        for index, client in enumerate(world.clients):
            client.is_starved = client.is_starved or world.waiting[index] > 0
            due = client.due()
            if due is not None and due <= world.now:
                world.report(index, 0.001, 0.001, "fine")
        world.pass_time(0.01)


def test_share_shrinks_once_others_ask():
    world = _settled(10, 3)
    world.waiting[0] = 30
    _run(world, 0.5)
    assert world.clients[0].in_flight == 10
    world.waiting[1] = world.waiting[2] = 30
    for _ in range(20):
        _run(world, 0.05)
        for client in world.clients:
            client.in_flight = max(0, client.in_flight - 2)
        world.waiting = [30, 30, 30]
    _run(world, 0.3)
    assert sorted(client.in_flight for client in world.clients) == [3, 3, 4]


def test_the_share_of_a_killed_client_is_free_after_its_time_to_live():
    world = _settled(4, 2)
    world.waiting = [9, 0]
    _run(world, 0.3)
    assert world.clients[0].in_flight == 4
    world.clients.pop(0)
    world.waiting = [9]
    _run(world, TTL - 0.15)
    assert world.clients[0].in_flight == 0
    _run(world, 0.3)
    assert world.clients[0].in_flight == 4


def test_calls_that_outlive_their_client_are_awaited():
    world = _settled(4, 2)
    world.clients[0] = LeaseClient("long", world.limits, TTL, call_s=5.0)
    world.waiting = [9, 0]
    _run(world, 0.3)
    world.clients.pop(0)
    world.waiting = [9]
    _run(world, 4.0)
    assert world.clients[0].in_flight == 0
    _run(world, 1.5)
    assert world.clients[0].in_flight == 4


def test_a_client_without_contact_stops_before_others_get_its_share():
    world = _settled(4, 2)
    world.waiting = [3, 0]
    _run(world, 0.3)
    alone = world.clients[0]
    assert alone.in_flight == 3
    began = world.now
    alone.in_flight = 2
    world.waiting = [9, 0]
    world.pass_time(TTL * 0.55)
    in_flight = alone.in_flight
    alone.in_flight -= 1
    world.serve()
    assert alone.in_flight == in_flight - 1  # nothing starts any more
    world.pass_time(TTL * 0.3)
    assert alone.in_flight == 0
    assert world.now - began < TTL


def test_a_new_server_grants_nothing_until_old_leases_have_ended():
    world = _settled(4, 2)
    world.waiting = [4, 0]
    _run(world, 0.3)
    world.server = LeaseServer(world.now)
    world.waiting = [0, 4]
    _run(world, TTL * 0.9)
    assert [client.in_flight for client in world.clients] == [4, 0]
    world.clients[0].in_flight = 0
    _run(world, TTL)
    assert [client.in_flight for client in world.clients] == [0, 4]


def test_two_jobs_with_different_limits_get_an_error():
    server = LeaseServer(-math.inf)
    server.sync(LeaseRequest("a", 1, ServiceLimits.of(6), TTL, wanted=1), 0.0)
    with pytest.raises(LimitsDiffer, match=r"max_concurrent=6.*max_concurrent=3"):
        server.sync(LeaseRequest("b", 1, ServiceLimits.of(3), TTL, wanted=1), 0.1)
    assert (
        server.sync(LeaseRequest("b", 2, ServiceLimits.of(3), TTL, wanted=9), 0.1 + TTL + KEPT_S).held == 3
    )  # the other has gone


def test_a_report_that_comes_late_changes_nothing():
    server = LeaseServer(-math.inf)
    server.sync(LeaseRequest("a", 2, ServiceLimits.of(6), TTL, held=4, in_use=4), 0.0)
    with pytest.raises(ConnectionError):
        server.sync(LeaseRequest("a", 1, ServiceLimits.of(6), TTL), 0.1)
    assert server.sync(LeaseRequest("b", 1, ServiceLimits.of(6), TTL, wanted=6), 0.2).held == 1  # "a" has 5


def test_overload_of_one_client_slows_all():
    server = LeaseServer(-math.inf)
    server.sync(LeaseRequest("a", 1, ServiceLimits.of(8), TTL, overloads=1, retry_after=3.0, wanted=1), 0.0)
    lease = server.sync(LeaseRequest("b", 1, ServiceLimits.of(8), TTL, wanted=8), 0.1)
    assert 2.8 < lease.paused_s < 4
    assert (lease.concurrent, lease.overloads) == (4, 1)
    assert lease.held <= 4


def _leases_for(wants: Counter[str], rate: float) -> dict[str, Lease]:
    server = LeaseServer(-math.inf)
    limits = ServiceLimits.of(None, rate, 1.0)
    found: dict[str, Lease] = {}
    for number in (1, 2):
        for name, count in wants.items():
            found[name] = server.sync(
                LeaseRequest(name, number, limits, TTL, starts_wanted=count), number / 2
            )
    return found


def test_no_client_gets_more_than_its_share_of_future_starts():
    leases = _leases_for(Counter(greedy=10_000, modest=3), 100)
    assert len(leases["modest"].starts) == 3
    assert len(leases["greedy"].starts) <= 100 * HORIZON_S
    assert all(start <= 2 * HORIZON_S for lease in leases.values() for start in lease.starts)


def test_calls_that_come_after_a_report_are_reported_at_once():
    """A client that grows from one call to many does not wait for a period in between."""
    world = _settled(8, 1)
    world.waiting[0] = 1
    world.report(0, 0.001, 0.001, "fine")
    world.waiting[0] = 7
    client = world.clients[0]
    client.is_starved = True
    due = client.due()
    assert due is not None
    assert due <= world.now


def test_a_client_that_stood_still_gives_up_its_calls():
    """It did not notice the time: its report would claim slots that others got meanwhile."""
    world = _settled(2, 2)
    world.waiting = [2, 0]
    _run(world, 0.3)
    still = world.clients[0]
    world.now += 3 * TTL
    assert still.has_lost(world.now)


def test_a_new_server_gives_out_no_burst_a_second_time():
    limits = ServiceLimits.of(None, 1.0, 50.0)
    first = LeaseServer(-math.inf)
    assert len(first.sync(LeaseRequest("a", 1, limits, TTL, starts_wanted=50), 0.0).starts) == 50
    second = LeaseServer(0.0)
    assert len(second.sync(LeaseRequest("a", 2, limits, TTL, starts_wanted=50), 1.5 * TTL).starts) <= 2


def test_clients_of_one_limiter_go_by_one_time_to_live():
    server = LeaseServer(-math.inf)
    server.sync(LeaseRequest("a", 1, ServiceLimits.of(2), 10.0, wanted=1), 0.0)
    with pytest.raises(LimitsDiffer, match=r"ttl=10\.0.*ttl=0\.3"):
        server.sync(LeaseRequest("b", 1, ServiceLimits.of(2), 0.3, wanted=1), 0.1)


def test_limits_stay_for_a_while_after_their_last_client():
    """Two tools that are set up one after the other get the error before the first call."""
    server = LeaseServer(-math.inf)
    server.sync(LeaseRequest("a", 1, ServiceLimits.of(10), TTL), 0.0)
    with pytest.raises(LimitsDiffer):
        server.sync(LeaseRequest("b", 1, ServiceLimits.of(3), TTL), 0.1)


def test_lost_report_is_sent_again():
    client = LeaseClient("a", ServiceLimits.of(8), TTL)
    client.record_overload(0.0, 5.0)
    assert client.make_request(0.0, 0).overloads == 1
    again = client.make_request(0.1, 0)
    assert (again.overloads, again.retry_after) == (1, 5.0)
    client.take(LeaseServer(-math.inf).sync(again, 0.1), 0.1)
    assert client.make_request(0.2, 0).overloads == 0
