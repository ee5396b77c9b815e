"""The cost of a wrapper per call, and the speed of a replay, compared with the bare tool."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import nap, noop

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.limits import RateLimiter
from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.testing import run_skipping
from torchrl_agentic.tools import (
    Approved,
    Budgeted,
    Cached,
    Cassette,
    Faulty,
    Hedged,
    Recorded,
    Renamed,
    Replayed,
    Retrying,
    Truncated,
    Wrapped,
)
from torchrl_agentic.tools.base import Effects, Tool, ToolContext

Benchmark = Callable[..., Any]
ARGS = {"a": 1, "query": "what is the capital of the country with the most neighbours?"}
CALLS, TURNS, WIDTH = 200, 20, 4
EVER = 1_000_000_000

WRAPPERS: dict[str, Callable[[Any, Path], Any]] = {
    "bare": lambda tool, _: tool,
    "Wrapped": lambda tool, _: Wrapped(tool),
    "Renamed": lambda tool, _: Renamed(tool, "other"),
    "Truncated": lambda tool, _: Truncated(tool),
    "Retrying": lambda tool, _: Retrying(tool),
    "Cached, hits": lambda tool, _: Cached(tool),
    "Budgeted": lambda tool, _: Budgeted(tool, calls=EVER),
    "Approved": lambda tool, _: Approved(tool, lambda name, args, ctx: True),
    "Faulty": lambda tool, _: Faulty(tool, 1, overloads=0.0),
    "Hedged": lambda tool, _: Hedged(tool),
    "Recorded": lambda tool, path: Recorded(tool, path / "cassette.jsonl"),
}


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


class Plain(Wrapped):
    """Accepts any arguments."""

    async def run(self, args: Any, ctx: ToolContext) -> str:
        """Return at once."""
        return "ok"


@pytest.mark.parametrize("which", WRAPPERS)
def test_a_call_by_hand(benchmark: Benchmark, loop: asyncio.Runner, which: str, tmp_path: Path) -> None:
    """Measure the wrapper alone: `run` around a tool that returns a text at once, and the result."""
    benchmark.group = "wrap: one call by hand"
    benchmark.extra_info["divide"] = CALLS
    tool = WRAPPERS[which](Plain(noop), tmp_path)
    ctx = ToolContext(call_id="call_0_0", trajectory="0.0")

    async def run() -> None:
        for _ in range(CALLS):
            ToolResult.from_value(await tool.run(ARGS, ctx))

    benchmark(lambda: loop.run(run()))
    loop.run(tool.teardown())


@pytest.mark.parametrize("which", WRAPPERS)
def test_a_call_of_a_dispatcher(
    benchmark: Benchmark, loop: asyncio.Runner, which: str, tmp_path: Path
) -> None:
    """Measure a wrapped call in the dispatcher, which also handles the session of the tool."""
    benchmark.group = "wrap: one call of a dispatcher"
    benchmark.extra_info["divide"] = CALLS
    dispatcher = Dispatcher([WRAPPERS[which](Plain(noop), tmp_path)], validate_inputs=False)
    session = dispatcher.session("0.0")
    calls = [ParsedCall(dispatcher.tools[0].name, ARGS, "call_0_0")]

    async def run() -> None:
        for _ in range(CALLS):
            await session.run(calls)

    loop.run(run())  # opens what it has to open
    benchmark(lambda: loop.run(run()))
    loop.run(dispatcher.close())


@pytest.mark.parametrize("which", ["live", "replayed"])
def test_a_trajectory_of_slow_tools(
    benchmark: Benchmark, loop: asyncio.Runner, which: str, tmp_path: Path
) -> None:
    """Run 20 turns of 4 calls of 50 ms each; the replay includes reading the cassette."""
    benchmark.group = f"wrap: {TURNS} turns of {WIDTH} calls of 50 ms"
    path = tmp_path / "cassette.jsonl"

    async def trajectory(tool: Any) -> None:
        dispatcher = Dispatcher([tool])
        async with dispatcher.session("0.0") as session:
            for turn in range(TURNS):
                await session.run([ParsedCall("nap", {"a": n}, f"call_{turn}_{n}") for n in range(WIDTH)])
        await dispatcher.close()

    loop.run(trajectory(Recorded(nap, path)))
    assert len(Cassette(path)) == TURNS * WIDTH

    def once() -> None:
        loop.run(trajectory(nap if which == "live" else Replayed(nap, path)))

    benchmark.pedantic(once, rounds=3 if which == "live" else 20, warmup_rounds=1)


class Service(Tool):
    """A service with a median of 0.3 s and a 99th percentile of 30 times that; counts its calls."""

    name = "service"
    description = "Look something up."
    effects = Effects.PURE

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.calls = 0

    async def run(self, args: Any, ctx: ToolContext) -> str:
        """Wait; a second call of the same arguments takes a time of its own."""
        self.calls += 1
        sigma = math.log(30) / 2.326  # standard deviations from the median to the 99th percentile
        await asyncio.sleep(min(29.0, 0.3 * math.exp(self._rng.gauss(0, sigma))))
        return "ok"


ROWS, BATCHES, SEEDS = 64, 10, 3


@pytest.mark.parametrize("turns", [1, 8])
@pytest.mark.parametrize("after", ["p90", "p95"])
def test_an_awaited_batch(benchmark: Benchmark, after: str, turns: int) -> None:
    """Await batches of 64 trajectories of a heavy-tailed service, with and without second calls.

    Time is that of a clock which skips waiting and counts computing. The first batch, in which the
    latencies become known, counts too.
    """
    benchmark.group = f"wrap: awaited batches of {ROWS} trajectories of {turns} calls"

    async def awaited(tool: Any) -> float:
        dispatcher = Dispatcher([tool])

        async def trajectory(name: str) -> None:
            async with dispatcher.session(name) as session:
                for turn in range(turns):
                    await session.run([ParsedCall("service", {"q": turn}, f"call_{turn}_0")])

        begin = asyncio.get_running_loop().time()
        for number in range(BATCHES):
            await asyncio.gather(*(trajectory(f"{number}.{row}") for row in range(ROWS)))
        seconds = asyncio.get_running_loop().time() - begin
        await dispatcher.close()
        return seconds

    def run(wrap: Callable[[Any], Any]) -> tuple[float, int]:
        services = [Service(seed) for seed in range(SEEDS)]
        seconds = sum(run_skipping(awaited(wrap(one)), counts_cpu=True) for one in services)
        return seconds / BATCHES / SEEDS, sum(one.calls for one in services)

    plain_s, calls = run(lambda tool: tool)
    hedged_s, made = benchmark.pedantic(run, args=(lambda tool: Hedged(tool, after),), rounds=1)
    found = {
        "plain_s": plain_s,
        "hedged_s": hedged_s,
        "factor": plain_s / hedged_s,
        "extra": made / calls - 1,
    }
    benchmark.extra_info |= {name: round(value, 3) for name, value in found.items()}
    print(f"\n{after}, {turns} calls: {benchmark.extra_info}")


GROUPS, GROUP_SIZE, SHARED = 20, 8, 4


@pytest.mark.parametrize("is_cached", [False, True], ids=["alone", "group cache"])
def test_a_group_with_identical_calls(benchmark: Benchmark, is_cached: bool) -> None:
    """Run groups of 8 trajectories that make the same 4 calls of 50 ms, at a service that takes 4 at once."""
    benchmark.group = f"wrap: a group of {GROUP_SIZE} with {SHARED} identical calls of 50 ms, 4 at once"

    async def groups() -> float:
        napping = Cached(nap, "group") if is_cached else nap
        dispatcher = Dispatcher([napping], rate_limits={"nap": RateLimiter(max_concurrent=4)})

        async def trajectory(name: str, group: str) -> None:
            async with dispatcher.session(name) as session:
                session.group = group
                for turn in range(SHARED):
                    await session.run([ParsedCall("nap", {"a": turn}, f"call_{turn}_0")])

        begin = asyncio.get_running_loop().time()
        for number in range(GROUPS):
            await asyncio.gather(*(trajectory(f"{number}.{row}", str(number)) for row in range(GROUP_SIZE)))
        seconds = asyncio.get_running_loop().time() - begin
        await dispatcher.close()
        return seconds / GROUPS

    seconds = benchmark.pedantic(lambda: run_skipping(groups(), counts_cpu=True), rounds=1)
    benchmark.extra_info["group_s"] = round(seconds, 4)
    print(f"\n{'group cache' if is_cached else 'alone'}: {1000 * seconds:.0f} ms per group")
