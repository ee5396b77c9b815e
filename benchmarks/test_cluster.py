"""The share of a limit that four processes use, with leases and with one request to an actor per call."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Generator
from typing import Any

import pytest
import ray

from torchrl_agentic.limits import ClusterRateLimiter

PROCESSES, SECONDS = 4, 4.0
LIMITS = {10: 0.005, 100: 0.01}
"""Limit of concurrent calls → seconds of one call."""


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Generator[None]:
    here = {"env_vars": {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.getcwd()])}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=here)
    yield
    ray.shutdown()


class SemaphoreActor:
    """The usual design: a counter in an actor, with two messages per call."""

    def __init__(self, limit: int) -> None:
        self.free = asyncio.Semaphore(limit)

    async def acquire(self) -> None:
        """Wait for a slot."""
        await self.free.acquire()

    async def release(self) -> None:
        """Free the slot."""
        self.free.release()


class Caller:
    """A process that calls."""

    async def run(self, how: str, name: str, limit: int, call_s: float, actor: Any) -> tuple[int, int]:
        """Call as often as the limit allows; return the numbers of calls and of messages."""
        over: Any = {"leases, Ray": "ray", "leases, socket": "machine"}.get(how)
        limiter = None if over is None else ClusterRateLimiter(name, max_concurrent=limit, over=over)
        calls = 0
        until = time.monotonic() + SECONDS + 2.5  # the first seconds do not count: leases of before may last
        count_from = time.monotonic() + 2.5
        before = 0

        async def one() -> None:
            nonlocal calls, before
            while time.monotonic() < until:
                if limiter is None:
                    await actor.acquire.remote()
                    await asyncio.sleep(call_s)
                    await actor.release.remote()
                else:
                    async with limiter.slot():
                        await asyncio.sleep(call_s)
                if time.monotonic() >= count_from:
                    calls += 1
                elif limiter is not None:
                    before = limiter.requests

        await asyncio.gather(*(one() for _ in range(limit)))
        return calls, 2 * calls if limiter is None else limiter.requests - before


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("how", ["leases, Ray", "leases, socket", "two messages per call"])
def test_shared_limit(benchmark: Any, how: str, limit: int) -> None:
    benchmark.group = f"a limit of {limit} for {PROCESSES} processes: share of what is possible"
    name, call_s = uuid.uuid4().hex, LIMITS[limit]
    actor = ray.remote(SemaphoreActor).options(max_concurrency=1000, num_cpus=0).remote(limit)
    callers = [ray.remote(Caller).options(num_cpus=0).remote() for _ in range(PROCESSES)]

    def run() -> list[tuple[int, int]]:
        return ray.get([caller.run.remote(how, name, limit, call_s, actor) for caller in callers])

    found = benchmark.pedantic(run, rounds=1)
    calls = sum(count for count, _ in found)
    rate, ideal = calls / SECONDS, limit / call_s
    messages = sum(sent for _, sent in found) / calls
    benchmark.extra_info |= {"calls per second": round(rate), "of ideal": round(rate / ideal, 2)}
    print(f"\n{how}, limit {limit}: {rate:.0f}/s of {ideal:.0f}/s, {rate / ideal:.0%};", end=" ")
    print(f"{messages:.3f} messages per call;", end=" ")
    print("by process:", [count for count, _ in found])
    for one in (*callers, actor):
        ray.kill(one)
