"""KVBudget: additive increase, multiplicative decrease, by what an engine reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.collectors.kv_budget import BACKOFF, EASE, FULL, GROWTH, ROOM, START, KVBudget
from torchrl_agentic.engines import EnginePressure

FREE = EnginePressure(kv_use=0.5, waiting=0, running=10, preempted=0)


def seen(kv_use: float, *, preempted: int = 0, waiting: int = 0) -> EnginePressure:
    return EnginePressure(kv_use, waiting, 10, preempted)


def settled(size: float, preempted: int = 0) -> KVBudget:
    """Return a budget of a size, whose engine was full once."""
    budget = KVBudget(64)
    budget.observe(seen(ROOM, preempted=preempted), tokens=size, requests=10, answers=0, is_short=True)
    assert budget.size == size
    return budget


OBSERVATIONS = st.lists(
    st.tuples(
        st.floats(0.0, 1.0),  # use of the KV cache
        st.integers(0, 3),  # preemptions since the last one
        st.integers(0, 30),  # waiting in the engine
        st.floats(0.0, 1.0),  # share of the budget that is in use
        st.integers(0, 300),  # requests
        st.integers(0, 300),  # answers
        st.booleans(),
    ),
    max_size=40,
)


@given(st.integers(1, 300), OBSERVATIONS)
def test_each_observation_grows_shrinks_or_keeps_the_budget_by_its_rule(
    concurrent: int, observations: list[Any]
):
    budget = KVBudget(concurrent)
    assert budget.first >= 1
    total, step, is_first = 0, None, True
    for use, preempted, waiting, share, requests, answers, is_short in observations:
        total += preempted
        preempted, is_first = 0 if is_first else preempted, False  # those before it began do not count
        before = budget.size
        tokens = share * (before or 1000.0)
        report = EnginePressure(use, waiting, 10, total)
        budget.observe(report, tokens=tokens, requests=requests, answers=answers, is_short=is_short)
        after = budget.size
        if not requests:
            assert after == before
            continue
        assert after is not None
        assert after >= 1.0
        grown = after - max(tokens if before is None else before, 1.0)
        if use >= ROOM or not is_short:
            assert grown <= 1e-6, "it grows only while there is room, and requests are held back"
        elif step is not None:
            assert grown <= step * min(1.0, answers / requests) + 1e-6, "a fixed number of tokens"
        else:
            assert grown <= START * answers * tokens / requests + 1e-6
        if grown < -1e-6:
            assert use >= FULL or preempted
            base = min(before or tokens, tokens)
            assert after == pytest.approx(max(1.0, base * (BACKOFF if preempted else EASE)))
            step = base * (BACKOFF if preempted else EASE) * GROWTH
        elif step is None and (use >= ROOM or preempted):
            step = after


@given(st.floats(1_000, 1e6), st.floats(10, 900), st.floats(0.2, 1.0), st.integers(1, 300))
def test_it_finds_the_size_of_the_cache_and_stays_below(
    cache: float, request: float, shared: float, concurrent: int
):
    """The engine is busy; its requests share a part of their prompts, which takes less than their tokens."""
    budget, most = KVBudget(concurrent), max(1, int(cache / request / shared))
    requests, uses = min(budget.first, most), []
    for _ in range(200):
        tokens = requests * request
        uses.append(tokens * shared / cache)
        report = EnginePressure(min(1.0, uses[-1]), 0, requests, 0)
        budget.observe(report, tokens=tokens, requests=requests, answers=requests, is_short=True)
        assert budget.size is not None
        requests = max(1, int(budget.size / request))
    one = request * shared / cache
    assert max(uses) < 1 + one, "it never overflows, but for the size of a request"
    assert max(uses[-60:]) > ROOM - one, "it is full"
    assert min(uses[-60:]) > EASE * FULL - 0.1 - 2 * one


@given(st.floats(100, 1e6), st.integers(1, 8))
def test_preemptions_shrink_it_and_it_recovers_when_they_end(size: float, bursts: int):
    budget = settled(size)
    for burst in range(bursts):
        tokens = budget.size
        assert tokens is not None
        report = seen(1.0, preempted=burst + 1)
        budget.observe(report, tokens=tokens, requests=10, answers=10, is_short=True)
    low = budget.size
    assert low == pytest.approx(size * BACKOFF**bursts)
    calm = seen(0.5, preempted=bursts)
    for _ in range(500):
        if budget.size >= size:
            break
        budget.observe(calm, tokens=budget.size, requests=10, answers=10, is_short=True)
    assert budget.size >= size


def test_a_decrease_waits_until_the_last_one_has_come_into_effect():
    budget = settled(1_000.0)
    budget.observe(seen(1.0, preempted=1), tokens=1_000.0, requests=10, answers=3, is_short=True)
    assert budget.size == pytest.approx(1_000.0 * BACKOFF)
    budget.observe(seen(1.0, preempted=2), tokens=975.0, requests=9, answers=3, is_short=True)
    assert budget.size == pytest.approx(1_000.0 * BACKOFF), "the requests of before are still at the engine"
    budget.observe(seen(1.0, preempted=3), tokens=850.0, requests=8, answers=3, is_short=True)
    assert budget.size == pytest.approx(850.0 * BACKOFF)


@pytest.mark.parametrize(
    ("report", "is_short"),
    [
        pytest.param(FREE, False, id="nothing was held back"),
        pytest.param(dataclasses.replace(FREE, kv_use=ROOM), True, id="the cache is full enough"),
        pytest.param(dataclasses.replace(FREE, waiting=5), True, id="requests wait in the engine"),
    ],
)
def test_it_does_not_grow_without_need(report: EnginePressure, is_short: bool):
    budget = settled(1_000.0)
    budget.observe(report, tokens=1_000.0, requests=10, answers=10, is_short=is_short)
    assert budget.size == 1_000.0


def test_preemptions_before_the_first_observation_do_not_count():
    budget = KVBudget(64)
    budget.observe(seen(0.5, preempted=7), tokens=1_000.0, requests=10, answers=0, is_short=False)
    assert budget.size == 1_000.0


def test_a_wrong_number_of_concurrent_requests_is_refused():
    with pytest.raises(ValueError, match="concurrent must be 1 or more"):
        KVBudget(0)
