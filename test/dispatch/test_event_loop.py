"""The one event-loop thread: usable from any thread, survives its tasks, recreated after a fork."""

import asyncio
import os
import sys
import textwrap
import threading
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
