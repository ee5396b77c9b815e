"""`batched`: calls that wait at the same time are one call of the function; errors stay in their batch."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from helpers.limit import limit
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic import InfrastructureError, InvalidTask
from torchrl_agentic.collectors import Score
from torchrl_agentic.rewards import batched
from torchrl_agentic.testing import finished_trajectory

PATIENCE_S = limit(30)


def trajectories(count, start=0):
    return [finished_trajectory(str(number)) for number in range(start, start + count)]


def numbers(batch):
    return [float(one.answer) for one in batch]


class Recorder:
    """A sync function that waits in each call until it may go on, and keeps its batches."""

    def __init__(self):
        self.batches, self.began, self.may_end = [], threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, batch):
        self.batches.append(numbers(batch))
        self.began.release()
        assert self.may_end.acquire(timeout=PATIENCE_S)
        return numbers(batch)

    async def wait_for_begin(self):
        assert await asyncio.to_thread(self.began.acquire, timeout=PATIENCE_S)


async def gathered(scorer, count, start=0):
    return [float(one) for one in await asyncio.gather(*map(scorer, trajectories(count, start)))]


async def test_calls_made_together_are_one_batch():
    batches = []

    def score(batch):
        batches.append(numbers(batch))
        return numbers(batch)

    assert await gathered(batched(score), 5) == [0, 1, 2, 3, 4]
    assert batches == [[0, 1, 2, 3, 4]]


async def test_calls_made_during_a_batch_are_the_next_one():
    function = Recorder()
    scorer = batched(function, max_size=3)
    first = asyncio.create_task(gathered(scorer, 1))
    await function.wait_for_begin()
    others = asyncio.create_task(gathered(scorer, 5, start=1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    function.may_end.release(3)
    assert (await first, await others) == ([0], [1, 2, 3, 4, 5])
    assert function.batches == [[0], [1, 2, 3], [4, 5]]


async def test_one_batch_runs_at_a_time_by_default_and_more_on_request():
    running, most = 0, 0
    meeting = asyncio.Barrier(2)

    async def score(batch):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return numbers(batch)

    async def meet(batch):
        await meeting.wait()
        return numbers(batch)

    assert await gathered(batched(score, max_size=2), 8) == list(range(8))
    assert most == 1
    async with asyncio.timeout(PATIENCE_S):
        assert await gathered(batched(meet, max_size=2, max_concurrent=2), 4) == [0, 1, 2, 3]


async def test_sync_batches_run_on_so_many_threads():
    meeting = threading.Barrier(2)

    def meet(batch):
        meeting.wait(PATIENCE_S)
        return numbers(batch)

    assert await gathered(batched(meet, max_size=2, max_concurrent=2), 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("kind", "raised"), [(ValueError, RuntimeError), (InfrastructureError, InfrastructureError)]
)
async def test_an_error_fails_its_batch_and_no_other(is_async: bool, kind, raised):
    def score(batch):
        if 3.0 in numbers(batch):
            raise kind("bad trajectory")
        return numbers(batch)

    async def score_async(batch):
        return score(batch)

    scorer = batched(score_async if is_async else score, max_size=2)
    found = await asyncio.gather(*map(scorer, trajectories(6)), return_exceptions=True)
    assert [float(one) for one in found if isinstance(one, Score)] == [0, 1, 4, 5]
    failed = [one for one in found if isinstance(one, Exception)]
    assert [type(one) for one in failed] == [raised, raised]
    assert failed[0] is not failed[1]
    assert f"{kind.__name__}: bad trajectory" in str(failed[0])
    assert "a batch of 2 trajectories" in str(failed[0])
    assert isinstance(failed[0].__cause__, kind)


async def test_a_wrong_number_of_results_fails_its_batch_with_both_numbers():
    scorer = batched(lambda batch: [0.0] if 2.0 in numbers(batch) else numbers(batch), max_size=2)
    found = await asyncio.gather(*map(scorer, trajectories(4)), return_exceptions=True)
    assert [isinstance(one, Score) for one in found] == [True, True, False, False]
    assert "returned 1 numbers for 2 trajectories" in str(found[2])


async def test_a_bad_number_fails_its_own_trajectory_only():
    def score(batch):
        return [1.0, float("nan"), None, "1", Score(0.5, parts={"x": 1.0})]

    found = await asyncio.gather(*map(batched(score), trajectories(5)), return_exceptions=True)
    assert [type(one) for one in found] == [Score, ValueError, TypeError, TypeError, Score]


async def test_a_task_that_is_called_invalid_costs_the_others_of_its_batch_nothing():
    def score(batch):
        return [1.0, InvalidTask("no answer"), 2.0]

    found = await asyncio.gather(*map(batched(score), trajectories(3)), return_exceptions=True)
    assert [type(one) for one in found] == [Score, InvalidTask, Score]


@pytest.mark.parametrize(
    "make", [np.array, torch.tensor, tuple, iter, lambda values: torch.tensor(values)[:, None]]
)
async def test_results_may_be_arrays_and_tensors(make):
    assert await gathered(batched(lambda batch: make(numbers(batch))), 3) == [0, 1, 2]


async def test_a_cancelled_caller_does_not_lose_the_others():
    function = Recorder()
    scorer = batched(function)
    first = [asyncio.create_task(scorer(one)) for one in trajectories(3)]
    await function.wait_for_begin()
    second = [asyncio.create_task(scorer(one)) for one in trajectories(3, 3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first[1].cancel()
    second[1].cancel()
    await asyncio.sleep(0)
    function.may_end.release(2)
    found = await asyncio.gather(*first, *second, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in found] == [False, True, False] * 2
    assert function.batches == [[0, 1, 2], [3, 5]]


async def test_an_async_batch_that_nobody_waits_for_is_cancelled():
    began, ended = asyncio.Event(), asyncio.Event()

    async def score(batch):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    tasks = [asyncio.create_task(batched(score)(one)) for one in trajectories(1)]
    await began.wait()
    tasks[0].cancel()
    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()


@pytest.mark.parametrize("is_async", [False, True])
def test_several_event_loops_share_a_batched_function(is_async: bool):
    function = Recorder()

    async def score(batch):
        return await asyncio.to_thread(function, batch)

    scorer = batched(score if is_async else function)
    found = {}

    def work(start):
        found[start] = asyncio.run(gathered(scorer, 2, start))

    async def first_and_others():
        first = asyncio.create_task(gathered(scorer, 1, 100))
        await function.wait_for_begin()
        threads = [threading.Thread(target=work, args=(start,)) for start in (0, 2)]
        for thread in threads:
            thread.start()
        function.may_end.release(5)
        await first
        for thread in threads:
            await asyncio.to_thread(thread.join, PATIENCE_S)

    asyncio.run(first_and_others())
    assert found == {0: [0, 1], 2: [2, 3]}


def test_a_loop_that_ends_in_the_middle_of_a_batch_gives_others_their_scores():
    """The batch runs on the loop of its first caller, and that loop ends."""
    entered, hanging = threading.Event(), threading.Event()
    calls = []

    async def score(batch):
        calls.append(numbers(batch))
        if len(calls) == 1:
            entered.set()
            await asyncio.Event().wait()
        return numbers(batch)

    scorer = batched(score)
    found = []

    async def impatient():
        task = asyncio.create_task(scorer(trajectories(1)[0]))
        await asyncio.to_thread(entered.wait, PATIENCE_S)
        hanging.wait(PATIENCE_S)
        del task  # asyncio.run cancels it

    def patient():
        async def ask():
            call = asyncio.create_task(gathered(scorer, 1, 7))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            hanging.set()
            return await call

        assert entered.wait(PATIENCE_S)
        found.extend(asyncio.run(ask()))

    thread = threading.Thread(target=patient)
    thread.start()
    asyncio.run(impatient())
    thread.join(PATIENCE_S)
    assert found == [7.0]
    assert calls == [[0.0], [7.0]]


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="function of a list"):
        batched(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="max_size"):
        batched(numbers, max_size=0)


async def test_a_plain_function_that_returns_a_coroutine_is_explained():
    async def score(batch):
        return numbers(batch)

    with pytest.raises(RuntimeError, match="async def"):
        await batched(lambda batch: score(batch))(trajectories(1)[0])


def test_a_batch_of_several_loops_outlives_the_loop_that_it_runs_on():
    """Calls of another loop in that batch are made again, on their own loop."""
    entered, queued, both = threading.Event(), threading.Event(), threading.Event()
    may_end = threading.Event()
    calls = []

    async def score(batch):
        calls.append(numbers(batch))
        if len(calls) == 1:
            entered.set()
            await asyncio.to_thread(may_end.wait, PATIENCE_S)
        if len(calls) == 2:
            both.set()
            await asyncio.Event().wait()
        return numbers(batch)

    scorer = batched(score)
    found = []

    async def impatient():
        first = asyncio.create_task(scorer(finished_trajectory("0")))
        await asyncio.to_thread(entered.wait, PATIENCE_S)
        second = asyncio.create_task(scorer(finished_trajectory("1")))
        await asyncio.sleep(0)
        thread.start()
        await asyncio.to_thread(queued.wait, PATIENCE_S)
        may_end.set()
        await asyncio.to_thread(both.wait, PATIENCE_S)
        assert float(await first) == 0
        del second  # asyncio.run cancels it, and the batch with it

    def patient():
        async def ask():
            call = asyncio.create_task(gathered(scorer, 1, 7))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            queued.set()
            return await call

        found.extend(asyncio.run(ask()))

    thread = threading.Thread(target=patient)
    asyncio.run(impatient())
    thread.join(PATIENCE_S)
    assert found == [7.0]
    assert calls == [[0.0], [1.0, 7.0], [7.0]]


def test_a_batch_on_a_loop_that_has_stopped_blocks_nobody():
    entered = threading.Event()

    async def score(batch):
        if not entered.is_set():
            entered.set()
            await asyncio.Event().wait()
        return numbers(batch)

    scorer = batched(score)
    stopped = asyncio.new_event_loop()

    async def begin():
        task = asyncio.create_task(scorer(finished_trajectory("0")))
        await asyncio.to_thread(entered.wait, PATIENCE_S)
        return task

    try:
        task = stopped.run_until_complete(begin())
        assert asyncio.run(gathered(scorer, 2)) == [0, 1]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            stopped.run_until_complete(task)
        stopped.run_until_complete(asyncio.sleep(0))
    finally:
        stopped.close()


@given(st.data())
def test_each_caller_gets_its_own_score_or_the_error_of_its_batch(data):
    """For any sizes, failing trajectories, cancelled callers and kinds of functions."""
    count, max_size = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    failing = data.draw(st.sets(st.integers(0, count - 1)))
    cancelled = data.draw(st.sets(st.integers(0, count - 1)))
    max_concurrent, is_async = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    batches = []

    def score(batch):
        batches.append(numbers(batch))
        if failing & {int(one) for one in numbers(batch)}:
            raise ValueError("bad")
        return numbers(batch)

    async def score_async(batch):
        await asyncio.sleep(0)
        return score(batch)

    async def run():
        scorer = batched(score_async if is_async else score, max_size=max_size, max_concurrent=max_concurrent)
        tasks = [asyncio.create_task(scorer(one)) for one in trajectories(count)]
        await asyncio.sleep(0)
        for number in cancelled:
            tasks[number].cancel()
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(run())
    spoilt = {one for batch in batches if failing & set(map(int, batch)) for one in batch}
    for number, result in enumerate(found):
        if number in cancelled:
            assert isinstance(result, asyncio.CancelledError)
        elif number in spoilt:
            assert "ValueError: bad" in str(result)
        else:
            assert float(result) == number
    assert all(len(batch) <= max_size for batch in batches)
    assert len([one for batch in batches for one in batch]) <= count
