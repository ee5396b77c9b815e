"""Programs per second of the embedded server, compared with a Python process per program."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from torchrl_agentic.testing.servers.embedded import serving

RUNS = 200
CLIENTS = 16
PROGRAM = b'{"code": "print(1)", "language": "python"}'


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
    """Send so many programs, each client its next one when it has the answer.

    The clients speak HTTP by hand: httpx would take an eighth of the machine that the server is to show.
    """
    left = iter(range(count))
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /run_code HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: "
    request = f"{head}{len(PROGRAM)}\r\n\r\n".encode() + PROGRAM

    async def client() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in left:
            writer.write(request)
            found = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", found)
            assert length is not None, found
            answer = json.loads(await reader.readexactly(int(length[1])))
            assert answer["run_result"]["stdout"] == "1\n", answer
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
