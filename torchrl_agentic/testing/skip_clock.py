"""An event loop whose clock skips sleeps, so that hours of waiting take no time and have one order.

Code under test sees an ordinary asyncio loop: `asyncio.sleep`, timeouts and `call_later` work, and
`loop.time()` says what time it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, cast

from torchrl_agentic.errors import check_seconds

T = TypeVar("T")

THREAD_LIMIT_S = 30.0
"""How long the clock waits for jobs on threads, in real seconds, before it skips to the next timer."""


class SkipClockLoop(asyncio.SelectorEventLoop):
    """An event loop that advances its clock to the next timer whenever nothing is ready to run.

    Work outside the loop takes real time, and the clock must not skip ahead of it. While a job of
    `run_in_executor` (`asyncio.to_thread` too) or of the tools' worker threads is awaited, or a `busy()`
    block is open, the clock waits for it instead. Other work outside the loop needs `busy()`: subprocesses,
    servers, sockets, threads of one's own. A job that hangs holds the clock for `thread_limit_s` real
    seconds; then the clock skips to the next timer, so that a timeout around the job can end it.

    Without `counts_cpu`, only timers advance the clock: the same program sees the same times and the same
    order on every run and every machine, as long as jobs on threads do not race each other.

    Args:
        counts_cpu: Let the time that code takes count as it is, and skip only waiting: for benchmarks.
        thread_limit_s: Upper bound on a wait for work outside the loop, in real seconds.

    Raises:
        RuntimeError: While it runs, if it waited `thread_limit_s` without a timer and without such work: a
            deadlock.
    """

    def __init__(self, *, counts_cpu: bool = False, thread_limit_s: float = THREAD_LIMIT_S) -> None:
        self._clock = _SkipSelector(counts_cpu, thread_limit_s)
        super().__init__(cast("Any", self._clock))
        try:
            check_seconds("thread_limit_s", thread_limit_s)
        except (TypeError, ValueError):
            self.close()
            raise

    def time(self) -> float:
        """Return the time of the skipping clock, in seconds. It begins at 0."""
        return self._clock.time()

    @property
    def skipped_s(self) -> float:
        """Seconds of waiting that took no time."""
        return self._clock.skipped_s

    @contextlib.contextmanager
    def busy(self) -> Generator[None]:
        """Stop the clock from skipping in this context, while work outside the loop is awaited.

        May be entered and left in any thread.
        """
        self._clock.add_job(1)
        try:
            yield
        finally:
            self._clock.add_job(-1)
            if not _is_running(self):
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self.call_soon_threadsafe(lambda: None)  # it may be waiting for this

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a function on a thread; the clock waits for it.

        Args:
            executor: Executor of the thread, or None for the loop's own.
            func: The function.
            args: Its arguments.
        """
        future = super().run_in_executor(executor, func, *args)
        self._clock.add_job(1)
        future.add_done_callback(lambda _: self._clock.add_job(-1))
        return future

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the threads of the loop's own executor.

        Args:
            args: As `asyncio` passes them.
            kwargs: As `asyncio` passes them.
        """
        with self.busy():
            await super().shutdown_default_executor(*args, **kwargs)


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Return True in the thread that runs the loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class _SkipSelector(selectors.BaseSelector):
    """A selector that skips waiting times, unless jobs outside the loop are awaited."""

    def __init__(self, counts_cpu: bool, thread_limit_s: float) -> None:
        self._inner = selectors.DefaultSelector()
        self._counts_cpu, self._thread_limit_s = counts_cpu, thread_limit_s
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._jobs = 0
        self.skipped_s = 0.0

    def time(self) -> float:
        return self.skipped_s + (time.perf_counter() - self._began if self._counts_cpu else 0.0)

    def add_job(self, count: int) -> None:
        with self._lock:
            self._jobs += count

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._inner.select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            ready = self._inner.select(None if self._jobs else self._thread_limit_s)
            if not ready and not self._jobs:
                raise RuntimeError(
                    "deadlock: no callback is ready, no timer is set, and nothing outside the event loop "
                    f"woke it in {self._thread_limit_s:g} s"
                )
            return ready
        if self._jobs:
            timer_is_first = self._counts_cpu and timeout <= self._thread_limit_s
            ready = self._inner.select(timeout if timer_is_first else self._thread_limit_s)
            if ready or timer_is_first:
                return ready
            if self._counts_cpu:
                timeout -= self._thread_limit_s
        self.skipped_s += timeout
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.modify(fileobj, events, data)

    def close(self) -> None:
        self._inner.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()


def run_skipping(
    coroutine: Coroutine[Any, Any, T],
    *,
    counts_cpu: bool = False,
    thread_limit_s: float = THREAD_LIMIT_S,
) -> T:
    """Run a coroutine like `asyncio.run`, on a `SkipClockLoop`.

    Args:
        coroutine: The coroutine.
        counts_cpu: Let the time that code takes count as it is, and skip only waiting.
        thread_limit_s: Upper bound on a wait for work outside the loop, in real seconds.

    Returns:
        The result of the coroutine.
    """
    with asyncio.Runner(
        loop_factory=lambda: SkipClockLoop(counts_cpu=counts_cpu, thread_limit_s=thread_limit_s)
    ) as runner:
        return runner.run(coroutine)
