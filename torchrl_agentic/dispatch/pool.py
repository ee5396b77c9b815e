"""Blocking work of many callers, on a bounded number of threads or processes, under one limit.

The names and the defaults of `init_execution_pool` are those that users of verl know.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal, ParamSpec, Self, TypeVar

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from torchrl_agentic.dispatch.threads import WorkerThreads
from torchrl_agentic.errors import InfrastructureError, MissingExtra
from torchrl_agentic.limits import ClusterRateLimiter, Limiter, RateLimiter
from torchrl_agentic.limits.ray import is_initialised

P = ParamSpec("P")
T = TypeVar("T")
_pack: Callable[[Any], bytes] = getattr(cloudpickle, "dumps")  # noqa: B009  it has no types


class PoolMode(StrEnum):
    """Where the functions of a pool run."""

    ThreadMode = "thread"
    ProcessMode = "process"


class _Workers(ABC):
    """What runs functions, so many at once."""

    @abstractmethod
    async def run(self, function: Callable[[], Any]) -> Any:
        """Run it; if we are cancelled, give up its place."""

    @abstractmethod
    async def close(self) -> None:
        """End the workers."""


class ExecutionPool:
    """Runs blocking functions on workers, each under a slot of the limiter; see `init_execution_pool`.

    Calls start in the order in which they came. An async context manager.
    """

    def __init__(self, workers: _Workers, limiter: Limiter | None) -> None:
        self._workers = workers
        self.limiter = limiter

    async def execute(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function and give what it returns, or raise what it raises.

        The slot is given back whatever happens. A cancelled call gives its worker up.

        Raises:
            InfrastructureError: the worker has died.
            CircuitOpen: see `Breaker`.
        """
        if self.limiter is None:
            return await self._workers.run(lambda: function(*args, **kwargs))
        async with self.limiter.slot():
            return await self._workers.run(lambda: function(*args, **kwargs))

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
    name: str = "",
    over: Literal["ray", "here"] | None = None,
) -> ExecutionPool:
    """Make a pool for blocking functions.

    num_workers: how many run at once, in threads, or each in a process of its own, which an error or a crash
    of others does not touch. rate_limit: how many run at once in all processes that name the same limit; with
    enable_global_rate_limit=False, in this one alone; None: no limit. name: of the service, for a limit that
    others share. over: "ray", where the workers are actors of the cluster; "here"; None: Ray where it is
    initialised. Functions are pickled by value (cloudpickle) where they leave this process.

    Raises:
        ValueError: numbers that mean nothing, or a limit for all without a name.
        MissingExtra: Ray is asked for, and not installed.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be 1 or more; got {num_workers}")
    mode = PoolMode(mode)
    if over is None:
        over = "ray" if is_initialised() else "here"
    limiter: Limiter | None = None
    if rate_limit is not None and enable_global_rate_limit:
        if not name:
            raise ValueError(
                "a limit that all processes share needs the name of what it protects: pass name='…', "
                "or enable_global_rate_limit=False"
            )
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

        loop = asyncio.get_running_loop()
        if loop not in self._limiters:
            self._limiters = {one: it for one, it in self._limiters.items() if not one.is_closed()}
            self._limiters[loop] = anyio.CapacityLimiter(self._size)
        try:
            found = await anyio.to_process.run_sync(
                _call, _pack(function), cancellable=True, limiter=self._limiters[loop]
            )
        except anyio.BrokenWorkerProcess as error:
            raise InfrastructureError("the process that ran the function has died") from error
        return _value(found)

    async def close(self) -> None:
        self._limiters.clear()


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
