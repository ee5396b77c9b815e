"""vLLM servers of the tiny model, in processes of their own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
from helpers.limit import limit
from helpers.processes import started

from torchrl_agentic.testing.tiny import TINY

START_S = limit(240)


class VLLMServer:
    """A server that can be killed and started again on the same port.

    Args:
        folder: Folder for its log.
        options: Further options of `vllm serve`.
        environment: Further environment variables.
    """

    def __init__(self, folder, *options, environment=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "log"
        program = ["-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(TINY)]
        where = ["--host=127.0.0.1", f"--port={port}", "--dtype=float32", "--enforce-eager"]
        self._command = [sys.executable, *program, *where, *options]
        # No figures of ours go to vLLM's makers.
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self._environment = {**os.environ, **own, **(environment or {})}
        self._process = None
        self._stack = contextlib.ExitStack()

    def start(self):
        """Start the server, which needs a while; see `wait`."""
        with self._log.open("wb") as file:
            program = started(self._command, env=self._environment, stdout=file, stderr=subprocess.STDOUT)
            self._process = self._stack.enter_context(program)

    def wait(self):
        """Wait until the server answers."""
        until = time.monotonic() + START_S
        while not _answers(self.url):
            assert self._process.poll() is None, self._log.read_text()[-5000:]
            assert time.monotonic() < until, self._log.read_text()[-5000:]
            time.sleep(0.5)

    def kill(self):
        """End the server and the processes that it started, without any notice."""
        self._stack.close()

    def end(self):
        """End the server, if it runs."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(limit(20))
        self._stack.close()


@contextlib.contextmanager
def serving(folder, *options):
    """Run a server with further options, and yield its URL."""
    server = VLLMServer(folder, *options)
    server.start()
    try:
        server.wait()
        yield server.url
    finally:
        server.end()


def _answers(url):
    try:
        return httpx.get(f"{url}/health", timeout=limit(5)).status_code == 200
    except httpx.TransportError:
        return False
