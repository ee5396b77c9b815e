"""`EnginePool`: several engines used as one, with failover and rolling weight updates."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torchrl_agentic.engines.base import Engine, EnginePressure, EngineUnusable, OnIds, Sampled
from torchrl_agentic.engines.duck_typed_engine import ensure_engine
from torchrl_agentic.engines.pool_engines import Check, PoolEngines, PoolMember, PoolWeights
from torchrl_agentic.engines.pool_state import PoolState, Ticket
from torchrl_agentic.engines.usage import Usage
from torchrl_agentic.errors import InfrastructureError, check_count, check_seconds

__all__ = ["EnginePool"]


class EnginePool(Engine):
    """Several engines with the same model, used as one.

    Routing: a trajectory stays on the engine that has its prefix in the cache; a new one goes to the engine
    with the smallest share of its `max_concurrent` in use. A trajectory leaves an engine on which it would
    have to wait if another has at most half of its load.

    Failures: a request whose engine raises InfrastructureError is made again on another one. If the engine
    returns a part of the answer with the finish "aborted", the pool returns it, and the next request of the
    trajectory, which resumes after these ids, goes to another engine. Either takes the engine out, for
    `retry_s` seconds, and for twice as long after each consecutive failure. Then it is tried again, and
    used again if it works: by its `check` and the latest weights, if there are any, or by one request.

    Updates: `at_once` engines load new weights at a time, while the others continue to sample. `version`
    rises when all engines that are in have them, so no request that begins gets older weights than `version`
    says. Each result has the version of the engine that sampled it. An engine that was out, or failed to
    load, gets the latest weights before it serves again, because a server that was started again has those of
    its checkpoint. For this the pool keeps the weights of the last update: tensors as a copy in the memory of
    the CPU; a folder, function or other object as it is.

    All engines must have the same model, tokenizer, sampling options and, at first, weights. They belong to
    the pool: use, update and close them by it only.

    Args:
        engines: The engines.
        max_skew: Largest difference between the versions of weights that serve at once. 1: engines sample
            with old and new weights during an update. 0: engines that have the new weights wait for those
            that sample with the old ones.
        at_once: Number of engines that load weights at the same time.
        retry_s: Seconds after which a lost engine is tried again.
        longest_retry_s: Bound on these seconds.
        update_timeout: Seconds after which an engine that loads weights counts as lost; None: no limit.
        check: Called with a lost engine before it is used again; it raises an exception if the engine does
            not work. None: the engine's own `Engine.check`, if it defines one, as `HTTPEngine` does.
        stream: Have all answers streamed, so that the ids sampled so far are kept if a server ends. It costs
            processor time for each piece of an answer. Requests with `on_ids` are streamed in any case.

    Attributes:
        engines: The engines.
        max_concurrent: Number of requests that all engines work on at once, lost ones included.
        context_length: The shortest context of the engines; None if none of them knows it.
        stop_token_ids: Ids that end an answer of any of the engines.
        can_resume: Whether all engines can resume answers.
        takes_media: Whether all engines take images and videos.
        sampling: The distribution that the engines sample from; None: unknown.
        may_know_cost: Whether one of the engines may know costs.

    Raises:
        TypeError: If an element is not an engine, or is an engine that takes messages.
        ValueError: If there are no engines, one is given twice, or a number is out of range.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        max_skew: int = 1,
        at_once: int = 1,
        retry_s: float = 1.0,
        longest_retry_s: float = 60.0,
        update_timeout: float | None = None,
        check: Check | None = None,
        stream: bool = False,
    ) -> None:
        self.engines = _checked(engines)
        if max_skew not in (0, 1):
            raise ValueError(
                f"max_skew is 0 or 1, because an update ends when all engines have it; got {max_skew!r}"
            )
        check_count("at_once", at_once, optional=False)
        for name, seconds in (("retry_s", retry_s), ("longest_retry_s", longest_retry_s)):
            if cast("object", seconds) is None:
                raise TypeError(f"{name} is a number of seconds; got None")
            check_seconds(name, seconds)
        if longest_retry_s < retry_s:
            raise ValueError(f"longest_retry_s is at least retry_s, {retry_s}; got {longest_retry_s}")
        check_seconds("update_timeout", update_timeout)
        if check is not None and not callable(check):
            raise TypeError(f"check is an async function of an engine; got {type(check).__name__}")
        limits = [int(engine.max_concurrent) for engine in self.engines]
        self.max_concurrent = sum(limits)
        lengths = [engine.context_length for engine in self.engines]
        self.context_length = min((one for one in lengths if one is not None), default=None)
        stops = (engine.stop_token_ids for engine in self.engines)
        self.stop_token_ids = tuple(dict.fromkeys(itertools.chain.from_iterable(stops)))
        self.can_resume = all(engine.can_resume for engine in self.engines)
        self.takes_media = all(engine.takes_media for engine in self.engines)
        self.may_know_cost = any(engine.may_know_cost for engine in self.engines)
        samplings = [engine.sampling for engine in self.engines]
        self.sampling = samplings[0] if samplings.count(samplings[0]) == len(samplings) else None
        self._stream = stream
        self._state = PoolState(
            limits,
            version=max(engine.version for engine in self.engines),
            max_skew=max_skew,
            retry_s=retry_s,
            longest_retry_s=longest_retry_s,
        )
        self._pool = PoolEngines(self.engines, self._state, check)
        self._weights = PoolWeights(self._pool, at_once=int(at_once), timeout=update_timeout)
        self._preempted: dict[int, int] = {}  # as each engine counts
        self._preemptions = 0  # since the pool was made
        self._tasks: set[asyncio.Task[Any]] = set()
        self._returns: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Policy version: number of weight updates so far."""
        return self._state.version

    @property
    def usage(self) -> Usage | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Usage of all engines together; None if one of them does not count it."""
        return _together([engine.usage for engine in self.engines])

    @property
    def members(self) -> tuple[PoolMember, ...]:
        """The state of each engine."""
        return tuple(
            PoolMember(engine, one.phase, one.version, one.running, one.is_loading, one.reason)
            for engine, one in zip(self.engines, self._state.members, strict=True)
        )

    async def sample(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        key: str,
        on_ids: OnIds | None = None,
        media: Mapping[str, Sequence[Any]] | None = None,
    ) -> Sampled:
        """Sample one answer on one of the engines.

        Args:
            ids: Token ids of the prompt, [P].
            max_tokens: Upper bound on the number of sampled ids.
            key: Name of the trajectory.
            on_ids: Called on the event loop with each piece of sampled ids, in order.
            media: Images and videos by kind, for engines that take them.

        Returns:
            The sampled ids, with the version of the weights that sampled them in the numbers of the pool.

        Raises:
            InfrastructureError: If the request fails on each engine that is in, or all are out; or if an
                engine fails after `on_ids` got a piece.
            EngineUnusable: If all engines refuse every request.
            ValueError: If the engine cannot take the prompt.
        """
        heard = _Listener(on_ids) if on_ids is not None or self._stream else None
        more: dict[str, Any] = {} if media is None else {"media": media}
        avoid: set[int] = set()
        last: Exception | None = None
        while True:
            number = await self._route(key, avoid, last)
            ticket = self._state.begin(number, key)
            try:
                found = await self.engines[number].sample(
                    ids, max_tokens=max_tokens, key=key, on_ids=heard, **more
                )
                return self._answer(ticket, found)
            except (InfrastructureError, EngineUnusable) as error:
                if self._pool.is_closed:
                    raise
                self._pool.failed(ticket, error)
                if heard is not None and heard.has_passed_on:
                    raise
                avoid.add(number)
                last = error
            except ValueError:  # the engine works, but cannot take this prompt
                self._pool.succeeded(ticket, ticket.version)
                raise
            finally:
                if self._state.end(ticket):
                    self._pool.notify()

    async def update(self, weights: Any) -> int:
        """Load new weights into one engine after the other. It runs to its end even if it is cancelled.

        Engines that are out get them when they come back; so do engines that are lost during the
        update. If all are out, all are tried.

        Args:
            weights: The weights, in the form that the engines take; an iterator is read into a list. None
                keeps the weights and counts an update.

        Returns:
            The new policy version.

        Raises:
            InfrastructureError: If no engine could load them; the version stays the same.
            Exception: The error of an engine that refuses the weights, if no engine has loaded them.
        """
        self._pool.check_open()
        task = asyncio.create_task(self._weights.update(weights))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def pressure(self) -> EnginePressure | None:
        """Return the KV use of the fullest engine that is in use, and the sums of the other figures.

        Returns:
            None if no engine reports anything.

        Raises:
            InfrastructureError: If the engines that report their use cannot be reached.
        """
        asked = [one.number for one in self._state.members if one.phase == "in"]
        answers = await asyncio.gather(
            *(self.engines[number].pressure() for number in asked), return_exceptions=True
        )
        found: list[EnginePressure] = []
        for number, answer in zip(asked, answers, strict=True):
            if isinstance(answer, EnginePressure):
                found.append(answer)
                before = self._preempted.get(number, answer.preempted)
                self._preempted[number] = answer.preempted
                self._preemptions += max(0, answer.preempted - before)  # fewer: it was started again
            elif isinstance(answer, BaseException) and not isinstance(answer, InfrastructureError):
                raise answer
        if found:
            uses = max(one.kv_use for one in found)
            waiting, running = sum(one.waiting for one in found), sum(one.running for one in found)
            return EnginePressure(uses, waiting, running, self._preemptions)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors:
            raise errors[0]
        if any(one.phase != "in" for one in self._state.members):
            raise InfrastructureError("the engines of the pool that report their KV use may be out")
        return None

    async def close(self) -> None:
        """Close all engines; requests and updates end with InfrastructureError; may be called again.

        Raises:
            Exception: The error of an engine, after all were closed.
        """
        self._pool.is_closed = True
        self._pool.notify()
        for task in self._returns:
            task.cancel()
        found = await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        await asyncio.gather(*self._tasks, *self._returns, return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                raise error

    def usage_of(self, key: str) -> Usage | None:
        """Return the usage of one trajectory on all engines; None if one of them does not count it.

        Args:
            key: Name of the trajectory.
        """
        return _together([engine.usage_of(key) for engine in self.engines])

    def set_seed(self, seed: int) -> None:
        """Seed the sampling of all engines, with the same seed.

        Args:
            seed: The seed.
        """
        for engine in self.engines:
            engine.set_seed(seed)

    def __repr__(self) -> str:
        phases = ", ".join(one.phase for one in self._state.members)
        return f"EnginePool({len(self.engines)} engines: {phases}; version {self.version})"

    async def _route(self, key: str, avoid: set[int], last: Exception | None) -> int:
        """Return the engine of a request, as soon as there is one."""
        loop = asyncio.get_running_loop()
        while True:
            self._pool.check_open()
            for number in self._state.due(loop.time()):
                self._state.begin_load(number)
                task = loop.create_task(self._weights.bring_back(number))
                self._returns.add(task)
                task.add_done_callback(self._returns.discard)
            chosen = self._state.choose(key, loop.time(), avoid)
            if chosen is None:
                raise self._pool.no_engine(last) from last
            if chosen != "wait":
                return chosen
            await self._pool.change()

    def _answer(self, ticket: Ticket, found: Any) -> Sampled:
        """Return an answer with its version in the numbers of the pool, and record the success or failure."""
        if not isinstance(found, Sampled):
            return found  # the caller knows what to say about it
        version = self._weights.version_of(ticket.number, found.version, ticket.version)
        if found.finish == "aborted" and self._state.members[ticket.number].loads == ticket.loads:
            error = InfrastructureError("it ended an answer early, although no update was under way")
            self._pool.failed(ticket, error, version if found.ids else None)
        else:
            self._pool.succeeded(ticket, version)
        return Sampled(found.ids, found.log_probs, found.finish, version)


class _Listener:
    """Passes pieces of an answer on to a callback, and records whether there were any."""

    __slots__ = ("_on_ids", "has_passed_on")

    def __init__(self, on_ids: OnIds | None) -> None:
        self._on_ids = on_ids
        self.has_passed_on = False

    def __call__(self, ids: Sequence[int]) -> None:
        if self._on_ids is not None:
            self.has_passed_on = True
            self._on_ids(ids)


def _together(usages: Sequence[Usage | None]) -> Usage | None:
    """Return the sum of usages; None if one of them is unknown."""
    known = [one for one in usages if one is not None]
    return sum(known, Usage()) if len(known) == len(usages) else None


def _checked(engines: Any) -> tuple[Engine, ...]:
    """Return the engines of a pool; raise an error unless they are distinct engines that take tokens."""
    if not isinstance(engines, Sequence) or isinstance(engines, str):
        raise TypeError(f"engines is a list of engines; got {type(engines).__name__}")
    given = tuple(cast("Sequence[Any]", engines))
    if not given:
        raise ValueError("a pool needs at least one engine; got none")
    found: list[Engine] = []
    for number, item in enumerate(given):
        try:
            engine = ensure_engine(item)
        except TypeError as error:
            raise TypeError(f"engine {number} of the pool: {error}") from None
        if not isinstance(engine, Engine):
            raise TypeError(
                f"engine {number} of the pool is a {type(item).__name__}, which answers messages; a pool "
                "takes engines that sample tokens"
            )
        if engine in found:
            raise ValueError(f"engine {number} is in the pool twice; make one object per server")
        found.append(engine)
    return tuple(found)
