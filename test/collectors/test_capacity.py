"""Capacity: the engine is busy whatever the tools do, and the number of open trajectories stays bounded."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.collectors.admission import GROWTH, HEADROOM, MAX_FACTOR, Capacity, TrajectorySlot

CONCURRENT = 256


def step_s(requests: int) -> float:
    """Return the seconds of a decode step: a model of 8 billion parameters on one H100."""
    return 8e-3 + 4e-5 * requests


SATURATED = CONCURRENT / step_s(CONCURRENT)


@dataclass
class Load:
    """Trajectories of a random number of turns, with answers and tools of lognormal lengths.

    Attributes:
        tool_s: Median of the seconds that tools take.
        tail: 99th percentile of these seconds, as a multiple of the median.
        limit_s: Longest time of a tool.
        turns: Largest number of turns.
        opening_s: Mean time between the begin of a trajectory and its first request.
        hangs: Times between which tools hang: they all return at the second one.
    """

    tool_s: float = 0.3
    tail: float = 30.0
    limit_s: float = 29.0
    turns: int = 16
    opening_s: float = 0.0
    hangs: tuple[float, float] = (0.0, 0.0)

    def tokens(self, rng: random.Random) -> int:
        return min(1024, max(24, round(80 * math.exp(rng.gauss(0, 0.7)))))

    def seconds(self, rng: random.Random, now: float) -> float:
        if not self.tool_s:
            return 0.0
        taken = min(self.limit_s, self.tool_s * math.exp(rng.gauss(0, math.log(self.tail) / 2.326)))
        return max(taken, self.hangs[1] - now) if self.hangs[0] <= now < self.hangs[1] else taken


class Simulation:
    """An engine with continuous batching and the trajectories that ask it, on a simulated clock.

    Args:
        load: What the trajectories do.
        capacity: Decides when they begin.
        seed: Seed of the load.

    Attributes:
        now: Time in seconds.
        tokens: Number of tokens that the engine sampled.
        queue_s: Waiting requests, integrated over time.
        open_s: Open trajectories, integrated over time.
        most_open: Largest number of open trajectories.
    """

    def __init__(self, load: Load, capacity: Capacity, seed: int = 0) -> None:
        self.load = load
        self.capacity = capacity
        self.now = self.tokens = self.queue_s = self.open_s = 0.0
        self.most_open = 0
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._running: list[
            tuple[float, int, TrajectorySlot, int]
        ] = []  # (progress at the end, order, slot, turns left)
        self._waiting: deque[tuple[int, TrajectorySlot, int]] = deque()  # (tokens, slot, turns left)
        self._steps = 0.0
        self._count = 0
        self._alarm = 0
        self._begin()

    def run(self, until: float) -> None:
        """Advance the clock."""
        while self._events and self._events[0][0] <= until:
            at, _, action, arguments = heapq.heappop(self._events)
            self._advance(at)
            action(*arguments)
        self._advance(until)

    def measured(self, start: float, stop: float) -> tuple[float, float, float]:
        """Return the share of the saturated rate, and the mean queue and open trajectories / CONCURRENT."""
        self.run(start)
        before = self.tokens, self.queue_s, self.open_s
        self.run(stop)
        tokens, queue_s, open_s = (
            (after - each) / (stop - start)
            for after, each in zip((self.tokens, self.queue_s, self.open_s), before, strict=True)
        )
        return tokens / SATURATED, queue_s / CONCURRENT, open_s / CONCURRENT

    def _at(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, action, arguments))

    def _advance(self, to: float) -> None:
        passed = to - self.now
        if self._running:
            steps = passed / step_s(len(self._running))
            self._steps += steps
            self.tokens += steps * len(self._running)
        self.queue_s += passed * len(self._waiting)
        self.open_s += passed * self.capacity.open
        self.now = to

    def _begin(self) -> None:
        while self.capacity.free:
            slot = self.capacity.enter()
            turns = self._rng.randint(1, self.load.turns)
            if self.load.opening_s:
                self._at(self.load.opening_s * 2 * self._rng.random(), self._ask, slot, turns)
            else:
                self._ask(slot, turns)
        self.most_open = max(self.most_open, self.capacity.open)

    def _ask(self, slot: TrajectorySlot, turns: int) -> None:
        slot.ask()
        self._waiting.append((self.load.tokens(self._rng), slot, turns))
        self._schedule()

    def _schedule(self) -> None:
        while self._waiting and len(self._running) < CONCURRENT:
            tokens, slot, turns = self._waiting.popleft()
            self._count += 1
            heapq.heappush(self._running, (self._steps + tokens, self._count, slot, turns))
        self._alarm += 1
        if self._running:
            left = max(0.0, self._running[0][0] - self._steps)
            self._at(left * step_s(len(self._running)), self._answer, self._alarm)

    def _answer(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            _, _, slot, turns = heapq.heappop(self._running)
            slot.answered()
            if turns == 1:
                slot.leave()
            elif (seconds := self.load.seconds(self._rng, self.now)) > 0:
                self._at(seconds, self._ask, slot, turns - 1)
            else:
                self._ask(slot, turns - 1)
        self._schedule()
        self._begin()


LOADS = {
    "no tool time": Load(tool_s=0.0),
    "one turn": Load(turns=1),
    "tools with a light tail": Load(tail=3.0),
    "tools with a heavy tail": Load(),
    "slow tools": Load(tool_s=2.0, limit_s=60.0),
    "1 to 64 turns": Load(turns=64),
    "slow tools, 1 to 64 turns": Load(tool_s=2.0, limit_s=60.0, turns=64),
    "sessions that open slowly": Load(opening_s=1.0),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
def test_the_engine_is_busy_and_its_queue_short_whatever_the_tools_do(load: Load):
    simulation = Simulation(load, Capacity("auto", engine_concurrent=CONCURRENT))
    share, queue, _ = simulation.measured(0, 120)  # the start included
    assert share > 0.98
    assert queue < 0.25


def test_tools_that_take_most_of_the_time_are_made_up_for_after_a_while():
    load = Load(tool_s=20.0, tail=3.0, limit_s=60.0)
    simulation = Simulation(load, Capacity("auto", engine_concurrent=CONCURRENT))
    share, queue, open_at_once = simulation.measured(100, 200)
    assert share > 0.98
    assert queue < 0.25
    assert 8 < open_at_once < MAX_FACTOR, "no more trajectories are open than it takes"


def test_tools_that_hang_do_not_flood_the_engine_when_they_return():
    capacity = Capacity("auto", engine_concurrent=CONCURRENT)
    simulation = Simulation(Load(hangs=(60, 120)), capacity)
    simulation.run(60)
    before = simulation.most_open
    simulation.run(119)
    assert capacity.at_engine < 8, "nearly all hang"
    assert simulation.most_open < before + CONCURRENT * (1 + HEADROOM)
    share, queue, open_at_once = simulation.measured(140, 200)
    assert (share > 0.98, queue < 0.25, open_at_once < 2) == (True, True, True), (
        "20 s later, it has recovered"
    )


@pytest.mark.parametrize(("first", "then"), [(0.1, 2.0), (2.0, 0.1)])
def test_the_number_of_open_trajectories_follows_a_change_of_the_tools(first: float, then: float):
    def settled(tool_s: float) -> float:
        simulation = Simulation(
            Load(tool_s=tool_s, limit_s=60.0), Capacity("auto", engine_concurrent=CONCURRENT)
        )
        return simulation.measured(80, 120)[2]

    load = Load(tool_s=first, limit_s=60.0)
    simulation = Simulation(load, Capacity("auto", engine_concurrent=CONCURRENT))
    simulation.run(60)
    load.tool_s = then
    share, queue, open_at_once = simulation.measured(140, 200)
    assert share > 0.98
    assert queue < 0.25
    assert open_at_once == pytest.approx(settled(then), rel=0.1)
    assert simulation.capacity.limit < 1.2 * open_at_once * CONCURRENT, "what is not used is forgotten"


class Walk:
    """Random trajectories: each event moves one of them."""

    def __init__(self, capacity: Capacity, seed: int) -> None:
        self.capacity = capacity
        self.rng = random.Random(seed)
        self.slots: list[TrajectorySlot] = []

    def step(self) -> None:
        event = self.rng.choice(["enter", "enter", "ask", "answered", "leave"])
        if event == "enter":
            while self.capacity.free:
                self.slots.append(self.capacity.enter())
                if self.rng.random() < 0.1:
                    break
        elif self.slots:
            slot = self.rng.choice(self.slots)
            getattr(slot, event)()
            if event == "leave":
                self.slots.remove(slot)
        self.check()

    def check(self) -> None:
        capacity = self.capacity
        assert capacity.open == len(self.slots)
        assert capacity.at_engine == sum(slot.is_at_engine for slot in self.slots)
        assert 0 <= capacity.at_engine <= capacity.open <= capacity.max_open
        assert capacity.open <= capacity.open + capacity.free <= capacity.max_open
        assert capacity.limit <= capacity.max_open


LIMITS = st.integers(1, 50) | st.just("auto")


@given(LIMITS, st.integers(1, 40), st.integers())
def test_open_trajectories_never_pass_the_bound(limit: Any, concurrent: int, seed: int):
    walk = Walk(Capacity(limit, engine_concurrent=concurrent), seed)
    assert walk.capacity.free == walk.capacity.limit
    for _ in range(400):
        walk.step()
    for slot in walk.slots:
        slot.leave()
    assert (walk.capacity.open, walk.capacity.at_engine) == (0, 0)
    assert walk.capacity.free >= min(concurrent, walk.capacity.max_open), "all places are free again"


@given(st.integers(1, 40), st.integers(0, 400), st.integers())
def test_tools_that_hang_add_at_most_as_many_trajectories_as_were_at_the_engine(
    concurrent: int, steps: int, seed: int
):
    walk = Walk(Capacity("auto", engine_concurrent=concurrent), seed)
    for _ in range(steps):
        walk.step()
    capacity = walk.capacity
    unused = max(0, capacity.limit + 1 - capacity.open)
    bound = capacity.open + (unused + GROWTH * capacity.at_engine) / (1 - GROWTH)
    at_engine = [slot for slot in walk.slots if slot.is_at_engine]
    while capacity.free or at_engine:
        while capacity.free:
            at_engine.append(capacity.enter())
        at_engine.pop().answered()  # and its tool never returns
    assert capacity.open <= bound


@given(st.integers(1, 40))
def test_the_limit_reaches_its_bound_if_tools_take_forever_but_return(concurrent: int):
    capacity = Capacity("auto", engine_concurrent=concurrent)
    away: list[TrajectorySlot] = []
    for _ in range(MAX_FACTOR):  # a round adds at least what the engine works on at once
        for slot in away:
            slot.ask()
        asking, away = away, []
        while capacity.free or asking:
            slot = capacity.enter() if capacity.free else asking.pop()
            slot.answered()
            away.append(slot)
    assert capacity.open == capacity.limit == capacity.max_open == MAX_FACTOR * concurrent
    for slot in away:
        slot.ask()
    assert capacity.free == 0
    for slot in away:
        slot.leave()
    assert capacity.free == capacity.wanted


def test_a_fixed_limit_ignores_the_engine():
    capacity = Capacity(3, engine_concurrent=1)
    slots = [capacity.enter() for _ in range(3)]
    assert capacity.free == 0
    for slot in slots * 5:
        slot.answered()
        slot.ask()
        assert capacity.limit == 3
    with pytest.raises(RuntimeError, match="no trajectory may begin now, because 3 are open"):
        capacity.enter()
    slots[0].leave()
    assert capacity.free == 1


def test_a_slot_counts_each_state_once():
    capacity = Capacity("auto", engine_concurrent=8)
    with capacity.enter() as slot:
        slot.ask()
        assert (capacity.open, capacity.at_engine) == (1, 1)
        slot.answered()
        slot.answered()
        assert (capacity.open, capacity.at_engine) == (1, 0)
        slot.ask()
        slot.ask()
        assert (capacity.open, capacity.at_engine) == (1, 1)
    slot.leave()
    slot.ask()
    assert (capacity.open, capacity.at_engine, slot.is_open) == (0, 0, False)


@pytest.mark.parametrize(
    ("limit", "concurrent", "words"),
    [
        (0, 1, "limit must be 1 or more, and whole; got 0"),
        ("all", 1, "limit is a number of trajectories or 'auto'; got 'all'"),
        ("auto", 0, "engine_concurrent must be 1 or more"),
    ],
)
def test_wrong_limits_are_refused(limit: Any, concurrent: int, words: str):
    with pytest.raises(ValueError, match=words):
        Capacity(limit, engine_concurrent=concurrent)
