"""Threads for blocking tools: bounded, apart from the event loop's, given up when a call runs out of time.

`concurrent.futures` does not serve here: its threads cannot be abandoned, so that tools which hang would use
up the pool, and the interpreter waits for them at exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from torchrl_agentic.errors import check_count

T = TypeVar("T")

IDLE_S = 30.0
"""How long a thread without work stays."""


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
        self.verdict = deque(
            (None,)
        )  # whoever takes the item out decides: the worker "done", or we "given up"

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
            elif isinstance(error, StopIteration):  # a future refuses it
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
    its next bytecode. One that blocks in C for ever costs a thread, and nothing waits for it.
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
