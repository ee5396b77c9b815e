"""A web server with scripted behaviour: correct, slow, wrong, too long or missing responses.

    async with WebServer({"/": page(b"hello")}) as server:
        ... server.url("/") ...

It writes raw bytes to sockets, because no library sends such malformed responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

from helpers.connections import stop_listening

MAX_HEAD_BYTES = 1 << 20


@dataclass(slots=True)
class Visit:
    """One request, and the connection to answer it on.

    Attributes:
        number: Number of the connection, from 0.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    number: int
    writer: asyncio.StreamWriter
    closing: asyncio.Event

    async def send(self, *pieces: bytes) -> None:
        """Write raw bytes."""
        self.writer.writelines(pieces)
        await self.writer.drain()

    async def stall(self) -> None:
        """Do nothing until the server ends."""
        await self.closing.wait()


Act: TypeAlias = Callable[[Visit], Awaitable[None]]
"""A handler of a visit. If it returns, the connection is kept; it closes the writer to end it."""


class WebServer:
    """Listens on a loopback address while it is entered, and runs the handler in `acts` for each path.

    Other paths get status 404.

    Attributes:
        visits: Requests so far.
        connections: Number of connections so far.
    """

    def __init__(
        self,
        acts: Mapping[str, Act] | None = None,
        *,
        host: str = "127.0.0.1",
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.acts: dict[str, Act] = dict(acts or {})
        self.host = host
        self.port = 0
        self.visits: list[Visit] = []
        self.connections = 0
        self._ssl_context = ssl_context
        self._closing = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()

    @property
    def n_open(self) -> int:
        """Number of connections that neither side has closed."""
        return len(self._open)

    def url(self, path: str = "/", *, host: str | None = None) -> str:
        """Return the URL of a path, by the address or by a name that resolves to it."""
        scheme = "https" if self._ssl_context else "http"
        literal = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host or literal}:{self.port}{path}"

    async def __aenter__(self) -> Self:
        self._closing.clear()
        self._server = await asyncio.start_server(  # entered again, it has the same port
            self._serve, self.host, self.port, ssl=self._ssl_context, limit=MAX_HEAD_BYTES
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await stop_listening(self._server)
        self._closing.set()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await asyncio.sleep(0)  # in which aborted connections close

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # In our own task: asyncio logs an error if a task of its own is cancelled.
        task = asyncio.create_task(self._talk(reader, writer, self.connections))
        self.connections += 1
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        # A task that is cancelled before its first step closes nothing itself.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        try:
            while not writer.is_closing():
                visit = await self._read(reader, writer, number)
                self.visits.append(visit)
                await self.acts.get(visit.path.partition("?")[0], _missing)(visit)
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> Visit:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head[:-4].split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Visit(method, path, headers, body, number, writer, self._closing)


def answer(
    body: bytes = b"",
    kind: str | None = "text/plain",
    status: str = "200 OK",
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """Return a plain answer. The given headers replace the defaults."""
    ours = {"Content-Length": str(len(body))} | ({"Content-Type": kind} if kind else {}) | dict(headers or {})
    lines = "".join(f"{name}: {value}\r\n" for name, value in ours.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode("latin-1") + body


def page(
    body: bytes = b"",
    kind: str | None = "text/plain",
    status: str = "200 OK",
    headers: Mapping[str, str] | None = None,
) -> Act:
    """Return a handler that sends an answer."""
    return raw(answer(body, kind, status, headers), close=False)


def redirect(location: str, status: str = "302 Found") -> Act:
    """Return a handler that redirects."""
    return page(b"moved", status=status, headers={"Location": location})


def raw(*pieces: bytes, close: bool = True) -> Act:
    """Return a handler that sends these bytes."""

    async def act(visit: Visit) -> None:
        await visit.send(*pieces)
        if close:
            visit.writer.close()

    return act


def stalling(*pieces: bytes) -> Act:
    """Return a handler that sends these bytes, possibly half an answer, and then nothing."""

    async def act(visit: Visit) -> None:
        await visit.send(*pieces)
        await visit.stall()

    return act


def pouring(head: bytes, more: Iterable[bytes], *, pause: float = 0.0) -> Act:
    """Return a handler that sends a head and then endless bytes, or one byte now and then."""

    async def act(visit: Visit) -> None:
        await visit.send(head)
        for piece in more:
            await visit.send(piece)
            await asyncio.sleep(pause)

    return act


def bomb(megabytes: int, kind: str = "text/plain") -> Act:
    """Return a handler that sends a few kilobytes that decompress to `megabytes`."""
    packed = gzip.compress(b" " * (megabytes << 20))
    return page(packed, kind, headers={"Content-Encoding": "gzip"})


def endless_headers() -> Act:
    """Return a handler that sends endless headers."""
    return pouring(b"HTTP/1.1 200 OK\r\n", (b"X-%d: %s\r\n" % (n, b"y" * 1000) for n in itertools.count()))


async def _missing(visit: Visit) -> None:
    await visit.send(answer(b"no such page", status="404 Not Found"))
