"""The one event-loop thread of the process, and the threads for blocking tools.

The event loop is made on first use, shared by all environments, and made anew after a fork. The threads are
bounded, and given up when a call runs out of time.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from torchrl_agentic.errors import check_count

T = TypeVar("T")
logger = logging.getLogger(__name__)

SIGNAL_CHECK_S = 0.25
"""How long an interrupt may take to be noticed at worst."""
GRACE_S = 5.0
"""How long an interrupted caller waits for what it started to end."""
IDLE_S = 30.0
"""How long a thread without work stays."""


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


class _Abandoned(BaseException):
    """Raised inside a thread whose call is over: Python code ends at once, a C call once it returns."""


class _Job:
    __slots__ = ("call", "context", "future", "loop", "verdict", "worker")

    def __init__(self, call: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.call = call
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.context = contextvars.copy_context()
        self.worker: threading.Thread | None = None
        # The first to take the item out decides: the thread, that the job is done, or `abandon`.
        self.verdict = deque((None,))

    def decide(self) -> bool:
        """Return True for the first caller, which decides how the job ends; atomic without a lock."""
        try:
            self.verdict.pop()
        except IndexError:
            return False
        return True

    def deliver(self, value: Any, error: BaseException | None) -> None:
        def settle() -> None:
            if self.future.done():
                return
            if error is None:
                self.future.set_result(value)
            elif isinstance(error, StopIteration | GeneratorExit):  # neither may come out of a future
                self.future.set_exception(RuntimeError(f"the tool raised {error!r}"))
            else:
                self.future.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(settle)


class _Pool:
    """State that the threads share.

    Without a reference to `WorkerThreads`, which can be garbage collected.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.alive = 0
        self.idle = 0
        self.closed = False
        self.jobs: deque[_Job] = deque()
        self.changed = threading.Condition(threading.Lock())

    def submit(self, job: _Job) -> None:
        with self.changed:
            self.jobs.append(job)
            if self.idle >= len(self.jobs):
                self.changed.notify()
            elif self.alive < self.size:
                self._spawn()

    def abandon(self, job: _Job) -> None:
        with self.changed:
            if not job.decide():
                return
            if job.worker is None:
                self.jobs.remove(job)
                return
            # Having lost the decision, that thread takes no lock any more; an exception may come to it
            # anywhere.
            ident = ctypes.c_ulong(job.worker.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Abandoned))
            self.alive -= 1
            if self.jobs:
                self._spawn()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _spawn(self) -> None:
        self.alive += 1
        threading.Thread(target=self._work, name="torchrl_agentic-tool", daemon=True).start()

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                value, error = None, None
                try:
                    value = job.context.run(job.call)
                except _Abandoned:
                    raise
                except BaseException as raised:
                    error = raised
                if not job.decide():
                    return
                job.deliver(value, error)
                del job, value, error
        except _Abandoned:
            pass

    def _next(self) -> _Job | None:
        with self.changed:
            self.idle += 1
            self.changed.wait_for(lambda: self.jobs or self.closed, IDLE_S)
            self.idle -= 1
            if not self.jobs:
                self.alive -= 1
                return None
            job = self.jobs.popleft()
            job.worker = threading.current_thread()
            return job


class WorkerThreads:
    """At most `size` blocking functions at once, on daemon threads made when needed.

    A cancelled call gives up its thread: another takes its place in the count, and the function is stopped at
    its next bytecode. One that blocks in C for ever costs a thread, and nothing waits for it. The threads of
    `concurrent.futures` cannot be abandoned: tools which hang would use up the pool, and the interpreter
    would wait for them at exit.
    """

    def __init__(self, size: int) -> None:
        check_count("max_threads", size, optional=False)
        self._size = size
        self._open()

    def _open(self) -> None:
        self._pool = _Pool(self._size)
        self._finalizer = weakref.finalize(self, self._pool.close)

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function on a thread, in a copy of the caller's context."""
        if self._pool.closed:
            self._open()
        loop = asyncio.get_running_loop()
        job = _Job(function, loop)
        # The clock of a `testing.SkipClockLoop` must not skip ahead of work on a thread.
        with getattr(loop, "busy", contextlib.nullcontext)():
            return await self._wait(job)

    async def _wait(self, job: _Job) -> Any:
        self._pool.submit(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            self._pool.abandon(job)
            raise

    def close(self) -> None:
        """End the threads once their work is done; a later call starts new ones."""
        self._finalizer()
