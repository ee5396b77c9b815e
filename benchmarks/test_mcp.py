"""The overhead of an MCP tool over `ClientSession.call_tool`, both over stdio."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fakes import mcp_raw
from mcp import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.tools import MCPServerConfig, MCPToolset
from torchrl_agentic.tools.base import ToolContext

REPEATS = 50
ROUNDS = 60


class Rig:
    """The contenders: each calls the same tool of the same server program over its own open session."""

    async def open(self) -> None:
        """Start both servers."""
        self._stack = AsyncExitStack()
        bare = StdioServerParameters(command=sys.executable, args=[mcp_raw.__file__])
        read, write = await self._stack.enter_async_context(stdio_client(bare))
        self.session = await self._stack.enter_async_context(ClientSession(read, write))
        await self.session.initialize()
        await self.session.list_tools()
        self.toolset = MCPToolset(MCPServerConfig(sys.executable, [mcp_raw.__file__]), tools=["first"])
        (self.tool,) = await self.toolset.setup()
        self.dispatcher = Dispatcher([self.tool])

    async def close(self) -> None:
        """Stop both servers."""
        await self.dispatcher.close()
        await self.toolset.teardown()
        await self._stack.aclose()

    async def bare(self) -> None:
        """Call without a tool."""
        result: Any = await self.session.call_tool("first", {"x": 1})
        assert result.content[0].text == "first"

    async def ours(self) -> None:
        """Call as the dispatcher does."""
        assert (await self.tool.run({"x": 1}, ToolContext("c1"))).text == "first"

    async def dispatched(self) -> None:
        """Call through the dispatcher."""
        async with self.dispatcher.session("t") as session:
            (result,) = await session.run([ParsedCall("first", {"x": 1}, "c1")])
        assert result.text == "first"


async def _times(at_once: int) -> dict[str, list[float]]:
    """Alternate between the contenders, so that other load affects all of them."""
    rig = Rig()
    await rig.open()
    contenders = {"bare": rig.bare, "MCPTool": rig.ours, "Dispatcher": rig.dispatched}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        for turn in range(ROUNDS):
            for name, work in list(contenders.items())[:: 1 if turn % 2 else -1]:
                began = time.perf_counter()
                for _ in range(REPEATS // at_once):
                    await asyncio.gather(*(work() for _ in range(at_once)))
                times[name].append((time.perf_counter() - began) / REPEATS)
    finally:
        await rig.close()
    return {name: found[5:] for name, found in times.items()}


@pytest.mark.parametrize("at_once", [1, 50])
def test_overhead(benchmark: Any, at_once: int) -> None:
    benchmark.group = f"MCP: {at_once} at once, turn by turn"
    times = benchmark.pedantic(lambda: asyncio.run(_times(at_once)), rounds=1)
    print()
    for name, found in times.items():
        ratio = statistics.median(one / other for one, other in zip(found, times["bare"], strict=True))
        benchmark.extra_info[f"{name}, times bare"] = round(ratio, 3)
        median, p95 = (statistics.quantiles(found, n=20)[place] * 1e6 for place in (9, 18))
        print(f"{at_once} at once, {name}: {median:.0f} µs a call, p95 {p95:.0f}, {ratio:.2f} times bare")
