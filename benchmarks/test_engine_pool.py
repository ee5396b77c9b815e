"""What `EnginePool` costs: processor time per request, and throughput beside one engine of its size."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from collector_load import HEAVY, Answers, Load, Measured, collect

from torchrl_agentic.engines import EnginePool
from torchrl_agentic.testing import SimulatedEngine, run_skipping

Benchmark = Callable[..., Any]
COUNT, PLACES = 4, 64
PER_SEQUENCE_S = 4e-5
REQUESTS = 20_000

pytestmark = pytest.mark.timeout(900)


class Shared(Answers):
    """Answers that several engines give: the turn is counted by trajectory, whichever engine is asked."""

    def __init__(self, load: Load, prepared: int) -> None:
        super().__init__(load, prepared)
        self.turns: Counter[str] = Counter()

    def __call__(self, key: str, turn: int, prompt: object) -> list[int]:
        """Return the ids of an answer."""
        self.turns[key] += 1
        return super().__call__(key, self.turns[key] - 1, prompt)


def pool_of(answers: Any, count: int) -> EnginePool:
    """Return a pool of simulated engines."""
    engines = [SimulatedEngine(answers, max_concurrent=PLACES) for _ in range(count)]
    pool: Any = EnginePool(engines)

    def load() -> SimpleNamespace:
        loads = [engine.load() for engine in engines]
        return SimpleNamespace(
            tokens=sum(each.tokens for each in loads), finished=sum(each.finished for each in loads)
        )

    pool.load = load
    return pool


def request_s(engine: Any) -> float:
    """Return the processor time of a request to an engine, in seconds: 256 trajectories at once."""

    async def main() -> float:
        async def ask(number: int) -> None:
            for _ in range(REQUESTS // 256):
                await engine.sample([1, 2, 3], max_tokens=8, key=f"t{number}")

        start = time.process_time()
        await asyncio.gather(*(ask(number) for number in range(256)))
        return (time.process_time() - start) / REQUESTS

    return run_skipping(main())


def test_the_cost_of_a_request(benchmark: Benchmark) -> None:
    """Processor time of a request by a pool of four engines, beside that of the engine itself."""
    benchmark.group = "engine pool: processor time of a request"

    def answers(key: str, turn: int, prompt: object) -> list[int]:
        return [1, 2, 0]

    def run() -> tuple[float, float]:
        # The fastest of five runs each, in turn, because the machine is shared.
        runs = [
            (request_s(SimulatedEngine(answers, max_concurrent=256)), request_s(pool_of(answers, COUNT)))
            for _ in range(5)
        ]
        return min(one for one, _ in runs), min(pooled for _, pooled in runs)

    one, pooled = benchmark.pedantic(run, rounds=1)
    benchmark.extra_info["microseconds of one engine"] = 1e6 * one
    benchmark.extra_info["microseconds of the pool more"] = 1e6 * (pooled - one)
    more = 1e6 * (pooled - one)
    print(f"\none engine {1e6 * one:.1f} µs, pool of {COUNT} {1e6 * pooled:.1f} µs: {more:.1f} more")


def test_four_engines_beside_one_of_their_size(benchmark: Benchmark) -> None:
    """Tokens per second of a collector over a pool of four engines, beside one with all their places."""
    benchmark.group = "engine pool: throughput of a collector"
    options: dict[str, Any] = {"warm_up": 400}

    def over(engine: Any) -> Measured:
        return run_skipping(collect(HEAVY, engine, 1_600, **options))

    pooled = benchmark.pedantic(lambda: over(pool_of(Shared(HEAVY, 4_000), COUNT)), rounds=1)
    large = SimulatedEngine(
        Shared(HEAVY, 4_000), per_sequence_s=PER_SEQUENCE_S / COUNT, max_concurrent=COUNT * PLACES
    )
    alone = over(large)
    benchmark.extra_info["tokens per second"] = pooled.rate
    benchmark.extra_info["share of one engine of their size"] = pooled.rate / alone.rate
    saturated = large.saturated_tokens_per_s
    print(
        f"\npool of {COUNT}: {pooled}\none of their size: {alone}\nshare {pooled.rate / alone.rate:.1%}; "
        f"{pooled.rate / saturated:.1%} of {saturated:,.0f} tokens/s with all places taken"
    )
