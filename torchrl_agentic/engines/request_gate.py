"""`RequestGate`: hold the requests of an engine back while weights are updated, and end them at its close."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any

from torchrl_agentic.errors import InfrastructureError

SETTLE_S = 2.0
"""How long the next answer of a paused server may take to arrive, in seconds."""
CLOSED = "the engine is closed"


class RequestInterrupted(Exception):
    """`RequestGate.interrupt` ended a request."""


class RequestGate:
    """Holds requests back during an update, and tracks the running ones; for one event loop.

    Attributes:
        is_closed: No other request may begin.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._failure: str | None = None
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Timeout] = set()
        self._waiting: set[asyncio.Timeout] = set()
        self._updates: set[asyncio.Task[Any]] = set()

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncGenerator[None]:
        """Run a request as soon as no update is under way.

        Raises:
            InfrastructureError: If the engine is closed, also while the request runs, or the last `loading`
                has failed.
            RequestInterrupted: If `interrupt` ends it.
        """
        scope = asyncio.timeout(None)
        try:
            async with scope:
                await self._begin(scope)
                try:
                    yield
                finally:
                    self._running.discard(scope)
                    if not self._running:
                        self._idle.set()
        except TimeoutError:
            if not scope.expired():
                raise
            raise (InfrastructureError(CLOSED) if self.is_closed else RequestInterrupted) from None

    async def _begin(self, scope: asyncio.Timeout) -> None:
        self.check_open()
        self._waiting.add(scope)
        try:
            while not self._open.is_set():
                await self._open.wait()
        finally:
            self._waiting.discard(scope)
        self.check_open()
        if self._failure is not None:
            raise InfrastructureError(self._failure)
        self._running.add(scope)
        self._idle.clear()

    def check_open(self) -> None:
        """Raise InfrastructureError if the engine is closed."""
        if self.is_closed:
            raise InfrastructureError(CLOSED)

    def closed_for_update(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold new requests back in this context; one update at a time."""
        return _Update(self._lock, self._open, self.check_open)

    @contextlib.contextmanager
    def loading(self, server: str) -> Generator[None]:
        """Load weights in this context; if that fails, requests fail too until weights are loaded.

        Args:
            server: Name of the server that may have part of the weights, for the message.

        Raises:
            InfrastructureError: If the weights cannot be loaded.
        """
        try:
            yield
        except Exception as error:
            self._failure = f"an update of the weights failed, and {server} may have part of them: {error}"
            raise InfrastructureError(self._failure) from error
        self._failure = None

    async def complete(self, update: Coroutine[Any, Any, int]) -> int:
        """Run an update, to its end even if the caller is cancelled, and return its result.

        Args:
            update: The update.
        """
        task = asyncio.create_task(update)
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)
        return await asyncio.shield(task)

    async def drained(self, patience_s: float | None = None) -> bool:
        """Wait until no request runs.

        Args:
            patience_s: Time limit in seconds, or None.

        Returns:
            False if the time was not enough.
        """
        try:
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def settled(self, patience_s: float) -> bool:
        """Wait until no request runs, for as long as requests end.

        Args:
            patience_s: Seconds to wait for the next request to end.

        Returns:
            False if requests run of which none ended in this time.
        """
        while True:
            before = len(self._running)
            if await self.drained(patience_s):
                return True
            if len(self._running) >= before:
                return False

    async def interrupt(self) -> None:
        """End all requests that run, and wait for their end."""
        _end(self._running)
        await self._idle.wait()

    async def close(self) -> None:
        """End all requests, wait for their end and for updates that have begun; may be called again."""
        self.is_closed = True
        _end(self._running | self._waiting)
        await asyncio.gather(*self._updates, return_exceptions=True)
        await self._idle.wait()


class _Update(contextlib.AbstractAsyncContextManager[None]):
    """Closes a gate; no generator, since a loop that ends may destroy it in the middle."""

    def __init__(self, lock: asyncio.Lock, gate: asyncio.Event, check: Callable[[], None]) -> None:
        self._lock, self._gate, self._check = lock, gate, check

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        try:
            self._check()
        except BaseException:
            self._lock.release()
            raise
        self._gate.clear()

    async def __aexit__(self, *_: object) -> None:
        self._gate.set()
        self._lock.release()


def _end(scopes: set[asyncio.Timeout]) -> None:
    now = asyncio.get_running_loop().time()
    for scope in scopes:
        if not scope.expired():
            scope.reschedule(now)
