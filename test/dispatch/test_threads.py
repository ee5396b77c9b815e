"""Threads for blocking tools: bounded, given up when a call is over, gone after close."""

import asyncio
import contextvars
import threading
import time

import pytest
from helpers.limit import limit

from torchrl_agentic.dispatch.event_loop import WorkerThreads


async def _until(condition) -> None:
    async with asyncio.timeout(limit(5)):
        while not condition():
            await asyncio.sleep(0.005)


async def test_values_and_exceptions_are_returned():
    threads = WorkerThreads(1)
    assert await threads.run(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    with pytest.raises(SystemExit):
        await threads.run(lambda: (_ for _ in ()).throw(SystemExit(1)))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(lambda: next(iter(())))
    assert await threads.run(lambda: 4) == 4
    threads.close()


async def test_abandoned_call_frees_its_thread():
    """One place; the function in it blocks in C until we let it go, after another has run."""
    threads, let_go, begun = WorkerThreads(1), threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        let_go.wait(limit(20))

    stuck = asyncio.create_task(threads.run(block))
    await _until(begun.is_set)
    waiting = asyncio.create_task(threads.run(lambda: "through"))
    await asyncio.sleep(0)
    stuck.cancel()
    async with asyncio.timeout(limit(5)):
        assert await waiting == "through"
    assert stuck.cancelled() or stuck.cancelling()
    let_go.set()
    threads.close()


async def test_an_endless_loop_in_python_is_stopped():
    threads, alive = WorkerThreads(1), threading.Event()
    ended = threading.Event()

    def spin() -> None:
        try:
            while True:
                alive.set()
        finally:
            ended.set()

    task = asyncio.create_task(threads.run(spin))
    await _until(alive.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _until(ended.is_set)
    threads.close()


async def test_context_variables_are_copied():
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    threads = WorkerThreads(1)
    variable.set("outside")

    def change() -> str:
        seen = variable.get()
        variable.set("inside")
        return seen

    assert await threads.run(change) == "outside"
    assert variable.get() == "outside"
    threads.close()


def _ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "torchrl_agentic-tool"}


async def test_threads_end_after_close_and_a_later_call_makes_new_ones():
    before, threads = _ours(), WorkerThreads(4)
    barrier = threading.Barrier(4)
    await asyncio.gather(*(threads.run(lambda: barrier.wait(limit(5))) for _ in range(4)))
    assert len(_ours() - before) == 4
    threads.close()
    await _until(lambda: not _ours() - before)
    assert await threads.run(lambda: 1) == 1
    threads.close()
    await _until(lambda: not _ours() - before)


async def test_threads_end_when_the_pool_is_garbage_collected():
    before, threads = _ours(), WorkerThreads(2)
    await threads.run(lambda: 1)
    del threads
    await _until(lambda: not _ours() - before)


async def test_more_calls_than_threads_all_finish():
    threads = WorkerThreads(3)
    assert await asyncio.gather(*(threads.run(lambda n=n: n) for n in range(200))) == list(range(200))
    assert threads._pool.alive <= 3
    threads.close()


async def test_close_ends_queued_calls():
    threads, let_go, running, queued = await _one_runs_and_one_is_queued()
    threads.close()
    let_go.set()
    await running
    done, _ = await asyncio.wait([queued], timeout=limit(2))
    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    assert done, "the call neither ran nor failed"


async def test_a_queued_call_can_be_cancelled_after_close():
    threads, let_go, running, queued = await _one_runs_and_one_is_queued()
    threads.close()
    queued.cancel()
    result = (await asyncio.gather(queued, return_exceptions=True))[0]
    let_go.set()
    await running
    assert isinstance(result, asyncio.CancelledError | RuntimeError), repr(result)


async def test_call_may_end_while_it_is_cancelled():
    """Cancellation races with the end of the function; afterwards every place is usable."""
    threads = WorkerThreads(4)
    for pause in range(200):
        task = asyncio.create_task(threads.run(lambda pause=pause: time.sleep((pause % 7) * 1e-4)))
        await asyncio.sleep((pause % 5) * 1e-4)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(limit(5)):
        barrier = threading.Barrier(4)
        await asyncio.gather(*(threads.run(lambda: barrier.wait(limit(5))) for _ in range(4)))
    threads.close()


def test_at_least_one_thread_is_needed():
    with pytest.raises(ValueError, match="0"):
        WorkerThreads(0)


async def _one_runs_and_one_is_queued():
    threads, let_go, begun = WorkerThreads(1), threading.Event(), threading.Event()
    running = asyncio.create_task(threads.run(lambda: (begun.set(), let_go.wait(limit(20)))))
    await _until(begun.is_set)
    queued = asyncio.create_task(threads.run(lambda: "done"))
    await asyncio.sleep(0)
    return threads, let_go, running, queued
