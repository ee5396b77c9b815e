"""Blocking work of many callers, on a bounded number of threads or processes, under one limit.

The names and the defaults of `init_execution_pool` are those that users of verl know.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum
from typing import Any, Literal, ParamSpec, Self, TypeVar

import cloudpickle

from torchrl_agentic.dispatch.event_loop import WorkerThreads, submit
from torchrl_agentic.errors import InfrastructureError, MissingExtra
from torchrl_agentic.limits import ClusterRateLimiter, Limiter, RateLimiter
from torchrl_agentic.limits.ray_actor import is_initialised
from torchrl_agentic.sandbox.cancellation import run_to_completion

P = ParamSpec("P")
T = TypeVar("T")
_pack: Callable[[Any], bytes] = getattr(cloudpickle, "dumps")  # noqa: B009  it has no types


class PoolMode(StrEnum):
    """Where the functions of a pool run."""

    ThreadMode = "thread"
    ProcessMode = "process"


class _Workers(ABC):
    """Workers that run a bounded number of functions at once."""

    @abstractmethod
    async def run(self, function: Callable[[], Any]) -> Any:
        """Run it; if we are cancelled, give up its place."""

    @abstractmethod
    async def close(self) -> None:
        """End the workers."""


class Execute:
    """`pool.execute`: runs a function on the workers of a pool, under a slot of its limiter.

    Args:
        workers: The workers.
        limiter: Limiter that each call waits for, or None.
    """

    def __init__(self, workers: _Workers, limiter: Limiter | None) -> None:
        self._workers = workers
        self._limiter = limiter
        self._started: set[asyncio.Task[Any]] = set()

    async def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function and return what it returns, or raise what it raises.

        The slot is given back whatever happens. A cancelled call gives its worker up.

        Raises:
            InfrastructureError: If the worker has died.
            CircuitOpen: See `CircuitBreaker`.
        """
        if self._limiter is None:
            return await self._workers.run(lambda: function(*args, **kwargs))
        async with self._limiter.slot():
            return await self._workers.run(lambda: function(*args, **kwargs))

    def remote(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Task[T] | Future[T]:
        """Start a call and return at once, as an actor of Ray does.

        Args:
            function: Function to run.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            Inside an event loop an `asyncio.Task`, to be awaited. Elsewhere a `concurrent.futures.Future`,
            whose `result()` waits, as `ray.get` would.
        """
        call = self(function, *args, **kwargs)
        try:
            task = asyncio.get_running_loop().create_task(call)
        except RuntimeError:  # no loop runs in this thread
            return submit(call)
        self._started.add(task)  # a loop alone would let a task go that nobody holds
        task.add_done_callback(self._started.discard)
        return task


class ExecutionPool:
    """Runs blocking functions on workers, each under a slot of the limiter; see `init_execution_pool`.

    An async context manager. Calls start in the order in which they came.

    Args:
        workers: The workers.
        limiter: Limiter that each call waits for, or None.

    Attributes:
        execute: Runs a function: `await pool.execute(function, *args)`, or, written as for verl's pool,
            `await pool.execute.remote(function, *args)`.
        limiter: The limiter, or None.
    """

    def __init__(self, workers: _Workers, limiter: Limiter | None) -> None:
        self._workers = workers
        self.limiter = limiter
        self.execute = Execute(workers, limiter)

    async def close(self) -> None:
        """End the workers, processes with their event loop; a later call starts new ones."""
        await self._workers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def init_execution_pool(
    num_workers: int = 10,
    enable_global_rate_limit: bool = True,
    rate_limit: int | None = 10,
    mode: PoolMode | Literal["thread", "process"] = PoolMode.ThreadMode,
    *,
    name: str = "rate-limiter",
    over: Literal["ray", "here"] | None = None,
) -> ExecutionPool:
    """Make a pool for blocking functions.

    Functions are pickled by value (cloudpickle) where they leave this process.

    Args:
        num_workers: How many run at once.
        enable_global_rate_limit: Whether all processes that name the same limit share it.
        rate_limit: How many run at once in those processes, or else in this one; None: no limit.
        mode: "thread", or "process" for a process each, which an error or a crash of others does not touch.
            A script that uses processes needs `if __name__ == "__main__":` around what it runs.
        name: The name of the shared limit: one per service. The default is verl's, which has a single one.
        over: "ray", where the workers are actors of the cluster; "here"; None: Ray where it is initialised.

    Raises:
        ValueError: If a number means nothing, or others share the limit of this name with another number.
        MissingExtra: If Ray is asked for, and not installed.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be 1 or more; got {num_workers}")
    mode = PoolMode(mode)
    if over is None:
        over = "ray" if is_initialised() else "here"
    limiter: Limiter | None = None
    if rate_limit is not None and enable_global_rate_limit:
        limiter = ClusterRateLimiter(
            name, max_concurrent=rate_limit, over="ray" if over == "ray" else "machine"
        )
    elif rate_limit is not None:
        limiter = RateLimiter(max_concurrent=rate_limit)
    if over == "ray":
        workers = _ActorThreads if mode == PoolMode.ThreadMode else _ActorProcesses
    else:
        workers = _Threads if mode == PoolMode.ThreadMode else _Processes
    return ExecutionPool(workers(num_workers), limiter)


class _Threads(_Workers):
    def __init__(self, size: int) -> None:
        self._threads = WorkerThreads(size)

    async def run(self, function: Callable[[], Any]) -> Any:
        return await self._threads.run(function)

    async def close(self) -> None:
        self._threads.close()


class _Processes(_Workers):
    """Processes of anyio, which are ended with the call that is cancelled, or with the event loop."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._limiters: dict[asyncio.AbstractEventLoop, Any] = {}

    async def run(self, function: Callable[[], Any]) -> Any:
        import anyio
        import anyio.to_process

        if "__main__" not in sys.modules:  # anyio takes it away while a worker imports the script
            raise RuntimeError(_UNGUARDED)
        loop = asyncio.get_running_loop()
        if loop not in self._limiters:
            self._limiters = {one: it for one, it in self._limiters.items() if not one.is_closed()}
            self._limiters[loop] = anyio.CapacityLimiter(self._size)
        try:
            found = await anyio.to_process.run_sync(
                _call, _pack(function), cancellable=True, limiter=self._limiters[loop]
            )
        except asyncio.CancelledError as error:
            await run_to_completion(_end_starting_worker(error))
            raise
        except anyio.BrokenWorkerProcess as error:
            cause = error.__cause__
            reason = "" if cause is None else f": {cause or type(cause).__name__}"
            raise InfrastructureError(f"the process that ran the function has died{reason}") from error
        return _value(found)

    async def close(self) -> None:
        self._limiters.clear()


async def _end_starting_worker(error: BaseException) -> None:
    """End the worker of a call that was cancelled while it started, which anyio forgets with its pipes."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        process: Any = frame.f_locals.get("process")
        is_anyios = frame.f_globals.get("__name__") == "anyio.to_process"
        if is_anyios and process is not None and process.returncode is None:
            process.kill()
            await process.aclose()


_UNGUARDED = (
    "each worker process imports the script, and this one starts a process pool then: put what it runs under "
    "'if __name__ == \"__main__\":'"
)


class _ActorThreads(_Workers):
    """The threads of an actor of Ray; what a cancelled call runs there goes on, for nobody."""

    def __init__(self, size: int) -> None:
        self._start = _starter(size)
        self._actor: Any = None

    async def run(self, function: Callable[[], Any]) -> Any:
        actor = self._actor = self._actor or self._start()
        try:
            return _value(await actor.call.remote(_pack(function)))
        except _dead() as error:
            if self._actor is actor:
                self._actor = None
            raise InfrastructureError(_DIED) from error

    async def close(self) -> None:
        if self._actor is not None:
            _kill(self._actor)
            self._actor = None


class _ActorProcesses(_Workers):
    """Actors of Ray with one call at a time each; a cancelled call ends its actor."""

    def __init__(self, size: int) -> None:
        self._start = _starter(1)
        self._free: list[Any] = [None] * size  # None: not started yet
        self._places = RateLimiter(max_concurrent=size)  # of any event loop

    async def run(self, function: Callable[[], Any]) -> Any:
        async with self._places.slot():
            actor = self._free.pop()
            is_fit = False
            try:
                actor = actor or self._start()
                found = await actor.call.remote(_pack(function))
                is_fit = True
                return _value(found)
            except _dead() as error:
                raise InfrastructureError(_DIED) from error
            finally:
                if actor is not None and not is_fit:
                    _kill(actor)
                self._free.append(actor if is_fit else None)

    async def close(self) -> None:
        for index, actor in enumerate(self._free):
            if actor is not None:
                self._free[index] = None
                _kill(actor)


_DIED = "the actor that ran the function has died"


def _starter(at_once: int) -> Callable[[], Any]:
    try:
        import ray
    except ImportError:
        raise MissingExtra("a pool over a Ray cluster", "ray", "ray") from None
    made: Any = ray.remote(_Actor)
    return made.options(max_concurrency=at_once, num_cpus=0, max_restarts=0).remote


def _dead() -> type[Exception]:
    import ray.exceptions

    return ray.exceptions.RayActorError


def _kill(actor: Any) -> None:
    import ray

    end: Callable[[Any], None] = getattr(ray, "kill")  # noqa: B009  its types are incomplete
    end(actor)


class _Actor:
    def call(self, pickled: bytes) -> bytes:
        return _call(pickled)


def _call(pickled: bytes) -> bytes:
    """Call a pickled function; give its value or its error, pickled."""
    try:
        return _pack((cloudpickle.loads(pickled)(), None))
    except Exception as error:
        try:
            packed = _pack((None, error))
            cloudpickle.loads(packed)
            return packed
        except Exception:  # an error that cannot travel
            return _pack((None, RuntimeError(f"{type(error).__name__}: {error}")))


def _value(pickled: bytes) -> Any:
    value, error = cloudpickle.loads(pickled)
    if error is not None:
        raise error
    return value
