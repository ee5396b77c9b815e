"""The cost of a slot without contention."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from torchrl_agentic import RateLimiter

TIMES = 1000


@pytest.mark.parametrize("which", ["RateLimiter", "asyncio.Semaphore"])
def test_uncontended(benchmark: Callable[..., Any], which: str) -> None:
    benchmark.group = f"limiter: {TIMES} uncontended slots"
    limiter = RateLimiter(max_concurrent=4, rate_per_second=1e9)

    async def slots() -> None:
        for _ in range(TIMES):
            async with limiter.slot():
                pass

    async def semaphore() -> None:
        plain = asyncio.Semaphore(4)
        for _ in range(TIMES):
            async with plain:
                pass

    with asyncio.Runner() as runner:
        benchmark(lambda: runner.run(slots() if which == "RateLimiter" else semaphore()))
