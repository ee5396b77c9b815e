"""Servers in processes of their own, which are killed and restarted at random."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
START_S = 120.0
"""Seconds that a server may take to start."""
MCP = (
    "import sys, uvicorn\n"
    "from torchrl_agentic.testing.servers.demo_mcp import http_app\n"
    "uvicorn.run(http_app(), host='127.0.0.1', port=int(sys.argv[1]), log_level='critical')\n"
)


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


class Server:
    """A server that can be killed and started again, at the same port.

    Args:
        arguments: Arguments of Python; the port follows.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.port = free_port()
        self._argv = [sys.executable, *arguments, str(self.port)]
        self._process = subprocess.Popen(self._argv)

    def restart(self) -> None:
        """Start it again if it does not run."""
        if self._process.poll() is not None:
            self._process = subprocess.Popen(self._argv)

    def wait(self) -> None:
        """Wait until it accepts connections."""
        limit = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except ConnectionError:
                if self._process.poll() is not None or time.monotonic() > limit:
                    raise
                time.sleep(0.1)
            else:
                return

    def kill(self) -> None:
        """Kill it, as a machine that fails would."""
        self._process.kill()
        self._process.wait()


def flaky_server() -> Server:
    """Return an HTTP server that fails by itself, too."""
    return Server([str(HERE / "flaky_server.py")])


def mcp_server() -> Server:
    """Return the demo server of MCP over HTTP."""
    return Server(["-c", MCP])


@contextlib.contextmanager
def chaos(servers: Sequence[Server], seed: int) -> Generator[list[int]]:
    """Kill a server every few seconds and start it again a moment later, while the context is open.

    Args:
        servers: The servers; all run at the end.
        seed: Seed of the choices.

    Yields:
        A list whose only number is that of the kills so far.
    """
    rng, is_over, kills = random.Random(seed), threading.Event(), [0]

    def work() -> None:
        while not is_over.wait(rng.uniform(5, 25)):
            server = rng.choice(servers)
            server.kill()
            kills[0] += 1
            is_over.wait(rng.uniform(0, 3))
            server.restart()

    thread = threading.Thread(target=work, name="chaos", daemon=True)
    thread.start()
    try:
        yield kills
    finally:
        is_over.set()
        thread.join()
        for server in servers:
            server.restart()
