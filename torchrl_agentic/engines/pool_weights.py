"""`PoolWeights`: gives new weights to the engines of a pool, and the latest ones to those that come back."""

from __future__ import annotations

import asyncio
from typing import Any

from torchrl_agentic.engines.base import EngineUnusable
from torchrl_agentic.engines.pool_engines import PoolEngines
from torchrl_agentic.engines.weights import kept_weights
from torchrl_agentic.errors import InfrastructureError


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
                    elif self._state.fail_load(number, now, str(error)):
                        self._pool.lost(number, error)
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
            known = error if str(error) else InfrastructureError("it did not load weights in time")
            if self._state.fail_load(number, self._pool.now(), str(known)):
                self._pool.lost(number, known)
        except Exception as error:
            if refusals is not None:
                refusals.append((number, error))
            elif self._state.fail_load(number, self._pool.now(), f"it refused its weights: {error!r}"):
                self._pool.lost(number, error)
        else:
            if self._state.end_load(number, version, self._pool.now()):
                self._pool.returned(number)
            self._pool.notify()
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
            if self._state.fail_load(number, self._pool.now(), str(error) or repr(error)):
                self._pool.lost(number, error)
            return
        if self._has_latest or self._state.members[number].version != version:
            await self._load(number, self._latest, version)
            return
        if self._state.end_load(number, version, self._pool.now()):
            self._pool.returned(number)
        self._pool.notify()
