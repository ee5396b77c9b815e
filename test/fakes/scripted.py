"""An HTTP server that sends scripted replies and records requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

from helpers.connections import stop_listening


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply.

    Attributes:
        body: JSON, or raw bytes.
        how: "whole"; "half" to close the connection in the middle; "cut" to send nothing and close it; "hang"
            to send nothing, ever.
    """

    status: int = 200
    body: Any = field(default_factory=dict[str, Any])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    how: Literal["whole", "half", "cut", "hang"] = "whole"

    def encoded(self) -> bytes:
        """Return the bytes of the response."""
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(slots=True)
class Scripted:
    """The running server.

    Attributes:
        url: Its URL.
        requests: Requests so far: path and JSON.
        connections: Number of connections so far.
        open_now: Number of open connections.
    """

    url: str = ""
    requests: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    connections: int = 0
    open_now: int = 0


@contextlib.asynccontextmanager
async def scripted_server(
    replies: Sequence[Reply] | Callable[[str, Any], Any],
) -> AsyncGenerator[Scripted]:
    """Serve on loopback and yield the server.

    Args:
        replies: The replies; the last one repeats. Or a coroutine function of path and JSON.
    """
    server = Scripted()
    script = list(replies) if not callable(replies) else []
    tasks: set[asyncio.Task[Any]] = set()

    async def answer(path: str, data: Any) -> Reply:
        if callable(replies):
            return await replies(path, data)
        return script.pop(0) if len(script) > 1 else script[0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        server.connections += 1
        server.open_now += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1].decode()
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                data = json.loads(await reader.readexactly(int(length[1]))) if length else None
                server.requests.append((path, data))
                reply = await answer(path, data)
                if reply.how == "hang":
                    await reader.read()
                if reply.how in ("cut", "hang"):
                    return
                encoded = reply.encoded()
                writer.write(encoded if reply.how == "whole" else encoded[:-10])
                await writer.drain()
                if reply.how == "half":
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            server.open_now -= 1
            tasks.discard(task)
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    server.url = f"http://127.0.0.1:{port}"
    try:
        yield server
    finally:
        await stop_listening(listening)
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
