"""The overhead of ToolCompose in a step, beside `asyncio.gather`, TorchRL's transform, and no tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from rig import bare, rig

Benchmark = Callable[..., Any]
CALLS = 3


@pytest.mark.parametrize("messages", [4, 40])
@pytest.mark.parametrize("rows", [1, 16, 64, 256])
@pytest.mark.parametrize(
    "which", ["bare gather", "bare gather, once", "ToolCompose", "ExecuteToolsInOrder", "step without tools"]
)
def test_step(benchmark: Benchmark, which: str, rows: int, messages: int) -> None:
    benchmark.group = f"step: {rows} rows × {CALLS} no-op calls, {messages} messages"
    rounds = 5 if rows == 256 else 15
    if which.startswith("bare gather"):

        async def gather() -> None:
            await asyncio.gather(*(bare() for _ in range(rows * CALLS)))

        async def repeated() -> None:
            for _ in range(20):
                await gather()

        with asyncio.Runner() as runner:
            if which == "bare gather":
                benchmark.extra_info["divide"] = 20
                benchmark.pedantic(lambda: runner.run(repeated()), rounds=rounds, warmup_rounds=2)
                return
            # Where ToolCompose runs: right after a step of the base environment, entering the loop once.
            setting = rig("ToolCompose", rows, messages, CALLS)

            def stepped() -> None:
                setting.at_the_transform()

            benchmark.pedantic(lambda: runner.run(gather()), setup=stepped, rounds=rounds, warmup_rounds=1)
            setting.env.close()
        return
    setting = rig(which, rows, messages, CALLS)
    if which == "step without tools":
        benchmark.pedantic(
            setting.env.step, setup=lambda: ((setting.td.copy(),), {}), rounds=rounds, warmup_rounds=1
        )
    else:
        benchmark.pedantic(
            setting.env.transform._step,
            setup=lambda: (setting.at_the_transform(), {}),
            rounds=rounds,
            warmup_rounds=1,
        )
    setting.env.close()


@pytest.mark.parametrize("calls", [1, 3, 8])
@pytest.mark.parametrize("which", ["ToolCompose", "ExecuteToolsInOrder"])
def test_step_with_slow_tools(benchmark: Benchmark, which: str, calls: int) -> None:
    benchmark.group = f"step: 1 row × {calls} calls of 50 ms"
    setting = rig(which, 1, 4, calls, "nap")
    benchmark.pedantic(
        setting.env.transform._step, setup=lambda: (setting.at_the_transform(), {}), rounds=5, warmup_rounds=1
    )
    setting.env.close()
