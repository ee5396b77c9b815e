"""`torchrl-agentic serve`: servers for machines without a cloud, until they are told to end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from torchrl_agentic.serve.access import Access


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a server listens, and who may use it.

    Args:
        host: The address.
        port: The port; 0 for one that is free.
        token_file: The file of the token that requests have to send; None: they need none.
        allowed_hosts: What requests may name as their host, besides names of loopback; if empty, a server
            that others reach takes any.
        is_insecure: Whether others may reach it without a token.
        max_connections: Number of open connections.
    """

    host: str
    port: int
    token_file: Path | None = None
    allowed_hosts: Sequence[str] = ()
    is_insecure: bool = False
    max_connections: int = 512

    def access(self) -> Access:
        """Return who may use the server.

        Raises:
            ValueError: If others reach it without a token, or a value cannot be what it should.
            OSError: If the token cannot be read, or there is no such address.
        """
        from torchrl_agentic.serve.access import Access
        from torchrl_agentic.tools.service import read_token

        token = None if self.token_file is None else read_token(self.token_file)
        if _is_loopback(self.host, self.port):
            return Access(token, tuple(self.allowed_hosts))
        if token is None and not self.is_insecure:
            raise ValueError(
                f"whoever reaches {self.host}, port {self.port} could use this server; give it a token "
                "(--token-file), let it listen to this machine alone (--host 127.0.0.1), or say --insecure"
            )
        return Access(token, tuple(self.allowed_hosts) or None)


def serve_sandbox(
    listening: Listening,
    *,
    max_concurrency: int | None,
    max_queue: int,
    max_run_timeout: float,
    memory_mb: int,
    max_body_mb: int,
) -> int:
    """Serve sandboxes; give the exit code."""
    from torchrl_agentic.errors import SandboxError
    from torchrl_agentic.sandbox import default_sandbox
    from torchrl_agentic.serve.sandbox_app import MAX_TOTAL_BODY_BYTES, run_limits, sandbox_app

    try:
        access = listening.access()
        limits = run_limits(memory_mb << 20)
        app = sandbox_app(
            make_sandbox=lambda: default_sandbox(limits),
            access=access,
            max_concurrency=max_concurrency,
            max_queue=max_queue,
            max_run_timeout_s=max_run_timeout,
            max_body_bytes=max_body_mb << 20,
            max_total_body_bytes=max(MAX_TOTAL_BODY_BYTES, max_body_mb << 20),
        )
    except (SandboxError, ImportError, ValueError, OSError) as error:
        return _complain(error)
    _warn_of_strangers(listening, access, "run code on this machine, in sandboxes,")
    return _serve(app, listening, "code is run at {}/run_code and {}/run_jupyter")


def serve_search(path: Path, listening: Listening, *, topk: int) -> int:
    """Serve documents; give the exit code."""
    from torchrl_agentic.serve.search_app import read_documents, search_app

    try:
        access = listening.access()
        documents = read_documents(path)
        app = search_app(documents, topk=topk, access=access)
    except (ImportError, ValueError, OSError) as error:
        return _complain(error)
    if not documents:
        _warn(f"{path} holds no documents: nothing will be found")
    _warn_of_strangers(listening, access, "read these documents")
    return _serve(app, listening, f"{len(documents)} documents are searched at {{}}/retrieve")


def _serve(app: Any, where: Listening, line: str) -> int:
    try:
        from torchrl_agentic.serve.connections import ConnectionBounds, make_server

        bounds = ConnectionBounds(max_connections=where.max_connections)
        with _listen(where.host, where.port) as listening:
            address, bound = listening.getsockname()[:2]
            url = f"http://[{address}]:{bound}" if ":" in address else f"http://{address}:{bound}"
            ready = line.replace("{}", url) + "; Ctrl-C ends it"
            # uvicorn raises the signals that have ended it once more, to whoever listened to them before.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, frame: None)
            asyncio.run(make_server(_announced(app, ready), bounds).serve(sockets=[listening]))
    except (ImportError, ValueError, OSError) as error:
        return _complain(error)
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Listen to a port; 0 for one that is free.

    Raises:
        OSError: it is taken, or there is no such address.
    """
    try:
        family = _addresses(host, port)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"cannot listen at {host}, port {port}: {reason}; --port 0 takes a free one") from None


def _addresses(host: str, port: int) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(f"cannot listen at {host}: {error.strerror or error}") from None


def _announced(app: Any, line: str) -> Any:
    """Print a line as soon as an application has started."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        async def send_and_tell(message: Any) -> None:
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                print(f"ready: {line}", flush=True)

        await app(scope, receive, send_and_tell if scope["type"] == "lifespan" else send)

    return call


def _is_loopback(host: str, port: int) -> bool:
    """Whether this machine alone can reach an address.

    Raises:
        OSError: there is no such address.
    """
    from torchrl_agentic.serve.access import is_loopback

    return all(is_loopback(str(found[4][0])) for found in _addresses(host, port))


def _warn_of_strangers(listening: Listening, access: Access, can: str) -> None:
    if access.token is None and not _is_loopback(listening.host, listening.port):
        _warn(f"whoever reaches {listening.host}, port {listening.port} can {can} without a token")


def _warn(said: str) -> None:
    Console(stderr=True).print(Text(f"torchrl-agentic: {said}", style="yellow"))


def _complain(error: Exception) -> int:
    Console(stderr=True).print(Text(f"torchrl-agentic: {error}", style="red"))
    return 1
