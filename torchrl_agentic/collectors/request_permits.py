"""`RequestPermits`: hold requests back on this side, so that the KV cache of an engine never overflows."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable
from types import TracebackType
from typing import cast

from torchrl_agentic.collectors.admission import Capacity
from torchrl_agentic.collectors.kv_budget import KVBudget
from torchrl_agentic.engines.base import Engine, EnginePressure

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
"""Seconds between two observations of an engine."""
PATIENCE_S = 10.0
"""Seconds that an observation may take."""
SMOOTHING = 1 / 64
"""Weight of an answer in the mean length of answers."""


class RequestPermits:
    """Holds requests back while the KV cache of an engine has no room for them; for one event loop.

    An engine begins whatever waits in it as soon as the prompt fits, and preempts it later. So requests wait
    here instead. Trajectories that have an answer come before new ones, each in the order in which they ask;
    a large request is not overtaken by smaller ones that came later. A single request always goes.

    While the engine fails to report its pressure, the bound stays as it is; before the first report, and if
    the engine cannot report at all, there is none.

    Args:
        engine: The engine.
        capacity: Gets the number of requests that fit, so that not many more trajectories begin.
        concurrent: Number of requests that the engine works on at once.

    Attributes:
        requests: Number of requests that are at the engine.
        waiting: Number of requests that are held back.
        pressure: The last report of the engine; None before the first.
        is_over: Whether the engine can never report, so that no request needs a permit.
    """

    def __init__(self, engine: Engine, capacity: Capacity, *, concurrent: int) -> None:
        self._engine, self._capacity = engine, capacity
        self._budget = KVBudget(concurrent)
        self._has_bound = True  # until the first report fails
        self._prompts = 0
        self.requests = self.waiting = 0
        self.pressure: EnginePressure | None = None
        self.is_over = False
        self._answer = 0.0  # expected tokens of an answer
        self._n_answers, self._was_short = 0, False  # since the last observation
        self._queue: list[tuple[bool, int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @property
    def tokens(self) -> float:
        """Tokens of the requests at the engine, with those that their answers are expected to have."""
        return self._prompts + self.requests * self._answer

    def hold(self, tokens: int, *, is_new: bool) -> RequestPermit:
        """Return the permit of one answer, an async context manager that waits for room.

        Args:
            tokens: Number of tokens of the prompt.
            is_new: Whether the trajectory has no answer yet.
        """
        return RequestPermit(self, tokens, is_new)

    def answered(self, tokens: int) -> None:
        """Learn the length of an answer.

        Args:
            tokens: Number of its tokens.
        """
        self._answer += (tokens - self._answer) * (SMOOTHING if self._answer else 1.0)
        self._n_answers += 1

    async def follow(self, on_change: Callable[[], object]) -> None:
        """Observe the engine again and again; return if it cannot report its pressure.

        Args:
            on_change: Called after each observation.
        """
        has_failed = False
        while True:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    seen = cast("object", await self._engine.pressure())
                if not isinstance(seen, EnginePressure | None):
                    raise TypeError(f"pressure returns an EnginePressure or None; got {type(seen).__name__}")
            except Exception as error:
                if not has_failed:
                    logger.warning("the engine does not report its pressure; asking again: %r", error)
                has_failed = True
                self._has_bound = self.pressure is not None
            else:
                has_failed, self._has_bound = False, seen is not None
                self.pressure = seen
            if self._has_bound and self.pressure is not None and not has_failed:
                self._observe(self.pressure)
            self._grant()
            self._capacity.fitting = self._fitting()
            on_change()
            if not has_failed and self.pressure is None:
                self.is_over = True
                return
            await asyncio.sleep(INTERVAL_S)

    def _observe(self, seen: EnginePressure) -> None:
        self._budget.observe(
            seen,
            tokens=self.tokens,
            requests=self.requests,
            answers=self._n_answers,
            is_short=self._was_short,
        )
        self._n_answers, self._was_short = 0, False

    def _fitting(self) -> int | None:
        """Return the number of requests that fit, if they are like those at the engine."""
        if not self._has_bound:
            return None
        if self._budget.size is None:
            return self._budget.first
        if not self.requests:
            return self._capacity.fitting
        return max(1, round(self._budget.size * self.requests / self.tokens))

    def _has_room(self, tokens: int) -> bool:
        if not self._has_bound or not self.requests:
            return True
        if self._budget.size is None:
            return self.requests < self._budget.first
        return self.tokens + tokens + self._answer <= self._budget.size

    async def acquire(self, tokens: int, *, is_new: bool) -> None:
        """Wait until a request may go to the engine; `hold` does this and releases it.

        Args:
            tokens: Number of tokens of the prompt.
            is_new: Whether the trajectory has no answer yet.
        """
        if not self.waiting and self._has_room(tokens):
            self._enter(tokens)
            return
        self._was_short = True
        granted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (is_new, next(self._numbers), tokens, granted))
        self.waiting += 1
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self.waiting -= 1
                self._grant()  # those behind it may have room
            else:
                self.release(tokens)
            raise

    def release(self, tokens: int) -> None:
        """Free the place of a request.

        Args:
            tokens: Number of tokens of the prompt, as in `acquire`.
        """
        self._prompts -= tokens
        self.requests -= 1
        self._grant()

    def _enter(self, tokens: int) -> None:
        self._prompts += tokens
        self.requests += 1

    def _grant(self) -> None:
        """Grant permits to requests that wait, as far as there is room."""
        while self._queue:
            _, _, tokens, granted = self._queue[0]
            if not granted.done():  # cancelled otherwise
                if not self._has_room(tokens):
                    self._was_short = True
                    return
                self.waiting -= 1
                self._enter(tokens)
                granted.set_result(None)
            heapq.heappop(self._queue)


class RequestPermit:
    """Place of one answer at an engine, which `RequestPermits.hold` returns.

    Args:
        permits: The permits that it is one of.
        tokens: Number of tokens of the prompt.
        is_new: Whether the trajectory has no answer yet.
    """

    __slots__ = ("_is_new", "_permits", "_tokens")

    def __init__(self, permits: RequestPermits, tokens: int, is_new: bool) -> None:
        self._permits, self._tokens, self._is_new = permits, tokens, is_new

    async def __aenter__(self) -> None:
        await self._permits.acquire(self._tokens, is_new=self._is_new)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._permits.release(self._tokens)
