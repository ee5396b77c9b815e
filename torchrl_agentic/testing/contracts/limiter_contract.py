"""The contract of every limiter."""

from __future__ import annotations

import asyncio
import threading

import pytest

from torchrl_agentic.limits import Limiter

PATIENCE_S = 60.0
"""Time limit for an event that must happen, in seconds."""
SOON_S = 0.2
"""Time in which an event that must not happen is watched for, in seconds."""


class LimiterContract:
    """Tests of a `Limiter` with event loops, threads and cancelled callers."""

    def make(self, max_concurrent: int) -> Limiter:
        """Return a fresh limiter that admits `max_concurrent` callers at once."""
        raise NotImplementedError

    @pytest.mark.asyncio
    async def test_no_more_run_at_once_than_it_says(self) -> None:
        limiter = self.make(3)
        inside = most = 0

        async def call() -> None:
            nonlocal inside, most
            async with limiter.slot():
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0.001)
                inside -= 1

        await asyncio.wait_for(asyncio.gather(*(call() for _ in range(60))), PATIENCE_S)
        assert most == 3
        assert limiter.stats().in_flight == 0
        assert limiter.stats().granted == 60

    @pytest.mark.asyncio
    async def test_first_come_first_served(self) -> None:
        limiter = self.make(1)
        order: list[int] = []

        async def call(number: int) -> None:
            async with limiter.slot():
                order.append(number)

        async with limiter.slot():
            calls = [asyncio.create_task(call(number)) for number in range(10)]
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)
        assert order == list(range(10))

    @pytest.mark.asyncio
    async def test_an_error_inside_gives_the_slot_back(self) -> None:
        limiter = self.make(1)
        for _ in range(3):
            with pytest.raises(KeyError):
                async with limiter.slot():
                    raise KeyError
        assert limiter.stats().in_flight == 0

    @pytest.mark.asyncio
    async def test_cancelled_waiter_takes_no_slot(self) -> None:
        limiter = self.make(1)
        async with limiter.slot():
            waiting = [asyncio.create_task(limiter.wait()) for _ in range(20)]
            await asyncio.sleep(0.01)
            for task in waiting[::2]:
                task.cancel()
            await asyncio.sleep(0)
        for task in waiting[1::2]:
            await asyncio.wait_for(task, PATIENCE_S)
            limiter.release()
        assert limiter.stats().in_flight == 0
        assert limiter.stats().waiting == 0

    @pytest.mark.asyncio
    async def test_a_slot_is_given_back_once_however_often_it_is_released(self) -> None:
        limiter = self.make(2)
        first, second = limiter.slot(), limiter.slot()
        await first.acquire()
        await second.acquire()
        first.release()
        first.release()
        assert limiter.stats().in_flight == 1
        second.release()

    @pytest.mark.asyncio
    async def test_a_slot_is_taken_at_once_or_not_at_all(self) -> None:
        limiter = self.make(1)
        first, second = limiter.slot(), limiter.slot()
        await first.acquire()
        assert not second.acquire_now()
        assert limiter.stats().waiting == 0
        first.release()
        assert second.acquire_now()
        assert limiter.stats().in_flight == 1
        second.release()
        assert limiter.stats().in_flight == 0

    @pytest.mark.asyncio
    async def test_waiter_gets_the_next_free_slot(self) -> None:
        limiter = self.make(1)
        async with limiter.slot():
            waiting = asyncio.create_task(limiter.wait())
            done, _ = await asyncio.wait([waiting], timeout=SOON_S)
            assert not done
            assert limiter.stats().waiting == 1
        await asyncio.wait_for(waiting, PATIENCE_S)
        limiter.release()

    def test_event_loops_of_several_threads_share_it(self) -> None:
        limiter = self.make(2)
        lock = threading.Lock()
        inside = most = done = 0

        async def call() -> None:
            nonlocal inside, most, done
            async with limiter.slot():
                with lock:
                    inside += 1
                    most = max(most, inside)
                await asyncio.sleep(0.001)
                with lock:
                    inside -= 1
                    done += 1

        async def calls() -> None:
            await asyncio.gather(*(call() for _ in range(20)))

        threads = [threading.Thread(target=asyncio.run, args=(calls(),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert done == 80
        assert most <= 2

    @pytest.mark.asyncio
    async def test_an_overload_lets_fewer_in_and_success_more_again(self) -> None:
        limiter = self.make(8)
        async with limiter.slot():
            limiter.record_overload()
            async with asyncio.timeout(PATIENCE_S):
                while limiter.stats().concurrent == 8:  # noqa: ASYNC110  another thread changes it
                    await asyncio.sleep(0.01)
                assert limiter.stats().overloads == 1
                while limiter.stats().concurrent < 8:
                    limiter.record_success()
                    await asyncio.sleep(0.001)
