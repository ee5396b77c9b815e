"""Decides what runs now, what waits, and what is sent away."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator

from torchrl_agentic.serve.refusals import Overloaded

_NEWEST = 0.1
"""How much the latest run counts in the mean."""


class Admission:
    """At most `max_concurrency` runs at once, first come, first served, and at most `max_queue` that wait."""

    def __init__(self, *, max_concurrency: int, max_queue: int) -> None:
        if max_concurrency < 1 or max_queue < 0:
            raise ValueError(
                f"max_concurrency is 1 or more, max_queue 0 or more; got {max_concurrency}, {max_queue}"
            )
        self.max_concurrency, self.max_queue = max_concurrency, max_queue
        self._inside = self._running = 0
        self._places = asyncio.Semaphore(max_concurrency)
        self._mean_s: float | None = None

    @property
    def waiting(self) -> int:
        """How many wait for a place, or send their bodies still."""
        return self._inside - self._running

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """Join those that run or wait, before a body is read.

        Raises:
            Overloaded: too many wait already.
        """
        if self._inside >= self.max_concurrency + self.max_queue:
            raise Overloaded(self.retry_after_s())
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncGenerator[None]:
        """Wait for a place, and hold it; for those that have entered."""
        await self._places.acquire()
        self._running += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self._running -= 1
            self._places.release()
            self.note(time.monotonic() - began)

    def retry_after_s(self) -> int:
        """Say when the queue will be shorter, going by how long the latest runs took."""
        return max(1, math.ceil((self._mean_s or 0.0) * (self.waiting + 1) / self.max_concurrency))

    def note(self, seconds: float) -> None:
        """Take note of how long a run took."""
        old = seconds if self._mean_s is None else self._mean_s
        self._mean_s = old + _NEWEST * (seconds - old)


class Budget:
    """The bytes that all requests together may take."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0

    @contextlib.contextmanager
    def hold(self, count: int) -> Generator[Callable[[int], None]]:
        """Take so many bytes; yield what gives all but so many of them back.

        Raises:
            Overloaded: others have taken too much of them.
        """
        if self.held + count > self.max_bytes:
            raise Overloaded(1, f"requests that are under way take {self.held} of {self.max_bytes} bytes")
        self.held += count

        def keep(rest: int) -> None:
            nonlocal count
            self.held -= count - rest
            count = rest

        try:
            yield keep
        finally:
            self.held -= count
