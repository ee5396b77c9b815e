"""The cost of a wrapper per call, and the speed of a replay, compared with the bare tool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import nap, noop

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.tools import (
    Approved,
    Budgeted,
    Cached,
    Cassette,
    Faulty,
    Recorded,
    Renamed,
    Replayed,
    Retrying,
    Truncated,
    Wrapped,
)
from torchrl_agentic.tools.base import ToolContext

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
