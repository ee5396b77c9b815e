"""`batched`: a function of many trajectories as a scorer of one; calls that wait together share a batch."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

from torchrl_agentic.collectors.requests import is_cancelling
from torchrl_agentic.errors import InfrastructureError, InvalidTask, check_count
from torchrl_agentic.trajectory.score import Score
from torchrl_agentic.trajectory.trajectory import Trajectory

BatchFunction: TypeAlias = Callable[[list[Trajectory]], "Iterable[Any] | Awaitable[Iterable[Any]]"]


class _ScoreRequest:
    """One call: its trajectory, and the future that its caller awaits."""

    __slots__ = ("future", "is_given_up", "loop", "trajectory")

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Score] = self.loop.create_future()
        self.is_given_up = False

    def settle(self, result: Score | Exception) -> None:
        """Pass the result to the caller, from any thread."""

        def deliver() -> None:
            if self.future.done():
                return
            if isinstance(result, Exception):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)

        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits
            self.loop.call_soon_threadsafe(deliver)


class _ScoreBatch:
    """Requests of one call of an async function, and the task on a loop that makes the call."""

    __slots__ = ("loop", "requests", "task")

    def __init__(self, requests: list[_ScoreRequest]) -> None:
        self.requests = requests
        self.loop = next((one.loop for one in requests if one.loop.is_running()), requests[0].loop)
        self.task: asyncio.Task[None] | None = None


class Batched:
    """A scorer over a function of a list of trajectories; `batched` creates it. Works on several event loops.

    The first call starts a batch with all calls that are made in the same pass of the event loop. Calls that
    arrive while it runs form the next one.

    Args:
        function: As in `batched`.
        max_size: As in `batched`.
        max_concurrent: As in `batched`.
    """

    def __init__(self, function: BatchFunction, *, max_size: int, max_concurrent: int) -> None:
        self._function, self._max_size, self._max_concurrent = function, max_size, max_concurrent
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )
        self.__name__ = str(getattr(function, "__name__", type(function).__name__))
        self._lock = threading.Lock()
        self._waiting: deque[_ScoreRequest] = deque()
        self._n_threads = 0
        self._batches: set[_ScoreBatch] = set()

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Return the score of a trajectory, from a batch with those that wait at the same time.

        Raises:
            InfrastructureError: If the function raises one.
            InvalidTask: If the function returns one for this trajectory.
            RuntimeError: If the function raises another exception, or returns too few or too many numbers.
            ValueError: If the number of this trajectory is NaN or infinite.
            TypeError: If this trajectory gets something else than a number.
        """
        request = _ScoreRequest(trajectory)
        with self._lock:
            self._waiting.append(request)
        request.loop.call_soon(self._start)  # so that other calls of this pass of the loop join the batch
        busy = (
            contextlib.nullcontext
            if self._is_async
            else getattr(request.loop, "busy", contextlib.nullcontext)
        )
        with busy():  # the clock of a `testing.SkipClockLoop` must not skip ahead of work on a thread
            try:
                return await request.future
            except asyncio.CancelledError:
                self._give_up(request)
                raise

    def _start(self) -> None:
        """Start the batches that may run now."""
        with self._lock:
            if not self._is_async:
                wanted = -(-len(self._waiting) // self._max_size)
                while wanted > 0 and self._n_threads < self._max_concurrent:
                    self._start_thread()
                    wanted -= 1
                return
            self._forget_stopped_loops()
            while self._waiting and len(self._batches) < self._max_concurrent:
                batch = _ScoreBatch(self._take())
                self._batches.add(batch)
                try:
                    batch.loop.call_soon_threadsafe(self._start_task, batch)
                except RuntimeError:  # its loop is closed
                    self._batches.discard(batch)
                    self._put_back(batch)

    def _take(self) -> list[_ScoreRequest]:
        """Remove the requests of the next batch from the queue."""
        count = min(len(self._waiting), self._max_size)
        return [self._waiting.popleft() for _ in range(count)]

    def _start_thread(self) -> None:
        self._n_threads += 1
        threading.Thread(target=self._work, name=f"torchrl_agentic-{self.__name__}", daemon=True).start()

    def _work(self) -> None:
        """Call a sync function until no request waits."""
        while True:
            with self._lock:
                requests = self._take()
                if not requests:
                    self._n_threads -= 1
                    return
            try:
                found = self._function([request.trajectory for request in requests])
                if inspect.iscoroutine(found):
                    found.close()
                    raise TypeError(f"{self.__name__} returned a coroutine: define it with `async def`")
                self._settle(requests, found)
            except BaseException as error:  # SystemExit too: the callers would wait for ever
                self._fail(requests, error)

    def _start_task(self, batch: _ScoreBatch) -> None:
        batch.task = batch.loop.create_task(self._run(batch))

    async def _run(self, batch: _ScoreBatch) -> None:
        """Call an async function with one batch."""
        try:
            found: Any = self._function([request.trajectory for request in batch.requests])
            self._settle(batch.requests, await found)
        except BaseException as error:
            is_cancelled = isinstance(error, asyncio.CancelledError) and is_cancelling()
            if is_cancelled or isinstance(error, GeneratorExit):  # given up, or its loop ends
                with self._lock:
                    self._put_back(batch)
                raise
            self._fail(batch.requests, error)
        finally:
            with self._lock:
                self._batches.discard(batch)
            self._start()

    def _settle(self, requests: Sequence[_ScoreRequest], found: Any) -> None:
        """Pass its number to each caller."""
        if not isinstance(found, Iterable):
            raise TypeError(f"{self.__name__} returns a list of numbers; got {type(found).__name__}")
        values = list(cast("Iterable[Any]", found))
        if len(values) != len(requests):
            raise ValueError(
                f"{self.__name__} returned {len(values)} numbers for {len(requests)} trajectories; it must "
                "return one per trajectory, in their order"
            )
        for request, value in zip(requests, values, strict=True):
            try:
                request.settle(value if isinstance(value, InvalidTask) else Score.of(value))
            except (TypeError, ValueError) as error:
                request.settle(error)

    def _fail(self, requests: Sequence[_ScoreRequest], error: BaseException) -> None:
        """Raise an error in all callers of a batch, in each an exception of its own."""
        reason = f"{type(error).__name__}: {error}"
        said = f"{self.__name__} failed for a batch of {len(requests)} trajectories: {reason}"
        for request in requests:
            kind = InfrastructureError if isinstance(error, InfrastructureError) else RuntimeError
            raised = kind(said)
            raised.__cause__ = error
            request.settle(raised)

    def _give_up(self, request: _ScoreRequest) -> None:
        """Remove a request whose caller was cancelled; end a batch that nobody waits for."""
        with self._lock:
            request.is_given_up = True
            with contextlib.suppress(ValueError):  # it runs
                self._waiting.remove(request)
            for batch in self._batches:
                if request in batch.requests and all(one.is_given_up for one in batch.requests):
                    self._cancel(batch)

    def _cancel(self, batch: _ScoreBatch) -> None:
        def cancel() -> None:
            if batch.task is not None:
                batch.task.cancel()

        with contextlib.suppress(RuntimeError):
            batch.loop.call_soon_threadsafe(cancel)

    def _put_back(self, batch: _ScoreBatch) -> None:
        """Queue those requests of a batch again that wait on another loop than the one that ends."""
        waiting = [one for one in batch.requests if not (one.is_given_up or one.future.done())]
        left = [one for one in waiting if one.loop is not batch.loop]
        self._waiting.extendleft(reversed(left))

    def _forget_stopped_loops(self) -> None:
        """Free the places of batches whose loop has stopped, so that they cannot end."""
        for batch in [one for one in self._batches if not one.loop.is_running()]:
            self._batches.discard(batch)
            self._put_back(batch)

    def __repr__(self) -> str:
        return f"batched({self.__name__}, max_size={self._max_size})"


def batched(function: BatchFunction, *, max_size: int = 32, max_concurrent: int = 1) -> Batched:
    """Return a scorer over a function of many trajectories: a reward model on a GPU, a remote grader.

    Calls that wait at the same time are put into one call of the function. An error, or a wrong number of
    results, fails the trajectories of that call, and no others.

    Args:
        function: Gets a list of trajectories and returns as many numbers, bools or `Score`: a list, an array
            or a tensor; or an `InvalidTask` in place of the number of a task that cannot be used. A sync
            function runs on a thread; an async one is awaited on the event loop of one of the callers.
        max_size: Largest number of trajectories in a call.
        max_concurrent: Number of calls that run at the same time.

    Raises:
        TypeError: If `function` cannot be called, or a number is not a number.
        ValueError: If a number is below 1.
    """
    if not callable(cast("object", function)):
        raise TypeError(f"batched takes a function of a list of trajectories; got {type(function).__name__}")
    check_count("max_size", max_size, optional=False)
    check_count("max_concurrent", max_concurrent, optional=False)
    return Batched(function, max_size=max_size, max_concurrent=max_concurrent)
