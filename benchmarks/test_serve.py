"""How many programs a second does the embedded server run, beside a bare Python for each of them?"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from torchrl_agentic.testing.servers.embedded import serving

RUNS = 200
CLIENTS = 16
PROGRAM = {"code": "print(1)", "language": "python"}


@pytest.mark.parametrize("which", ["bare python, unsandboxed", "embedded server"])
def test_runs(benchmark: Callable[..., Any], which: str) -> None:
    benchmark.group = f"serve: {RUNS} runs of print(1), {CLIENTS} at once"
    if which != "embedded server":
        with ThreadPoolExecutor(CLIENTS) as threads:
            benchmark.pedantic(lambda: list(threads.map(_bare, range(RUNS))), rounds=3)
        return
    with serving("torchrl_agentic.serve.sandbox_app:sandbox_app") as url, asyncio.Runner() as runner:
        runner.run(_runs(url, CLIENTS))
        benchmark.pedantic(lambda: runner.run(_runs(url, RUNS)), rounds=3)


def _bare(_: int) -> None:
    found = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=True)
    assert found.stdout == b"1\n"


async def _runs(url: str, count: int) -> None:
    """Send so many programs, each client its next one when it has the answer."""
    left = iter(range(count))

    async def client(http: httpx.AsyncClient) -> None:
        for _ in left:
            answer = (await http.post("/run_code", json=PROGRAM)).json()
            assert answer["run_result"]["stdout"] == "1\n", answer

    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
