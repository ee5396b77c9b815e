"""`PoolEngines`: the engines of a pool and their health; `PoolWeights`: the weights that they have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_agentic.engines.base import Engine, EngineUnusable
from torchrl_agentic.engines.pool_state import Phase, PoolState, Ticket
from torchrl_agentic.engines.weights import kept_weights
from torchrl_agentic.errors import InfrastructureError

logger = logging.getLogger(__name__)

Check = Callable[[Any], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class PoolMember:
    """State of one engine of a pool.

    Attributes:
        engine: The engine.
        phase: "in": it gets requests. "out": it was lost, and is tried again later. "trial": it is tried
            now. "unusable": it refuses every request.
        version: Policy version of its weights, in the numbers of the pool.
        running: Number of its requests that run.
        is_loading: Whether it loads weights or is checked, so that it gets no requests.
        reason: Message of the failure that took it out last; "" if there was none.
    """

    engine: Engine
    phase: Phase
    version: int
    running: int
    is_loading: bool
    reason: str


class PoolEngines:
    """The engines of a pool with their state: records and logs failures, and wakes waiting requests.

    Args:
        engines: The engines.
        state: Their state.
        check: Checks a lost engine; None: the engine's own `Engine.check`, if it defines one.

    Attributes:
        engines: The engines.
        state: Their state.
        is_closed: Whether the pool is closed.
    """

    def __init__(self, engines: Sequence[Engine], state: PoolState, check: Check | None) -> None:
        self.engines, self.state = tuple(engines), state
        self.is_closed = False
        self._check = check
        self._changed = asyncio.Event()
        for engine, one in zip(self.engines, state.members, strict=True):
            one.brings_back = self.check_of(engine) is not None

    def now(self) -> float:
        """Return the time of the event loop, in seconds."""
        return asyncio.get_running_loop().time()

    def check_open(self) -> None:
        """Raise InfrastructureError if the pool is closed."""
        if self.is_closed:
            raise InfrastructureError("the EnginePool was closed; make a new one")

    async def change(self) -> None:
        """Wait until an engine may be available to a request that had none."""
        await self._changed.wait()

    def notify(self) -> None:
        """Wake the requests that wait for an engine."""
        self._changed.set()
        self._changed = asyncio.Event()

    def succeeded(self, ticket: Ticket, version: int) -> None:
        """Record an answer.

        Args:
            ticket: The request.
            version: Policy version of the weights that sampled it.
        """
        if self.state.succeed(ticket, version):
            self._returned(ticket.number)

    def failed(self, ticket: Ticket, error: Exception, version: int | None = None) -> None:
        """Record the failure of a request, and take the engine out if it is lost.

        Args:
            ticket: The request.
            error: The failure.
            version: Policy version of the weights that sampled a part of the answer; None: there is none.
        """
        if isinstance(error, EngineUnusable):
            self.exclude(ticket.number, error)
        elif self.state.fail(ticket, self.now(), str(error), version):
            self._lost(ticket.number, error)

    def exclude(self, number: int, error: EngineUnusable) -> None:
        """Record that an engine refuses every request.

        Args:
            number: The engine.
            error: The exception.
        """
        if self.state.members[number].phase != "unusable":
            self.state.exclude(number, str(error))
            logger.error("%s cannot be used: %s", self._name(number), error)
            self.notify()

    def load_ended(self, number: int, version: int) -> None:
        """Record that an engine has loaded weights; log it if it is in use again.

        Args:
            number: Number of the engine.
            version: Version of the pool that they are.
        """
        if self.state.end_load(number, version, self.now()):
            self._returned(number)
        self.notify()

    def load_failed(self, number: int, error: Exception, reason: str = "") -> None:
        """Record that an engine could not load weights; log it if that takes it out.

        Args:
            number: Number of the engine.
            error: The exception.
            reason: Message of the failure; "" for the text of the error.
        """
        if self.state.fail_load(number, self.now(), reason or str(error)):
            self._lost(number, reason or error)

    def _lost(self, number: int, reason: object) -> None:
        """Log that an engine is out, and wake the requests that wait for one."""
        pause = self.state.members[number].retry_at - self.now()
        logger.warning("%s is out, and is tried again in %.1f s: %s", self._name(number), pause, reason)
        self.notify()

    def _returned(self, number: int) -> None:
        """Log that an engine is in use again, and wake the requests that wait for one."""
        logger.warning("%s is in again", self._name(number))
        self.notify()

    def no_engine(self, last: Exception | None = None) -> Exception:
        """Return the error of a request for which there is no engine; `last` is its last failure, if any."""
        members, now = self.state.members, self.now()
        reasons = "; ".join(f"{self._name(one.number)}: {one.reason}" for one in members if one.reason)
        if all(one.phase == "unusable" for one in members):
            return EngineUnusable(f"no engine of the pool can be used: {reasons}")
        if isinstance(last, InfrastructureError) and any(one.phase == "in" for one in members):
            return InfrastructureError(f"the request failed on all engines that are in: {last}")
        soon = min((one.retry_at for one in members if one.phase == "out"), default=now)
        when = f"the next is tried in {max(0.0, soon - now):.1f} s"
        return InfrastructureError(f"all {len(members)} engines of the pool are out; {when}. {reasons}")

    def check_of(self, engine: Engine) -> Callable[[], Awaitable[object]] | None:
        """Return the check of an engine, if it has one.

        Args:
            engine: The engine.
        """
        if (check := self._check) is not None:
            return lambda: check(engine)
        return engine.check if engine.has_check else None

    def _name(self, number: int) -> str:
        return f"engine {number} ({type(self.engines[number]).__name__})"


class PoolWeights:
    """The weights of the engines of a pool.

    Args:
        pool: The engines.
        at_once: Number of engines that load weights at the same time.
        timeout: Seconds after which an engine that loads weights counts as lost; None: no limit.
    """

    def __init__(self, pool: PoolEngines, *, at_once: int, timeout: float | None) -> None:
        self._pool, self._state = pool, pool.state
        self._at_once, self._timeout = at_once, timeout
        version = pool.state.version
        # The pool's version of each version of an engine's own.
        self._labels: list[dict[int, int]] = [{engine.version: version} for engine in pool.engines]
        self._latest: Any = None  # of the last update that had any
        self._has_latest = False
        self._lock = asyncio.Lock()

    def version_of(self, number: int, own: int | None, otherwise: int) -> int:
        """Return the pool's version of weights.

        Args:
            number: The engine.
            own: The version in the engine's own numbers; None: unknown.
            otherwise: The result if the version is unknown.
        """
        return otherwise if own is None else self._labels[number].get(own, otherwise)

    async def update(self, weights: Any) -> int:
        """Load new weights into one engine after the other; see `EnginePool.update`.

        Args:
            weights: The weights; None keeps those of the engines and counts an update.
        """
        async with self._lock:
            self._pool.check_open()
            given = list(weights) if hasattr(weights, "__next__") else weights
            kept = await asyncio.to_thread(kept_weights, given)
            target = self._state.begin_update()
            done, refusals = False, list[tuple[int, Exception]]()
            try:
                done = await self._roll(given, target, refusals)
                if done and weights is not None:
                    self._latest, self._has_latest = kept, True
                    for one in self._state.members:
                        one.brings_back = True
            finally:
                self._state.end_update(is_done=done)
                now = self._pool.now()
                for number, error in refusals:
                    if not done:
                        self._state.end_load(number, None, now)
                    else:
                        self._pool.load_failed(number, error)
                self._pool.notify()
            self._pool.check_open()
            if not done:
                raise refusals[0][1] if refusals else self._pool.no_engine()
            return target

    async def _roll(self, weights: Any, target: int, refusals: list[tuple[int, Exception]]) -> bool:
        """Update the engines, `at_once` at a time; return whether one has the new weights.

        Engines that refuse them are added to `refusals`; the first refusal ends it if no engine has them.
        """
        done, running = False, set[asyncio.Task[bool]]()
        while not self._pool.is_closed:
            while len(running) < self._at_once and (done or not refusals):
                if (number := self._state.next_to_update()) is None:
                    break
                self._state.begin_load(number)
                running.add(asyncio.create_task(self._load(number, weights, target, refusals)))
            if not running:
                break
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            done = done or any(task.result() for task in ended)
        if running:  # the pool is closed, which ends what the engines do
            await asyncio.wait(running)
        return done

    async def _load(
        self, number: int, weights: Any, version: int, refusals: list[tuple[int, Exception]] | None = None
    ) -> bool:
        """Load weights into an engine, and record the outcome; return whether it has them."""
        engine, labels = self._pool.engines[number], self._labels[number]
        labels[engine.version + 1] = version  # answers may come before the engine returns its version
        try:
            async with asyncio.timeout(self._timeout):
                labels[await engine.update(weights)] = version
        except EngineUnusable as error:
            self._pool.exclude(number, error)
        except (InfrastructureError, TimeoutError) as error:
            self._pool.load_failed(number, error, str(error) or "it did not load weights in time")
        except Exception as error:
            if refusals is not None:
                refusals.append((number, error))
            else:
                self._pool.load_failed(number, error, f"it refused its weights: {error!r}")
        else:
            self._pool.load_ended(number, version)
            return True
        self._pool.notify()
        return False

    async def bring_back(self, number: int) -> None:
        """Check an engine that was out, and load the latest weights into it.

        Args:
            number: The engine, for which `PoolState.begin_load` was called.
        """
        engine, version = self._pool.engines[number], self._state.version
        check = self._pool.check_of(engine)
        try:
            if check is not None:
                async with asyncio.timeout(self._timeout):
                    await check()
        except Exception as error:
            self._pool.load_failed(number, error, str(error) or repr(error))
            return
        if self._has_latest or self._state.members[number].version != version:
            await self._load(number, self._latest, version)
        else:
            self._pool.load_ended(number, version)
