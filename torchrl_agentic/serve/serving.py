"""Run an ASGI application on loopback, in a thread or in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_agentic.serve.connections import ConnectionBounds

END_S = 20.0
"""Time limit for a server to end, in seconds."""


@contextlib.contextmanager
def serving(app: Any, *, bounds: ConnectionBounds | None = None) -> Generator[str]:
    """Serve an application on a free port while the context is open, and yield its URL.

    Args:
        app: An ASGI application, served by a thread of this process; or "module:function", which returns one
            and is called in a process of its own.
        bounds: Limits for the clients of an application in a thread.

    Raises:
        MissingExtra: If uvicorn is not installed.
        RuntimeError: If the application does not start or end.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with _in_process(app, listening) if isinstance(app, str) else _in_thread(app, listening, bounds):
            yield url


@contextlib.contextmanager
def _in_thread(app: Any, listening: socket.socket, bounds: ConnectionBounds | None) -> Generator[None]:
    server = _server(app, bounds)
    thread = threading.Thread(target=_serve, args=(server, listening), daemon=True, name="serving")
    thread.start()
    try:
        yield  # the socket accepts connections already; they are served once the application has started
    finally:
        server.should_exit = True
        thread.join(END_S)
        if thread.is_alive():
            raise RuntimeError(f"the server has not ended within {END_S:g} s")


@contextlib.contextmanager
def _in_process(factory: str, listening: socket.socket) -> Generator[None]:
    fd = listening.fileno()
    # PYTHONPATH makes the process import the same package as this one.
    argv = [sys.executable, "-m", __name__, factory, str(fd)]
    process = subprocess.Popen(
        argv, pass_fds=(fd,), env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    )
    listening.close()  # after the process has died, connections are refused instead of waiting forever
    try:
        yield
    finally:
        process.terminate()
        process.wait(END_S)


def _server(app: Any, bounds: ConnectionBounds | None = None) -> Any:
    from torchrl_agentic.serve.connections import DEFAULT_BOUNDS, make_server

    return make_server(app, bounds or DEFAULT_BOUNDS)


def _serve(server: Any, listening: socket.socket) -> None:
    asyncio.run(server.serve(sockets=[listening]))


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    _serve(
        _server(getattr(importlib.import_module(module), function)()), socket.socket(fileno=int(sys.argv[2]))
    )
