"""The overhead of `HttpTool` over bare httpx, both with a persistent connection."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest

from torchrl_agentic.tools import HttpTool
from torchrl_agentic.tools.base import ToolContext

REPEATS = 20
SIZES = {"100 B": 100, "100 kB": 100_000}

SERVER = """
import asyncio

async def serve(reader, writer):
    while asked := await reader.readuntil(b"\\r\\n\\r\\n"):
        body = b"x" * int(asked.split(b" ", 2)[1][1:])
        head = b"HTTP/1.1 200 OK\\r\\nContent-Type: text/plain\\r\\nContent-Length: %d\\r\\n\\r\\n"
        writer.write(head % len(body) + body)

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


class Rig:
    """Both contenders, each with one persistent connection; both return the whole text in time."""

    def __init__(self, port: int, size: str) -> None:
        self.url = f"http://127.0.0.1:{port}/{SIZES[size]}"
        self.size = SIZES[size]
        self.client = httpx.AsyncClient(timeout=10, trust_env=False)
        self.tool = HttpTool(allowed_hosts=[f"127.0.0.1:{port}"], output_max_chars=1 << 20)

    async def bare(self) -> None:
        """Send a request without a tool."""
        for _ in range(REPEATS):
            assert len((await self.client.get(self.url)).text) == self.size

    async def ours(self) -> None:
        """Send a request as the dispatcher does."""
        args, context = {"url": self.url}, ToolContext("c1")
        for _ in range(REPEATS):
            assert (await self.tool.run(args, context)).meta["bytes"] == self.size

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()
        await self.tool.teardown()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", ["bare httpx", "HttpTool"])
def test_get(benchmark: Any, port: int, which: str, size: str) -> None:
    benchmark.group = f"HTTP: one GET of {size}"
    benchmark.extra_info["divide"] = REPEATS
    with asyncio.Runner() as runner:
        rig = Rig(port, size)
        work = rig.bare if which == "bare httpx" else rig.ours
        benchmark.pedantic(lambda: runner.run(work()), rounds=40, warmup_rounds=3)
        runner.run(rig.close())


@pytest.mark.parametrize("size", SIZES)
def test_overhead(benchmark: Any, port: int, size: str) -> None:
    """Return the median of 60 ratios; the contenders alternate, so that other load affects both."""
    benchmark.group = f"HTTP: one GET of {size}, turn by turn"

    async def seconds(work: Callable[[], Coroutine[Any, Any, None]]) -> float:
        began = time.perf_counter()
        await work()
        return time.perf_counter() - began

    async def run(rig: Rig) -> float:
        ratios = []
        for turn in range(63):
            first, second = (rig.ours, rig.bare) if turn % 2 else (rig.bare, rig.ours)
            times = [await seconds(first), await seconds(second)]
            ratios.append(times[0] / times[1] if turn % 2 else times[1] / times[0])
        await rig.close()
        return statistics.median(ratios[3:])

    with asyncio.Runner() as runner:
        ratio = benchmark.pedantic(lambda: runner.run(run(Rig(port, size))), rounds=1)
    benchmark.extra_info["times bare httpx"] = round(ratio, 3)
    print(f"\n{size}: {ratio:.2f} times bare httpx")
