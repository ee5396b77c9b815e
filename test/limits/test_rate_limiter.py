"""The limiter keeps its limits over every schedule, is fair, and loses nothing."""

import asyncio
import math
import pickle
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
from helpers.limit import limit
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic.limits import RateLimiter, Slot
from torchrl_agentic.testing import VirtualClock


def _limiter(clock: VirtualClock, **limits: Any) -> RateLimiter:
    return RateLimiter(clock=clock, call_later=clock.call_later, **limits)


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_concurrent": 0},
        {"max_concurrent": -1},
        {"max_concurrent": math.nan},
        {"rate_per_second": 0},
        {"rate_per_second": -1.0},
        {"rate_per_second": math.nan},
        {"rate_per_second": 1, "burst": 0.5},
        {"rate_per_second": 1, "burst": 0},
        {"rate_per_second": 1, "burst": math.nan},
        {"burst": 2},
    ],
)
def test_invalid_limits_are_rejected(limits: dict[str, Any]):
    with pytest.raises(ValueError, match=list(limits)[-1]):
        RateLimiter(**limits)


@pytest.mark.parametrize(("rate", "burst"), [(0.25, 1.0), (1, 1.0), (8, 8.0)])
def test_the_burst_is_one_second_of_the_rate_and_at_least_one(rate: float, burst: float):
    assert RateLimiter(rate_per_second=rate).burst == burst


class _World:
    """A limiter under a virtual clock, and the outcome of each request for a slot."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self.clock = VirtualClock()
        self.limiter = _limiter(self.clock, **limits)
        self.slots: list[Slot] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.starts: list[tuple[int, float]] = []
        self.held: set[int] = set()
        self.most = 0

    async def advance(self, seconds: float) -> None:
        """Run granted starts before time advances, so that they are recorded at their time."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            due = min(self.clock.due, default=end)
            self.clock.advance(max(0.0, min(due, end) - self.clock.now))
            await _settle()

    def want(self) -> None:
        number = len(self.tasks)
        self.slots.append(self.limiter.slot())
        self.tasks.append(asyncio.create_task(self._hold(number)))

    async def _hold(self, number: int) -> None:
        await self.slots[number].acquire()
        self.starts.append((number, self.clock.now))
        self.held.add(number)
        self.most = max(self.most, len(self.held))

    def give(self, which: int) -> None:
        if self.held:
            number = sorted(self.held)[which % len(self.held)]
            self.held.discard(number)
            self.slots[number].release()

    def cancel(self, which: int) -> None:
        waiting = [task for task in self.tasks if not task.done()]
        if waiting:
            waiting[which % len(waiting)].cancel()


_limits = st.fixed_dictionaries(
    {
        "max_concurrent": st.none() | st.integers(1, 3),
        "rate_per_second": st.none() | st.sampled_from([0.5, 1.0, 3.0, 7.3, 20.0]),
    }
)
_step = st.tuples(
    st.sampled_from(["want", "want", "give", "cancel", "give and cancel", "advance"]), st.integers(0, 7)
)


@settings(deadline=None, max_examples=3 * settings.default.max_examples)
@given(limits=_limits, burst=st.none() | st.integers(1, 4), steps=st.lists(_step, max_size=40))
def test_over_any_schedule_the_limits_hold_and_nothing_is_lost(
    limits: dict[str, Any], burst: int | None, steps: list[tuple[str, int]]
):
    """Random wants, releases, cancellations and time; a release and a cancellation also in one instant,
    so that some are cancelled after their slot was granted. At the end everybody who is left gets a turn."""
    if limits["rate_per_second"] is not None:
        limits["burst"] = burst

    async def play() -> None:
        world = _World(limits)
        for action, number in steps:
            if action == "want":
                world.want()
            elif action == "advance":
                await world.advance(number / 4)
            else:
                if "give" in action:
                    world.give(number)
                if "cancel" in action:
                    world.cancel(0 if "give" in action else number)
            await _settle()
            assert world.limiter.stats().in_flight == len(world.held)
        for _ in range(60):
            world.give(0)
            await _settle()
            await world.advance(4.0)
        assert all(task.done() for task in world.tasks), "somebody waits for ever"
        assert world.limiter.stats().waiting == 0
        started = [number for number, _ in world.starts]
        assert started == sorted(started), "not first come, first served"
        assert len(started) == sum(not task.cancelled() for task in world.tasks)
        assert world.most <= (limits["max_concurrent"] or math.inf)
        if limits["rate_per_second"] is not None:
            times = [time for _, time in world.starts]
            for first in range(len(times)):
                for last in range(first, len(times)):
                    allowed = world.limiter.burst + limits["rate_per_second"] * (times[last] - times[first])
                    assert last - first + 1 <= allowed + 1e-6

    asyncio.run(play())


async def test_a_rate_below_one_a_second_lets_calls_start():
    clock = VirtualClock()
    limiter = _limiter(clock, rate_per_second=0.25)
    first, second = limiter.slot(), limiter.slot()
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await _settle()
    clock.advance(3.9)
    await _settle()
    assert not waiting.done()
    clock.advance(0.2)
    await waiting


async def test_slot_and_token_are_taken_at_the_same_instant():
    """A long wait for a slot keeps no old token: the next start keeps its distance."""
    clock = VirtualClock()
    limiter = _limiter(clock, max_concurrent=1, rate_per_second=1, burst=1)
    slots = [limiter.slot() for _ in range(3)]
    await slots[0].acquire()
    tasks = [asyncio.create_task(slot.acquire()) for slot in slots[1:]]
    await _settle()
    clock.advance(10)
    slots[0].release()
    await tasks[0]
    slots[1].release()
    await _settle()
    assert not tasks[1].done(), "two starts in one instant at 1 a second"
    clock.advance(1)
    await tasks[1]


async def test_cancelled_waiters_give_their_tokens_back():
    """16 were granted and cancelled before they ran; the next waits no longer than without them."""
    clock = VirtualClock()
    limiter = _limiter(clock, max_concurrent=16, rate_per_second=8, burst=16)
    holders = [limiter.slot() for _ in range(16)]
    for slot in holders:
        await slot.acquire()
    waiting = [asyncio.create_task(limiter.slot().acquire()) for _ in range(16)]
    await _settle()
    clock.advance(2.0)  # 16 tokens are back
    for slot in holders:
        slot.release()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert limiter.stats().in_flight == 0
    assert all(limiter.try_acquire() for _ in range(16))
    assert not limiter.try_acquire()


@pytest.mark.parametrize("rate", [1, 3, 7, 10, 20, 33])
def test_the_whole_burst_starts_at_once(rate: float):
    """Sums of 1 / rate must not make the last of the burst wait for a rounding error."""
    limiter = _limiter(VirtualClock(1234.5), rate_per_second=rate, burst=rate)
    assert sum(limiter.try_acquire() for _ in range(2 * rate)) == rate


async def test_a_token_given_back_late_starts_no_two_calls_at_once():
    """A was granted at 0 and B at 1; that A never began gives C no right to start beside B, at 1 a second."""
    clock = VirtualClock()
    limiter = _limiter(clock, rate_per_second=1, burst=1)
    first = limiter.slot()
    await first.acquire()
    tasks = [asyncio.create_task(limiter.slot().acquire()) for _ in range(3)]
    await _settle()
    clock.advance(2)  # A at 1, B at 2, and neither task has run since
    tasks[0].cancel()
    await _settle()
    assert tasks[1].done()
    assert not tasks[2].done(), "C started in the same instant as B"
    clock.advance(1)
    await _settle()
    assert tasks[2].done()


async def test_heads_of_the_line_that_leave_leave_no_timers_behind():
    """Timers of heads that were cancelled re-armed themselves for ever while the line was not empty."""
    clock = VirtualClock()
    limiter = _limiter(clock, rate_per_second=1, burst=1)
    await limiter.slot().acquire()
    leaving = [asyncio.create_task(limiter.slot().acquire()) for _ in range(50)]
    staying = [asyncio.create_task(limiter.slot().acquire()) for _ in range(20)]
    await _settle()
    for task in leaving:
        task.cancel()
        await _settle()
    clock.advance(5)
    await _settle()
    assert sum(task.done() for task in staying) == 5
    assert len(clock.due) <= 2
    for task in staying:
        task.cancel()
    await asyncio.gather(*staying, return_exceptions=True)


def _in_threads(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    errors: list[BaseException] = []

    def work(coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            asyncio.run(coroutine)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(coroutine,)) for coroutine in coroutines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(20))
        assert not thread.is_alive(), "somebody waits for ever"
    assert errors == []


def test_several_event_loops_never_exceed_the_limit_together():
    limiter = RateLimiter(max_concurrent=2)
    lock, now, most, done = threading.Lock(), [0], [0], [0]

    async def call() -> None:
        async with limiter.slot():
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            await asyncio.sleep(0)
            with lock:
                now[0] -= 1
                done[0] += 1

    async def many() -> None:
        await asyncio.gather(*(call() for _ in range(40)))

    _in_threads([many() for _ in range(4)])
    assert done[0] == 160
    assert most[0] <= 2
    assert limiter.stats().in_flight == 0


async def test_waiters_of_a_closed_loop_do_not_block_the_others():
    limiter = RateLimiter(max_concurrent=1)
    held = limiter.slot()
    await held.acquire()

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        abandoned.append(loop.create_task(limiter.slot().acquire()))
        loop.call_soon(loop.call_soon, loop.stop)
        loop.run_forever()
        loop.close()

    abandoned: list[asyncio.Task[None]] = []
    thread = threading.Thread(target=abandon)
    thread.start()
    thread.join()
    assert limiter.stats().waiting == 1
    ours = asyncio.create_task(limiter.slot().acquire())
    await _settle()
    held.release()
    async with asyncio.timeout(limit(5)):
        await ours
    abandoned[0]._log_destroy_pending = False  # type: ignore[attr-defined]  left pending on purpose


async def test_a_head_whose_loop_closes_while_its_timer_runs_does_not_block_the_others():
    """The timer for the head ran on the head's loop, and died with it; we stood behind it already."""
    limiter = RateLimiter(rate_per_second=20, burst=1)
    await limiter.slot().acquire()
    in_line, may_close, abandoned = threading.Event(), threading.Event(), []

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        abandoned.append(loop.create_task(limiter.slot().acquire()))
        loop.call_soon(loop.call_soon, loop.stop)
        loop.run_forever()
        in_line.set()
        may_close.wait(limit(5))
        loop.close()

    thread = threading.Thread(target=abandon)
    thread.start()
    in_line.wait(limit(5))
    ours = asyncio.create_task(limiter.slot().acquire())
    await _settle()
    may_close.set()
    thread.join()
    try:
        async with asyncio.timeout(limit(20)):
            await ours
    finally:
        abandoned[0]._log_destroy_pending = False


@pytest.mark.parametrize("copied", [lambda limiter: pickle.loads(pickle.dumps(limiter)), RateLimiter.clone])
def test_a_copy_of_a_limiter_has_the_same_limits(copied):
    limiter = RateLimiter(max_concurrent=3, rate_per_second=2.5, burst=4)
    assert limiter.try_acquire()
    copy = copied(limiter)
    assert (copy.max_concurrent, copy.rate_per_second, copy.burst) == (3, 2.5, 4)
    assert copy.stats().in_flight == 0
    assert pickle.loads(pickle.dumps(RateLimiter(max_concurrent=1))).rate_per_second is None


async def test_stats_show_running_and_waiting_calls():
    clock = VirtualClock()
    limiter = _limiter(clock, max_concurrent=1)
    slot = limiter.slot()
    await slot.acquire()
    waiting = asyncio.create_task(limiter.slot().acquire())
    await _settle()
    stats = limiter.stats()
    assert (stats.in_flight, stats.waiting, stats.granted, stats.wait_p99_s) == (1, 1, 1, 0.0)
    clock.advance(5)
    slot.release()
    slot.release()  # does nothing
    await waiting
    stats = limiter.stats()
    assert (stats.in_flight, stats.waiting, stats.granted) == (1, 0, 2)
    assert 0.0 <= stats.wait_p50_s <= stats.wait_p99_s <= 5.0


async def test_no_limits_means_no_waiting():
    limiter = RateLimiter()
    assert all(limiter.try_acquire() for _ in range(1000))
