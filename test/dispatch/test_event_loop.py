"""The one event-loop thread: usable from any thread, survives its tasks, recreated after a fork.

Threads for blocking tools: bounded, given up when a call is over, gone after close.
"""

import asyncio
import contextvars
import os
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.limit import limit
from helpers.processes import run_program

from torchrl_agentic.dispatch import event_loop


async def _thread() -> int:
    await asyncio.sleep(0)
    return threading.get_ident()


def test_a_coroutine_runs_on_the_one_loop_thread():
    assert event_loop.run(_thread()) == event_loop.run(_thread()) != threading.get_ident()


async def test_it_works_inside_a_running_loop():
    assert event_loop.run(_thread()) != threading.get_ident()


def test_several_threads_use_one_loop_at_once():
    """Each waits for the other on the loop: one after the other, none would return."""
    barrier: list[asyncio.Barrier] = []

    async def make() -> None:
        barrier.append(asyncio.Barrier(4))

    async def meet() -> int:
        async with asyncio.timeout(limit(5)):
            await barrier[0].wait()
        return threading.get_ident()

    event_loop.run(make())
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(lambda _: event_loop.run(meet()), range(4)))) == 1


def test_an_exception_reaches_the_caller():
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        event_loop.run(fail())


def test_from_the_loop_thread_itself_it_raises():
    async def nested() -> None:
        event_loop.run(_thread())

    with pytest.raises(RuntimeError, match="own event loop"):
        event_loop.run(nested())


def _run(code: str) -> str:
    done = run_program(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_interrupt_cancels_the_coroutine_before_it_returns():
    """In a separate process, because of the signal. The cleanup of the coroutine prints first."""
    out = _run(
        """
        import _thread, asyncio, threading
        from torchrl_agentic.dispatch import event_loop

        begun = threading.Event()

        async def work():
            begun.set()
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(0.05)
                print("cancelled", flush=True)

        import os, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
        interrupt = lambda: (begun.wait(), os.kill(os.getpid(), signal.SIGINT))
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            event_loop.run(work())
        except KeyboardInterrupt:
            print("interrupted", flush=True)

        async def more():
            return "usable"

        print(event_loop.run(more()))
        """
    )
    assert out.split() == ["cancelled", "interrupted", "usable"]


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt"])
@pytest.mark.parametrize("where", ["coroutine", "background"])
def test_event_loop_survives_system_exit_of_a_task(kind: str, where: str):
    """Asyncio lets these through its loop, which would end the thread that every environment waits for."""
    out = _run(
        f"""
        import asyncio, os, threading
        from torchrl_agentic.dispatch import event_loop

        threading.excepthook = lambda args: None

        async def bad():
            raise {kind}("x")

        async def background():
            task = asyncio.create_task(bad())
            await asyncio.sleep(0.05)

        async def good():
            return "good"

        def work():
            try:
                event_loop.run(bad() if "{where}" == "coroutine" else background())
            except BaseException as error:
                print(type(error).__name__, flush=True)
            print(event_loop.run(good()), flush=True)
            os._exit(0)

        threading.Thread(target=work, daemon=True).start()
        import time
        time.sleep({limit(3)})
        print("hangs", flush=True)
        os._exit(0)
        """
    )
    assert out.split()[-1] == "good", out


def test_child_process_starts_its_own_event_loop():
    parent = event_loop._loop_thread()
    event_loop.run(_thread())
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            event_loop.run(_thread())
            os.write(writer, b"new" if event_loop._loop_thread() is not parent else b"old")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "new"
    os.waitpid(pid, 0)
    assert event_loop._loop_thread() is parent


async def test_a_coroutine_on_another_loop_returns_fails_and_is_cancelled():
    loop = asyncio.get_running_loop()
    began, ended = asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        raise KeyError("x")

    async def stay() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def cancelled() -> None:
        raise asyncio.CancelledError

    assert await asyncio.wrap_future(event_loop.submit_to(loop, _thread())) == threading.get_ident()
    with pytest.raises(KeyError):
        await asyncio.wrap_future(event_loop.submit_to(loop, fail()))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wrap_future(event_loop.submit_to(loop, cancelled()))
    running = event_loop.submit_to(loop, stay())
    await began.wait()
    running.cancel()
    await ended.wait()


def test_a_loop_that_ends_meanwhile_destroys_what_runs_in_silence():
    said = _run(
        """
        import asyncio, gc, sys
        sys.stderr = sys.stdout
        from torchrl_agentic.dispatch import event_loop

        async def stay():
            try:
                await asyncio.Event().wait()
            finally:
                print("ended")

        loop = asyncio.new_event_loop()
        future = event_loop.submit_to(loop, stay())
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        del loop
        gc.collect()
        print("done" if future.done() else "pending")
        """
    )
    assert sorted(said.split()) == ["ended", "pending"]


def test_a_closed_loop_takes_nothing():
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        event_loop.submit_to(loop, _thread())


async def _until(condition) -> None:
    async with asyncio.timeout(limit(5)):
        while not condition():
            await asyncio.sleep(0.005)


async def test_values_and_exceptions_are_returned():
    threads = event_loop.WorkerThreads(1)
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
    threads, let_go, begun = event_loop.WorkerThreads(1), threading.Event(), threading.Event()

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
    threads, alive = event_loop.WorkerThreads(1), threading.Event()
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
    threads = event_loop.WorkerThreads(1)
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
    before, threads = _ours(), event_loop.WorkerThreads(4)
    barrier = threading.Barrier(4)
    await asyncio.gather(*(threads.run(lambda: barrier.wait(limit(5))) for _ in range(4)))
    assert len(_ours() - before) == 4
    threads.close()
    await _until(lambda: not _ours() - before)
    assert await threads.run(lambda: 1) == 1
    threads.close()
    await _until(lambda: not _ours() - before)


async def test_threads_end_when_the_pool_is_garbage_collected():
    before, threads = _ours(), event_loop.WorkerThreads(2)
    await threads.run(lambda: 1)
    del threads
    await _until(lambda: not _ours() - before)


async def test_more_calls_than_threads_all_finish():
    threads = event_loop.WorkerThreads(3)
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
    threads = event_loop.WorkerThreads(4)
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
        event_loop.WorkerThreads(0)


async def _one_runs_and_one_is_queued():
    threads, let_go, begun = event_loop.WorkerThreads(1), threading.Event(), threading.Event()
    running = asyncio.create_task(threads.run(lambda: (begun.set(), let_go.wait(limit(20)))))
    await _until(begun.is_set)
    queued = asyncio.create_task(threads.run(lambda: "done"))
    await asyncio.sleep(0)
    return threads, let_go, running, queued
