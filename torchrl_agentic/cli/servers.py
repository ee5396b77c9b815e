"""`torchrl-agentic serve`: local servers of sandboxes and search, which run until they are interrupted."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchrl_agentic.cli.show import complain, mistakes_end_it

if TYPE_CHECKING:
    from torchrl_agentic.serve.access import Access


@dataclass(frozen=True, slots=True)
class Listening:
    """Address of a server, and the clients that may use it.

    Args:
        host: Address to listen at.
        port: Port to listen at; 0 for a free one.
        token_file: File of the token that requests must send; None for no token.
        allowed_hosts: Accepted host names of requests, besides loopback names; if empty, a public server
            accepts any.
        is_insecure: Whether a public server without a token is allowed.
        max_connections: Largest number of open connections.
    """

    host: str
    port: int
    token_file: Path | None = None
    allowed_hosts: Sequence[str] = ()
    is_insecure: bool = False
    max_connections: int = 512

    def access(self) -> Access:
        """Return the rules for requests.

        Raises:
            ValueError: If the server would be public without a token, or a value is invalid.
            OSError: If the token cannot be read, or the address does not exist.
        """
        from torchrl_agentic.serve.access import Access
        from torchrl_agentic.tools.service import read_token

        token = None if self.token_file is None else read_token(self.token_file)
        if _is_loopback(self.host, self.port):
            return Access(token, tuple(self.allowed_hosts))
        if token is None and not self.is_insecure:
            raise ValueError(
                f"anyone who can reach {self.host}, port {self.port} could use this server: require a token "
                "(--token-file), listen on this machine only (--host 127.0.0.1), or pass --insecure"
            )
        return Access(token, tuple(self.allowed_hosts) or None)


_Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 for a free one.")]
_Host = Annotated[
    str, typer.Option(help="Address to listen at; other addresses than loopback need --token-file.")
]
_TokenFile = Annotated[Path | None, typer.Option(help="File of the bearer token that clients must send.")]
_AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(help="Host name under which clients or a proxy reach this server. Repeatable."),
]
_Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow an address other than loopback without a token.")
]
_MaxConnections = Annotated[int, typer.Option(help="Largest number of open connections.")]


def serve_sandbox(
    port: _Port = 8080,
    host: _Host = "127.0.0.1",
    token_file: _TokenFile = None,
    allowed_host: _AllowedHosts = None,
    insecure: _Insecure = False,
    max_concurrency: Annotated[
        int | None,
        typer.Option(help="Largest number of running programs; one more than the processors by default."),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Largest number of waiting programs; others get status 429.")
    ] = 256,
    max_run_timeout: Annotated[
        float, typer.Option(help="Largest time limit for compiling or running, in seconds.")
    ] = 300.0,
    memory_mb: Annotated[int, typer.Option(help="Memory limit of a program, in MiB.")] = 1024,
    max_body_mb: Annotated[int, typer.Option(help="Largest size of a request, in MiB.")] = 32,
    max_connections: _MaxConnections = 512,
) -> None:
    """Run programs sent over HTTP, each in its own sandbox, with the protocol of Sandbox Fusion."""
    from torchrl_agentic.sandbox import default_sandbox
    from torchrl_agentic.serve.sandbox_app import MAX_TOTAL_BODY_BYTES, run_limits, sandbox_app

    listening = Listening(host, port, token_file, allowed_host or (), insecure, max_connections)
    with mistakes_end_it(code=1):
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
        _warn_if_public(listening, access, "run code on this machine, in sandboxes,")
        _serve(app, listening, "programs run at {}/run_code and {}/run_jupyter")


def serve_search(
    path: Annotated[Path, typer.Argument(help="Folder of text files, or a .jsonl file of documents.")],
    port: _Port = 8000,
    host: _Host = "127.0.0.1",
    token_file: _TokenFile = None,
    allowed_host: _AllowedHosts = None,
    insecure: _Insecure = False,
    topk: Annotated[int, typer.Option(help="Default number of documents per query.")] = 3,
    max_connections: _MaxConnections = 512,
) -> None:
    """Serve a BM25 search in local documents, with the protocol of Search-R1's retrieval service."""
    from torchrl_agentic.serve.search_app import read_documents, search_app

    listening = Listening(host, port, token_file, allowed_host or (), insecure, max_connections)
    with mistakes_end_it(code=1):
        access = listening.access()
        documents = read_documents(path)
        app = search_app(documents, topk=topk, access=access)
        if not documents:
            complain(f"{path} holds no documents: searches will find nothing", style="yellow")
        _warn_if_public(listening, access, "read these documents")
        _serve(app, listening, f"search {len(documents)} documents at {{}}/retrieve")


def _serve(app: Any, where: Listening, line: str) -> None:
    from torchrl_agentic.serve.connections import ConnectionBounds, make_server

    bounds = ConnectionBounds(max_connections=where.max_connections)
    with _listen(where.host, where.port) as listening:
        address, bound = listening.getsockname()[:2]
        url = f"http://[{address}]:{bound}" if ":" in address else f"http://{address}:{bound}"
        ready = line.replace("{}", url) + "; Ctrl-C stops the server"
        # After it has stopped, uvicorn sends its signals again to the previous handlers.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
        asyncio.run(make_server(_announced(app, ready), bounds).serve(sockets=[listening]))


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens to a port; 0 for a free one.

    Raises:
        OSError: If the port is in use, or the address does not exist.
    """
    try:
        family = _addresses(host, port)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"cannot listen at {host}, port {port}: {reason}; --port 0 uses a free port") from None


def _addresses(host: str, port: int) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(f"cannot listen at {host}: {error.strerror or error}") from None


def _announced(app: Any, line: str) -> Any:
    """Wrap an application, to print a line when it has started."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        async def send_and_print(message: Any) -> None:
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                print(f"ready: {line}", flush=True)

        await app(scope, receive, send_and_print if scope["type"] == "lifespan" else send)

    return call


def _is_loopback(host: str, port: int) -> bool:
    """Return whether only this machine can reach an address.

    Raises:
        OSError: If the address does not exist.
    """
    from torchrl_agentic.serve.access import is_loopback

    return all(is_loopback(str(found[4][0])) for found in _addresses(host, port))


def _warn_if_public(listening: Listening, access: Access, can: str) -> None:
    if access.token is None and not _is_loopback(listening.host, listening.port):
        text = f"anyone who can reach {listening.host}, port {listening.port} can {can} without a token"
        complain(text, style="yellow")
