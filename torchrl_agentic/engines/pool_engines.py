"""`PoolEngines`: the engines of a pool, which of them are in, and the log of changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_agentic.engines.base import Engine, EngineUnusable
from torchrl_agentic.engines.pool_state import Phase, PoolState, Ticket
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
    """The engines of a pool with their state: records what happens to them, logs it, and wakes who waits.

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

    def members(self) -> tuple[PoolMember, ...]:
        """Return the state of each engine."""
        return tuple(
            PoolMember(engine, one.phase, one.version, one.running, one.is_loading, one.reason)
            for engine, one in zip(self.engines, self.state.members, strict=True)
        )

    async def change(self) -> None:
        """Wait until a request may have an engine that had none."""
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
            self.returned(ticket.number)

    def failed(self, ticket: Ticket, error: Exception, version: int | None = None) -> None:
        """Record a failure of a request, and take the engine out if it means that.

        Args:
            ticket: The request.
            error: The failure.
            version: Policy version of the weights that sampled a part of the answer; None: there is none.
        """
        if isinstance(error, EngineUnusable):
            self.exclude(ticket.number, error)
        elif self.state.fail(ticket, self.now(), str(error), version):
            self.lost(ticket.number, error)

    def exclude(self, number: int, error: EngineUnusable) -> None:
        """Record that an engine refuses every request.

        Args:
            number: The engine.
            error: What it raised.
        """
        if self.state.members[number].phase != "unusable":
            self.state.exclude(number, str(error))
            logger.error("%s cannot be used: %s", self._name(number), error)
            self.notify()

    def lost(self, number: int, error: Exception) -> None:
        """Report that an engine has gone out.

        Args:
            number: The engine.
            error: Why.
        """
        one = self.state.members[number]
        pause = one.retry_at - self.now()
        name = self._name(number)
        logger.warning("%s is out, and is tried again in %.1f s: %s", name, pause, error)
        self.notify()

    def returned(self, number: int) -> None:
        """Report that an engine is in again."""
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
