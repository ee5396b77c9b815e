"""Limits give way to a service that has too much to do, and come back; a broken service is left alone."""

import asyncio
import itertools
import math
import pickle

import pytest
from helpers.limit import limit
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.limits import CircuitOpen, RateLimiter
from torchrl_agentic.limits.circuit_breaker import LONGEST_S, CircuitBreaker
from torchrl_agentic.limits.token_bucket import AIMD, LEAST_SHARE, MAX_PAUSE_S, WINDOW_S
from torchrl_agentic.testing import VirtualClock


def _limiter(**limits) -> tuple[RateLimiter, VirtualClock]:
    clock = VirtualClock()
    return RateLimiter(clock=clock, call_later=clock.call_later, **limits), clock


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["over", "ok"]),
            st.floats(0, 5),
            st.none() | st.floats(allow_nan=True, allow_infinity=True),
        )
    ),
    st.floats(1, 1000),
)
def test_the_share_is_never_above_one_nor_cut_twice_within_a_window(events, size):
    aimd, now, cuts = AIMD(), 0.0, []
    for kind, later, retry_after in events:
        now += later
        before = aimd.share
        if kind == "over":
            aimd.record_overload(now, retry_after)
        else:
            aimd.record_success(size)
        assert LEAST_SHARE <= aimd.share <= 1
        assert aimd.paused_until <= now + 2 * MAX_PAUSE_S
        if aimd.share < before:
            cuts.append(now)
    assert all(later - earlier >= WINDOW_S for earlier, later in itertools.pairwise(cuts))


@pytest.mark.parametrize("retry_after", [None, 0.0, -5.0, math.nan])
def test_invalid_retry_after_gives_no_pause(retry_after):
    aimd = AIMD()
    aimd.record_overload(10.0, retry_after)
    assert aimd.paused_until <= 10.0
    assert aimd.share == 0.5


async def test_overload_halves_concurrency_and_success_restores_it():
    limiter, clock = _limiter(max_concurrent=8)
    limiter.record_overload()
    limiter.record_overload()  # of the same window
    assert limiter.stats().concurrent == 4
    taken = [limiter.try_acquire() for _ in range(8)]
    assert taken == [True] * 4 + [False] * 4
    clock.advance(2)
    limiter.record_overload()
    assert (limiter.stats().concurrent, limiter.stats().overloads) == (2, 3)
    for _ in range(100):
        limiter.record_success()
    assert limiter.stats().concurrent == 8


async def test_an_overload_halves_the_rate():
    limiter, clock = _limiter(rate_per_second=10, burst=1)
    limiter.record_overload()
    assert limiter.stats().per_second == pytest.approx(5)
    assert limiter.try_acquire()
    clock.advance(0.15)
    assert not limiter.try_acquire()
    clock.advance(0.06)
    assert limiter.try_acquire()


async def test_overload_without_a_limit_creates_one_from_the_current_load():
    limiter, _ = _limiter()
    for _ in range(10):
        assert limiter.try_acquire()
    limiter.record_overload()
    assert limiter.stats().concurrent == 5
    assert not limiter.try_acquire()


async def test_callers_wait_for_a_pause_and_continue_in_order():
    limiter, clock = _limiter(max_concurrent=4)
    limiter.record_overload(retry_after=3)
    began: list[int] = []

    async def call(number: int) -> None:
        async with limiter.slot():
            began.append(number)

    calls = [asyncio.create_task(call(number)) for number in range(3)]
    await _settle()
    clock.advance(2.9)
    await _settle()
    assert began == []
    assert 0 < limiter.stats().paused_s <= 1
    clock.advance(1.1)
    await asyncio.gather(*calls)
    assert began == [0, 1, 2]


async def test_circuit_opens_after_consecutive_failures_and_rejects_waiters():
    limiter, clock = _limiter(max_concurrent=1, break_after=2, break_seconds=5)
    assert limiter.try_acquire()
    waiting = asyncio.create_task(limiter.wait())
    await _settle()
    limiter.record_failure()
    assert not waiting.done()
    limiter.record_failure()
    with pytest.raises(CircuitOpen, match=r"5\.0 s"):
        await waiting
    with pytest.raises(CircuitOpen):
        limiter.try_acquire()
    stats = limiter.stats()
    assert (stats.circuit, stats.refused, stats.waiting) == ("open", 2, 0)
    clock.advance(5)
    assert limiter.stats().circuit == "half_open"


async def test_half_open_circuit_allows_one_trial_at_a_time():
    limiter, clock = _limiter(max_concurrent=9, break_after=1, break_seconds=5)
    assert limiter.try_acquire()
    limiter.record_failure()
    limiter.release()
    clock.advance(5)
    assert limiter.try_acquire()  # the try
    others = [asyncio.create_task(limiter.wait()) for _ in range(3)]
    await _settle()
    assert not any(task.done() for task in others)
    limiter.record_failure()
    limiter.release()
    for result in await asyncio.gather(*others, return_exceptions=True):
        assert isinstance(result, CircuitOpen)
    clock.advance(9.9)
    with pytest.raises(CircuitOpen):  # twice as long as the first time
        limiter.try_acquire()
    clock.advance(0.2)
    assert limiter.try_acquire()
    others = [asyncio.create_task(limiter.wait()) for _ in range(3)]
    await _settle()
    limiter.record_success()
    await asyncio.gather(*others)
    assert limiter.stats().circuit == "closed"


async def test_a_try_that_nothing_came_of_lets_the_next_one_try():
    limiter, clock = _limiter(break_after=1, break_seconds=5)
    limiter.record_failure()
    clock.advance(5)
    assert limiter.try_acquire()
    assert not limiter.try_acquire()
    limiter.release()
    assert limiter.try_acquire()


async def test_cancelled_wait_for_a_trial_does_not_block_others():
    limiter, clock = _limiter(break_after=1, break_seconds=5)
    limiter.record_failure()
    clock.advance(5)
    assert limiter.try_acquire()
    first, second = (asyncio.create_task(limiter.wait()) for _ in range(2))
    await _settle()
    limiter.release()  # lets the first one in, which is cancelled before it notices
    first.cancel()
    await _settle()
    await asyncio.wait_for(second, limit(20))


@given(st.lists(st.tuples(st.sampled_from(["ok", "bad", "begin", "end"]), st.floats(0, 30)), max_size=60))
def test_circuit_eventually_lets_a_call_through(events):
    breaker, now = CircuitBreaker(3, 5.0), 0.0
    for kind, later in events:
        now += later
        if kind == "ok":
            breaker.record_success()
        elif kind == "bad":
            breaker.record_failure(now)
        elif kind == "begin" and breaker.refusal(now) is None and not breaker.holds(now):
            breaker.begin(now)
        else:
            breaker.end()
    breaker.end()
    now += LONGEST_S
    assert breaker.refusal(now) is None
    assert not breaker.holds(now)


def test_a_pickled_limiter_breaks_as_it_did():
    limiter = pickle.loads(pickle.dumps(RateLimiter(max_concurrent=2, break_after=1, break_seconds=7)))
    limiter.record_failure()
    with pytest.raises(CircuitOpen, match=r"[67]\.\d s"):
        limiter.try_acquire()


@pytest.mark.parametrize(
    "bad", [{"break_after": 0}, {"break_after": 1.5}, {"break_after": 1, "break_seconds": 0}]
)
def test_invalid_circuit_options_are_rejected(bad):
    with pytest.raises(ValueError, match="break_"):
        RateLimiter(**bad)
