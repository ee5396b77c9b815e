"""`torchrl-agentic serve`: servers for machines without a cloud, until they are told to end."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

GRACE_S = 5
"""How long requests that run may take when the server is told to end."""


def serve_sandbox(
    host: str, port: int, *, max_concurrency: int | None, max_queue: int, memory_mb: int, max_body_mb: int
) -> int:
    """Serve sandboxes; give the exit code."""
    from torchrl_agentic.errors import SandboxError
    from torchrl_agentic.sandbox import default_sandbox
    from torchrl_agentic.serve.sandbox_app import run_limits, sandbox_app

    try:
        limits = run_limits(memory_mb << 20)
        app = sandbox_app(
            make_sandbox=lambda: default_sandbox(limits),
            max_concurrency=max_concurrency,
            max_queue=max_queue,
            max_body_bytes=max_body_mb << 20,
        )
    except (SandboxError, ImportError, ValueError) as error:
        return _complain(error)
    if not _is_loopback(host):
        _warn(f"whoever reaches {host}:{port} can run code on this machine, in sandboxes, without a password")
    return _serve(app, host, port, "code is run at {}/run_code and {}/run_jupyter")


def serve_search(path: Path, host: str, port: int, *, topk: int) -> int:
    """Serve documents; give the exit code."""
    from torchrl_agentic.serve.documents import read_documents
    from torchrl_agentic.serve.search_app import search_app

    try:
        documents = read_documents(path)
        app = search_app(documents, topk=topk)
    except (ImportError, ValueError, OSError) as error:
        return _complain(error)
    if not documents:
        _warn(f"{path} holds no documents: nothing will be found")
    if not _is_loopback(host):
        _warn(f"whoever reaches {host}:{port} can read these documents, without a password")
    return _serve(app, host, port, f"{len(documents)} documents are searched at {{}}/retrieve")


def _serve(app: Any, host: str, port: int, line: str) -> int:
    try:
        import uvicorn

        with _listen(host, port) as listening:
            address, bound = listening.getsockname()[:2]
            url = f"http://[{address}]:{bound}" if ":" in address else f"http://{address}:{bound}"
            ready = line.replace("{}", url) + "; Ctrl-C ends it"
            config = uvicorn.Config(
                _announced(app, ready),
                log_level="warning",
                access_log=False,
                lifespan="on",
                ws="none",
                timeout_graceful_shutdown=GRACE_S,
            )
            # uvicorn raises the signals that have ended it once more, to whoever listened to them before.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, frame: None)
            asyncio.run(uvicorn.Server(config).serve(sockets=[listening]))
    except (ImportError, OSError) as error:
        return _complain(error)
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Listen to a port; 0 for one that is free.

    Raises:
        OSError: it is taken, or there is no such address.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"cannot listen at {host}, port {port}: {reason}; --port 0 takes a free one") from None


def _announced(app: Any, line: str) -> Any:
    """Print a line as soon as an application has started."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        async def send_and_tell(message: Any) -> None:
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                print(f"ready: {line}", flush=True)

        await app(scope, receive, send_and_tell if scope["type"] == "lifespan" else send)

    return call


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _warn(said: str) -> None:
    Console(stderr=True).print(Text(f"torchrl-agentic: {said}", style="yellow"))


def _complain(error: Exception) -> int:
    Console(stderr=True).print(Text(f"torchrl-agentic: {error}", style="red"))
    return 1
