"""A clock that skips sleeps: it advances by timers only, and waits for work on threads."""

import asyncio
import random
import threading
import time

import pytest
from helpers.limit import limit

from torchrl_agentic.dispatch.event_loop import WorkerThreads
from torchrl_agentic.testing import SkipClockLoop, run_skipping

DAY_S = 86_400.0


def _now() -> float:
    return asyncio.get_running_loop().time()


def test_sleeps_take_the_time_of_the_clock_and_no_other():
    async def main() -> tuple[float, float]:
        before = _now()
        await asyncio.gather(*(asyncio.sleep(delay) for delay in (DAY_S, 7 * DAY_S, 1.5)))
        return before, _now()

    assert run_skipping(main()) == (0.0, 7 * DAY_S)


def test_sleepers_wake_in_the_order_of_their_times():
    woken: list[float] = []

    async def sleep(delay: float) -> None:
        await asyncio.sleep(delay)
        assert _now() == pytest.approx(delay)
        woken.append(delay)

    async def main(delays: list[float]) -> None:
        await asyncio.gather(*map(sleep, delays))

    delays = [random.Random(3).uniform(0, 1e6) for _ in range(200)]
    run_skipping(main(delays))
    assert woken == sorted(delays)


def test_time_does_not_pass_without_timers():
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        await asyncio.to_thread(time.sleep, 0.05)
        return _now()

    assert run_skipping(main()) == 0.0


def test_two_runs_see_the_same_times():
    async def main(seed: int) -> list[tuple[int, float]]:
        seen: list[tuple[int, float]] = []
        rng = random.Random(seed)

        async def worker(number: int) -> None:
            for _ in range(20):
                await asyncio.sleep(rng.lognormvariate(0, 3))
                seen.append((number, _now()))

        await asyncio.gather(*map(worker, range(20)))
        return seen

    assert run_skipping(main(5)) == run_skipping(main(5))


def test_a_timeout_fires_at_its_time():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()
        return _now()

    assert run_skipping(main()) == 3600.0


@pytest.mark.parametrize("how", ["to_thread", "worker threads", "busy"])
@pytest.mark.parametrize("counts_cpu", [False, True])
def test_the_clock_does_not_skip_ahead_of_a_job_on_a_thread(how: str, counts_cpu: bool):
    """A timer of an hour does not fire before the job, which waits for an event of this test."""
    order: list[str] = []
    running, go = threading.Event(), threading.Event()

    def job() -> None:
        running.set()
        assert go.wait(limit(20))
        order.append("job")

    def release() -> None:
        assert running.wait(limit(20))
        time.sleep(0.02)  # gives a wrong loop time to skip; the order below needs no luck
        go.set()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SkipClockLoop)
        loop.call_later(3600, order.append, "timer")
        if how == "to_thread":
            await asyncio.to_thread(job)
        elif how == "worker threads":
            threads = WorkerThreads(1)
            await threads.run(job)
            threads.close()
        else:
            done = asyncio.Event()
            own = threading.Thread(target=lambda: (job(), loop.call_soon_threadsafe(done.set)))
            with loop.busy():
                own.start()
                await done.wait()
            own.join()
        assert order == ["job"]
        await asyncio.sleep(3601)

    releaser = threading.Thread(target=release)
    releaser.start()
    run_skipping(main(), counts_cpu=counts_cpu)
    releaser.join()
    assert order == ["job", "timer"]


def test_a_busy_block_left_in_another_thread_wakes_the_loop():
    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SkipClockLoop)
        entered = threading.Event()

        def hold() -> None:
            with loop.busy():
                entered.set()
                time.sleep(0.02)

        own = threading.Thread(target=hold)
        own.start()
        assert entered.wait(limit(20))
        await asyncio.sleep(DAY_S)
        own.join()
        return _now()

    assert run_skipping(main(), thread_limit_s=60) == DAY_S


@pytest.mark.parametrize("counts_cpu", [False, True])
def test_a_timeout_ends_the_wait_for_a_job_that_hangs(counts_cpu: bool):
    end = threading.Event()

    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.to_thread(end.wait, 20)
        end.set()
        return _now()

    assert run_skipping(main(), thread_limit_s=0.05, counts_cpu=counts_cpu) == pytest.approx(3600, abs=10)


def test_the_clock_skips_again_after_a_job():
    async def main() -> float:
        await asyncio.to_thread(lambda: None)
        await asyncio.sleep(DAY_S)
        return _now()

    assert run_skipping(main(), thread_limit_s=60) == DAY_S


def test_a_deadlock_is_an_error():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_skipping(main(), thread_limit_s=0.05)


def test_a_long_job_without_a_timer_is_no_deadlock():
    async def main() -> float:
        await asyncio.to_thread(time.sleep, 0.1)
        return _now()

    assert run_skipping(main(), thread_limit_s=0.01) == 0.0


def test_cpu_time_counts_beside_skipped_time():
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SkipClockLoop)
        before = time.perf_counter()
        while time.perf_counter() - before < 0.01:
            pass
        await asyncio.sleep(DAY_S)
        return _now(), loop.skipped_s

    now, skipped = run_skipping(main(), counts_cpu=True)
    assert now >= DAY_S + 0.01
    assert DAY_S - 0.01 <= skipped <= DAY_S


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_limit_that_is_not_positive_is_refused(limit: float):
    with pytest.raises(ValueError, match="thread_limit_s"):
        SkipClockLoop(thread_limit_s=limit)
