"""The cost of a call in the dispatcher, and the overlap of slow tools, compared with `asyncio.gather`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from rig import bare, blocking_nap, limits, nap, noop

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.messages import ParsedCall

Benchmark = Any  # its fixture has attributes and is called


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def calls(name: str, number: int) -> list[ParsedCall]:
    return [ParsedCall(name, {"a": index}, f"c{index}") for index in range(number)]


@pytest.mark.parametrize("k", [1, 8, 64])
@pytest.mark.parametrize("which", ["bare gather", "dispatcher"])
def test_noop_calls(benchmark: Benchmark, loop: asyncio.Runner, which: str, k: int) -> None:
    benchmark.group = f"dispatch: {k} no-op calls of one message"
    dispatcher = Dispatcher([noop], rate_limits=limits())
    session = dispatcher.session("t")
    batch = calls("noop", k)

    async def gather() -> None:
        await asyncio.gather(*(bare() for _ in range(k)))

    work: Callable[[], Coroutine[Any, Any, Any]] = (
        gather if which == "bare gather" else lambda: session.run(batch)
    )
    benchmark(lambda: loop.run(repeated(work)))
    loop.run(dispatcher.close())


REPEATS = 20


async def repeated(work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Run many times within one entry of the event loop, which costs the same for both."""
    for _ in range(REPEATS):
        await work()


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("which", ["bare gather", "dispatcher"])
def test_slow_calls(benchmark: Benchmark, loop: asyncio.Runner, which: str, n: int) -> None:
    benchmark.group = "agentic-dispatch"
    benchmark.extra_info["which"] = f"{which}, n = {n}"
    dispatcher = Dispatcher([nap])
    session = dispatcher.session("t")

    async def gather() -> None:
        await asyncio.gather(*(asyncio.sleep(0.05) for _ in range(n)))

    work = gather if which == "bare gather" else lambda: session.run(calls("nap", n))
    benchmark.pedantic(lambda: loop.run(work()), rounds=10, warmup_rounds=1)
    loop.run(dispatcher.close())


@pytest.mark.parametrize("which", ["bare gather", "async tools", "blocking tools"])
def test_rows_of_slow_calls(benchmark: Benchmark, loop: asyncio.Runner, which: str) -> None:
    benchmark.group = "dispatch: 16 rows × 4 calls of 50 ms"
    dispatcher = Dispatcher([nap, blocking_nap])
    sessions = [dispatcher.session(str(row)) for row in range(16)]
    batch = calls("nap" if which == "async tools" else "blocking_nap", 4)

    async def gather() -> None:
        await asyncio.gather(*(asyncio.sleep(0.05) for _ in range(64)))

    work = gather if which == "bare gather" else lambda: dispatcher.run([(s, batch, None) for s in sessions])
    benchmark.pedantic(lambda: loop.run(work()), rounds=10, warmup_rounds=2)
    loop.run(dispatcher.close())
