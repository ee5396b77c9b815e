"""RequestPermits: requests wait in the collector while the engine's KV cache is full."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.collector_worlds import call, encoded, numbered_tasks, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from torchrl.envs import Compose

from torchrl_agentic import EndTrajectory, ToolCompose, tool
from torchrl_agentic.collectors import AgentCollector
from torchrl_agentic.collectors.admission import Capacity
from torchrl_agentic.collectors.request_permits import INTERVAL_S, RequestPermits
from torchrl_agentic.engines import EnginePressure
from torchrl_agentic.engines.scripted_engine import ScriptedEngine
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.testing import EngineLoad, SimulatedEngine, run_skipping

FREE = EnginePressure(kv_use=0.3, waiting=0, running=1, preempted=0)


class Reports:
    """As much of an engine as permits need: the next report for each observation, the last one for ever.

    Args:
        reports: Reports, or exceptions that `pressure` raises.
    """

    def __init__(self, *reports: Any) -> None:
        self.reports = list(reports)
        self.asked = 0

    async def pressure(self) -> Any:
        self.asked += 1
        report = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
        if isinstance(report, Exception):
            raise report
        return report


def permits_of(*reports: Any, concurrent: int = 16) -> RequestPermits:
    return RequestPermits(
        Reports(*reports), Capacity("auto", engine_concurrent=concurrent), concurrent=concurrent
    )


class Asker:
    """Holds a permit until a test releases it.

    Args:
        permits: The permits.
        name: Name that is noted in `order` when it has the permit.
        order: The notes.
        tokens: Tokens of the prompt.
        is_new: Whether the trajectory has no answer yet.
    """

    def __init__(
        self, permits: RequestPermits, name: str, order: list[str], *, tokens: int = 10, is_new: bool = False
    ) -> None:
        self.done = asyncio.Event()

        async def run() -> None:
            async with permits.hold(tokens, is_new=is_new):
                order.append(name)
                await self.done.wait()

        self.task = asyncio.create_task(run())

    async def end(self) -> None:
        self.done.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_trajectories_that_have_begun_go_first_and_then_the_first_that_asked():
    async def main() -> list[str]:
        permits, order = permits_of(FREE, concurrent=8), []
        first = Asker(permits, "first", order)
        await settle()
        waiting = [Asker(permits, f"new {n}", order, is_new=True) for n in range(2)]
        waiting += [Asker(permits, f"begun {n}", order) for n in range(2)]
        await settle()
        assert (order, permits.requests, permits.waiting) == (["first"], 1, 4)
        for asker in (first, waiting[2], waiting[3], waiting[0], waiting[1]):
            await asker.end()
            await settle()
        assert (permits.requests, permits.waiting, permits.tokens) == (0, 0, 0)
        return order

    assert run_skipping(main()) == ["first", "begun 0", "begun 1", "new 0", "new 1"]


def test_a_large_request_is_not_overtaken_and_goes_alone_if_it_must():
    async def main() -> list[str]:
        full = EnginePressure(kv_use=0.92, waiting=0, running=2, preempted=0)
        permits, order = permits_of(full), []
        both = [Asker(permits, name, order, tokens=50) for name in ("a", "b")]
        await settle()
        follow = asyncio.create_task(permits.follow(lambda: None))
        await settle()  # the budget is 100 tokens from now on
        large, small = Asker(permits, "large", order, tokens=500), Asker(permits, "small", order)
        await settle()
        await both[0].end()
        await settle()
        assert order == ["a", "b"]
        await both[1].end()
        await settle()
        assert order == ["a", "b", "large"]
        await large.end()
        await small.end()
        follow.cancel()
        return order

    assert run_skipping(main()) == ["a", "b", "large", "small"]


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_no_permit_is_lost_whatever_is_cancelled(seed: int, concurrent: int):
    rng = random.Random(seed)

    async def main() -> None:
        permits, order = permits_of(FREE, concurrent=concurrent), []
        askers = []
        for number in range(30):
            askers.append(Asker(permits, f"{number}", order, is_new=rng.random() < 0.5))
            for _ in range(rng.randint(0, 3)):
                one = rng.choice(askers)
                if rng.random() < 0.5:
                    one.done.set()
                else:
                    one.task.cancel()
            if rng.random() < 0.5:
                await settle()
            assert permits.requests <= max(1, concurrent // 8)
        for asker in askers:
            asker.done.set()
        await asyncio.gather(*(asker.task for asker in askers), return_exceptions=True)
        assert (permits.requests, permits.waiting, permits.tokens) == (0, 0, 0)
        cancelled = {n for n, asker in enumerate(askers) if asker.task.cancelled()}
        assert {int(name) for name in order} >= set(range(30)) - cancelled, "all others had their turn"

    run_skipping(main())


def test_an_engine_that_knows_no_pressure_is_asked_once_and_bounds_nothing():
    async def main() -> None:
        permits, order = permits_of(None, concurrent=8), []
        askers = [Asker(permits, f"{number}", order) for number in range(9)]
        await settle()
        assert len(order) == 1
        await permits.follow(lambda: None)
        await settle()
        assert len(order) == len(askers)
        assert (permits.pressure, permits.waiting) == (None, 0)

    run_skipping(main())


@pytest.mark.parametrize("failure", [InfrastructureError("lost"), TypeError("broken")])
def test_a_report_that_fails_is_asked_for_again_and_keeps_the_bound(failure: Exception, caplog: Any):
    async def main() -> None:
        engine = Reports(FREE, failure, failure, FREE)
        capacity = Capacity("auto", engine_concurrent=8)
        permits, order = RequestPermits(engine, capacity, concurrent=8), []
        askers = [Asker(permits, f"{number}", order) for number in range(9)]
        await settle()
        follow = asyncio.create_task(permits.follow(lambda: None))
        for asked in range(1, 5):
            await asyncio.sleep(INTERVAL_S if asked > 1 else INTERVAL_S / 2)
            assert engine.asked == asked
            assert (len(order), capacity.fitting) == (1, 1)
        assert not follow.done()
        assert permits.waiting == len(askers) - 1
        follow.cancel()

    run_skipping(main())
    assert caplog.text.count("the engine does not report its pressure") == 1


def test_before_the_first_report_failures_lift_the_bound():
    async def main() -> None:
        permits, order = permits_of("nonsense", concurrent=8), []
        askers = [Asker(permits, f"{number}", order) for number in range(9)]
        follow = asyncio.create_task(permits.follow(lambda: None))
        await settle()
        assert len(order) == len(askers)
        assert not follow.done()
        follow.cancel()

    run_skipping(main())


@tool
async def nap(ms: int) -> str:
    """Wait.

    Args:
        ms: Milliseconds.
    """
    await asyncio.sleep(ms / 1000)
    return "done"


PLACES, KV_TOKENS = 64, 19_000


def answers(key: str, turn: int, ids: Sequence[int]) -> Sequence[int]:
    """Return an answer of 60 to 400 tokens, with a call in the first three of four turns."""
    rng = random.Random(f"{key.partition('/')[0]} {turn}")
    text = "x" * round(60 * rng.paretovariate(2.0))
    return encoded(text[:400] + (call("nap", ms=rng.randrange(20, 900)) if turn < 3 else ""))


async def collected(max_in_flight: Any, ended: int, engine: Any = None) -> tuple[float, EngineLoad]:
    """Collect trajectories; return tokens per second without the first ones, and the load of the engine."""
    engine = engine or SimulatedEngine(answers, max_concurrent=PLACES, kv_tokens=KV_TOKENS)
    collector = AgentCollector(
        Compose(ToolCompose([nap], "hermes"), EndTrajectory(max_turns=4, when_no_calls=True)),
        engine=engine,
        tokenizer=tokenizer(),
        tasks=numbered_tasks(None),
        groups_per_batch=8,
        max_staleness=None,
        max_in_flight=max_in_flight,
    )
    count, first = 0, None
    async for batch in collector:
        count += len(batch)
        if first is None and count >= ended // 2:
            first = engine.load()
        if count >= ended:
            break
    load = engine.load()
    await collector.aclose()
    assert first is not None
    return (load.tokens - first.tokens) / (load.elapsed_s - first.elapsed_s), load


def test_auto_preempts_less_than_a_hundredth_and_is_as_fast_as_the_best_fixed_number():
    auto, load = run_skipping(collected("auto", 240))
    assert load.preempted_share <= 0.01
    fixed = {number: run_skipping(collected(number, 240)) for number in (32, 64)}
    assert fixed[64][1].preempted_share > 0.02, "the cache is too small for all places"
    assert auto >= 0.95 * max(rate for rate, _ in fixed.values())


class Watched(SimulatedEngine):
    """Counts how often it was asked for its pressure."""

    asked = 0

    async def pressure(self) -> EnginePressure | None:
        self.asked += 1
        return await super().pressure()


@pytest.mark.parametrize(
    ("max_in_flight", "kv_tokens", "least", "most"),
    [("auto", 16_000, 10, 10_000), ("auto", None, 1, 1), (8, 16_000, 0, 0)],
)
def test_only_auto_follows_an_engine_and_only_one_that_knows_its_pressure(
    max_in_flight: Any, kv_tokens: int | None, least: int, most: int
):
    async def main() -> int:
        engine = Watched(answers, max_concurrent=PLACES, kv_tokens=kv_tokens)
        await collected(max_in_flight, 24, engine)
        asked = engine.asked
        await asyncio.sleep(10 * INTERVAL_S)
        assert engine.asked == asked, "nothing is asked after the end of the collector"
        return asked

    assert least <= run_skipping(main()) <= most


def test_the_statistics_show_the_limit_and_what_the_engine_reports():
    async def main() -> tuple[dict[str, Any], str, dict[str, float]]:
        engine = SimulatedEngine(answers, max_concurrent=PLACES, kv_tokens=KV_TOKENS)
        collector = AgentCollector(
            ToolCompose([nap], "hermes"),
            engine=engine,
            tokenizer=tokenizer(),
            tasks=numbered_tasks(None),
            groups_per_batch=32,
            max_staleness=None,
        )
        async for _ in collector:
            stats = collector.stats
            found = stats.snapshot()["capacity"], str(stats), stats.scalars()
            break
        await collector.aclose()
        return found

    capacity, table, curves = run_skipping(main())
    assert 0 < capacity["open"] <= capacity["limit"]
    assert 0 < capacity["kv_use"] <= 1
    assert f"{capacity['open']} of at most {capacity['limit']} trajectories open; KV cache" in table
    assert curves["collector/capacity/kv_use"] == capacity["kv_use"]


def test_a_pressure_that_fails_does_not_end_the_collector():
    class Failing(ScriptedEngine):
        async def pressure(self) -> EnginePressure:
            raise RuntimeError("no metrics today")

    async def main() -> int:
        engine = Failing([["fine"]], tokenizer(), token_s=0.2)
        collector = AgentCollector(
            ToolCompose([nap], "hermes"), engine=engine, tokenizer=tokenizer(), tasks=numbered_tasks(20)
        )
        count = 0
        async with contextlib.aclosing(aiter(collector)) as batches:
            async for batch in batches:
                count += len(batch)
        await collector.aclose()
        return count

    assert run_skipping(main()) == 20
