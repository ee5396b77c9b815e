"""The one event-loop thread of the process.

Made on first use, shared by all environments, made anew after a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, cast

T = TypeVar("T")
logger = logging.getLogger(__name__)

SIGNAL_CHECK_S = 0.25
"""How long an interrupt may take to be noticed at worst."""
GRACE_S = 5.0
"""How long an interrupted caller waits for what it started to end."""


class _LoopThread:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve, name="torchrl_agentic", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # of a task that some tool has started
                logger.exception("a background task wanted to end the program; the event loop goes on")


_current: _LoopThread | None = None
_lock = threading.Lock()


def _loop_thread() -> _LoopThread:
    global _current, _lock
    current = _current
    if current is not None and current.pid == os.getpid():
        return current
    if current is not None:  # after a fork the thread is gone, and the lock may have been copied while held
        _lock = threading.Lock()
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = _LoopThread()
        return _current


async def _contained(coroutine: Coroutine[Any, Any, T]) -> tuple[T | None, BaseException | None]:
    """Keep from the loop what would end it, and with it every environment of the process."""
    try:
        return await coroutine, None
    except (SystemExit, KeyboardInterrupt) as error:
        return None, error


def is_running_here() -> bool:
    """Return True on the thread of the process's event loop."""
    current = _current
    return current is not None and current.thread.ident == threading.get_ident()


def start(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Start a coroutine on the process's event loop and wait for nothing."""
    asyncio.run_coroutine_threadsafe(_contained(coroutine), _loop_thread().loop)


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on the process's event loop; return a future of its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop_thread().loop)


def submit_to(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on an event loop that may end at any time; return a future of its result.

    A loop that ends first leaves the future without a result and reports no destroyed task, unlike
    `asyncio.run_coroutine_threadsafe`.

    Args:
        loop: The event loop.
        coroutine: The coroutine.

    Raises:
        RuntimeError: If the loop is closed.
    """
    future: Future[T] = Future()

    def begin() -> None:
        # The tasks of `gather` are the ones that asyncio does not report when it destroys them.
        running = asyncio.gather(coroutine)
        running.add_done_callback(pass_on)
        future.add_done_callback(lambda _: stop(running))

    def stop(running: asyncio.Future[Any]) -> None:
        if future.cancelled():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(running.cancel)

    def pass_on(done: asyncio.Future[Any]) -> None:
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if isinstance(error, asyncio.CancelledError):
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(done.result()[0])
        else:
            future.set_exception(error)

    try:
        loop.call_soon_threadsafe(begin)
    except RuntimeError:
        coroutine.close()
        raise
    return future


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the process's event loop and wait for its result; any thread may call.

    It works inside a running event loop too, as in Jupyter, whose loop stands still meanwhile. An interrupt
    (Ctrl-C) cancels the coroutine and waits for its end before it goes on.

    Raises:
        RuntimeError: called on the event-loop thread itself, from inside a tool; it would wait for itself.
    """
    host = _loop_thread()
    if threading.get_ident() == host.thread.ident:
        coroutine.close()
        raise RuntimeError("this would wait for its own event loop: await inside tools, or use ctx.in_thread")
    task: asyncio.Task[tuple[T | None, BaseException | None]] | None = None
    finished = threading.Lock()
    finished.acquire()

    def begin() -> None:
        nonlocal task
        task = host.loop.create_task(_contained(coroutine))
        task.add_done_callback(lambda _: finished.release())

    def stop() -> None:
        if task is not None:
            task.cancel()
        else:  # interrupted before it could begin
            coroutine.close()
            finished.release()

    try:  # an interrupt may come between any two of these
        host.loop.call_soon_threadsafe(begin)
        # A signal that comes right before a thread blocks does not wake it: look again now and then.
        while not finished.acquire(timeout=SIGNAL_CHECK_S):
            pass
    except BaseException:
        host.loop.call_soon_threadsafe(stop)
        finished.acquire(timeout=GRACE_S)
        raise
    assert task is not None
    value, error = task.result()
    if error is not None:
        raise error
    return cast("T", value)
