"""Decides what runs now, what waits, and what is sent away."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator

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
        self.waiting = 0
        self._places = asyncio.Semaphore(max_concurrency)
        self._mean_s: float | None = None

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncGenerator[None]:
        """Wait for a place, and hold it.

        Raises:
            Overloaded: too many wait already.
        """
        if self._places.locked() and self.waiting >= self.max_queue:
            raise Overloaded(self.retry_after_s())
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1
        began = time.monotonic()
        try:
            yield
        finally:
            self._places.release()
            self.note(time.monotonic() - began)

    def retry_after_s(self) -> int:
        """Say when the queue will be shorter, going by how long the latest runs took."""
        return max(1, math.ceil((self._mean_s or 0.0) * (self.waiting + 1) / self.max_concurrency))

    def note(self, seconds: float) -> None:
        """Take note of how long a run took."""
        old = seconds if self._mean_s is None else self._mean_s
        self._mean_s = old + _NEWEST * (seconds - old)
