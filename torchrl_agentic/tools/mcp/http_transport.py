"""Connect to running MCP servers over streamable HTTP, or over SSE for older servers.

Over streamable HTTP the SDK reads responses, strictly and with bounds of its own: it gets a stream of short
events, and `Tickets.redeemed` puts the messages in their place. Over SSE the SDK ends all requests with one
that fails, hence `sse` here.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCRequest, jsonrpc_message_adapter

from torchrl_agentic.tools.mcp.message_reader import (
    ENDS,
    Lines,
    MessageReader,
    Number,
    TooLong,
    as_session_message,
)
from torchrl_agentic.tools.mcp.server_config import MCPServerConfig, too_large

CONNECT_S = 10.0
_MAX_REDIRECTS = 5
_EVENTS = "text/event-stream"
_PACKED = "the response is compressed, although the request did not allow it"


@dataclass(slots=True)
class Answers:
    """The last HTTP response of a server.

    Attributes:
        status: Its status; None before the first one.
        forgotten: Whether the server no longer knows our session.
    """

    status: int | None = None
    forgotten: bool = False

    async def note(self, response: httpx2.Response) -> None:
        """Store the status of a response."""
        self.status = response.status_code
        if response.status_code == 404 and "mcp-session-id" in response.request.headers:
            self.forgotten = True

    @property
    def is_refusal(self) -> bool:
        """True if the server may use the other transport, which does not have this kind of request."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in (401, 403, 429)

    def text(self) -> str:
        """Return the status as text if it is an error, else ""."""
        return "" if self.status is None or self.status < 400 else f"it responded with {self.status}"


@contextlib.asynccontextmanager
async def streamable_http(
    config: MCPServerConfig, answers: Answers, reader: MessageReader
) -> AsyncGenerator[Any]:
    """Connect over streamable HTTP.

    Args:
        config: The server.
        answers: Gets the status of each response.
        reader: Reads the messages.

    Returns:
        An async context manager that yields the streams of the connection.
    """

    async def rewrite(response: httpx2.Response) -> None:
        kind = _kind(response)
        content = response.request.content
        if response.status_code >= 300 or not (kind == _EVENTS or (content and kind == "application/json")):
            response.stream = _Bounded(response.stream, reader.max_bytes, is_packed=_is_packed(response))
            return
        message = jsonrpc_message_adapter.validate_json(content) if content else None
        wanted = message.id if isinstance(message, JSONRPCRequest) else None
        if message is not None:
            reader.sent(message)
        response.stream = _TicketStream(
            response.stream, reader, wanted, is_json=kind != _EVENTS, is_packed=_is_packed(response)
        )
        response.headers["content-type"] = _EVENTS + "; charset=utf-8"
        response.headers.pop("content-encoding", None)

    async with (
        _client(config, [answers.note, rewrite]) as client,
        streamable_http_client(config.url or "", http_client=client) as streams,
    ):
        yield streams


@contextlib.asynccontextmanager
async def sse(config: MCPServerConfig, answers: Answers, reader: MessageReader) -> AsyncGenerator[Any]:
    """Connect over SSE.

    Args:
        config: The server.
        answers: Gets the status of each response.
        reader: Reads the messages.

    Returns:
        An async context manager that yields the streams of the connection.
    """
    endpoint: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with _client(config, [answers.note]) as client, _opened(client, config.url or "") as response:
        incoming, read = anyio.create_memory_object_stream[SessionMessage](64)
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        tasks = [asyncio.create_task(_receive(response, reader, endpoint, incoming))]
        try:
            await asyncio.wait((*tasks, endpoint), return_when=asyncio.FIRST_COMPLETED)
            if not endpoint.done():
                tasks[0].result()
                raise httpx2.StreamError("the stream of events ended before it named an endpoint")
            tasks.append(asyncio.create_task(_send(client, reader, endpoint.result(), outgoing, incoming)))
            yield read, write
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (read, write, incoming, outgoing):
                stream.close()


@contextlib.asynccontextmanager
async def _opened(client: httpx2.AsyncClient, url: str) -> AsyncGenerator[httpx2.Response]:
    """Open a stream of events; follow redirects only on the same origin."""
    request = client.build_request("GET", url, headers={"Accept": _EVENTS, "Cache-Control": "no-store"})
    response = await client.send(request, stream=True)
    for _ in range(_MAX_REDIRECTS):
        found = response.next_request
        if found is None or _origin(str(found.url)) != _origin(url):
            break
        await response.aclose()
        response = await client.send(found, stream=True)
    try:
        response.raise_for_status()
        if _kind(response) != _EVENTS or _is_packed(response):
            what = (
                _PACKED
                if _is_packed(response)
                else f"expected {_EVENTS}, got {_kind(response) or 'no content type'}"
            )
            raise httpx2.StreamError(what)
        yield response
    finally:
        await response.aclose()


async def _receive(
    response: httpx2.Response,
    reader: MessageReader,
    endpoint: asyncio.Future[str],
    incoming: MemoryObjectSendStream[SessionMessage],
) -> None:
    """Pass on messages until the stream ends."""
    events = _Events(reader.max_bytes)
    with contextlib.suppress(httpx2.TransportError, httpx2.StreamError, anyio.BrokenResourceError):
        async with incoming:
            async for chunk in response.aiter_raw():
                for event in events.feed(chunk):
                    if event.name == "endpoint" and not endpoint.done():
                        url = str(response.request.url)
                        found = urllib.parse.urljoin(url, event.data.decode("utf-8", "replace").strip())
                        if _origin(found) != _origin(url):
                            raise ValueError(f"the endpoint {found} is not on the server of the URL")
                        endpoint.set_result(found)
                    elif event.name == "message":
                        for message in event.read(reader, None):
                            await incoming.send(as_session_message(message))


async def _send(
    client: httpx2.AsyncClient,
    reader: MessageReader,
    url: str,
    outgoing: MemoryObjectReceiveStream[SessionMessage],
    incoming: MemoryObjectSendStream[SessionMessage],
) -> None:
    """Post messages in their order; a request that the server refuses gets an error at once."""
    async with outgoing:
        async for item in outgoing:
            reader.sent(item.message)
            why = ""
            try:
                data = item.message.model_dump(by_alias=True, mode="json", exclude_unset=True)
                async with client.stream("POST", url, json=data) as response:
                    if response.status_code >= 300:
                        why = f"responded with {response.status_code}"
            except httpx2.HTTPError as error:
                why = f"did not take the request: {error or type(error).__name__}"
            if why and isinstance(item.message, JSONRPCRequest):
                with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    for message in reader.no_response(item.message.id, why):
                        await incoming.send(as_session_message(message))


@dataclass(slots=True)
class _Event:
    """A server-sent event: its name, its data, which may be too long, and its other lines."""

    name: str = "message"
    data: bytearray = field(default_factory=bytearray)
    long: TooLong | None = None
    others: list[bytes] = field(default_factory=list[bytes])

    def read(self, reader: MessageReader, wanted: Number | None) -> list[dict[str, Any]]:
        """Return the messages of the event."""
        return (
            reader.read(bytes(self.data), wanted) if self.long is None else reader.too_long(self.long, wanted)
        )


class _Events:
    """Splits a stream into server-sent events."""

    def __init__(self, max_bytes: int) -> None:
        self._lines = Lines(max_bytes)
        self._max_bytes = max_bytes
        self._carry = b""
        self._event: _Event | None = None

    def feed(self, chunk: bytes) -> Iterator[_Event]:
        """Add data, and return the events that it completes."""
        chunk = self._carry + chunk
        self._carry = b"\r" if chunk.endswith(b"\r") else b""
        chunk = chunk.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        for line in self._lines.feed(chunk):
            if line:
                self._add(line)
            elif self._event is not None:
                event, self._event = self._event, None
                yield event

    def _add(self, line: bytes | TooLong) -> None:
        event = self._event = self._event or _Event()
        if isinstance(line, TooLong):
            event.long = event.long or line
            return
        name, _, value = line.removeprefix(b"\xef\xbb\xbf").partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data" and len(event.data) + len(value) > self._max_bytes:
            whole = bytes(event.data + value)
            event.long = event.long or TooLong(whole[:ENDS], whole[-ENDS:], len(whole))
            event.data.clear()
        elif name == b"data":
            event.data += value + b"\n"
        elif name == b"event":
            event.name = value.decode("utf-8", "replace") or "message"
        elif name in (b"id", b"retry"):
            event.others.append(line)


class _Bounded(httpx2.AsyncByteStream):
    """A body that raises an error after `most` bytes, or at once if it is compressed."""

    def __init__(self, stream: Any, most: int, *, is_packed: bool) -> None:
        self._stream, self._most, self._is_packed = stream, most, is_packed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._is_packed:
            raise httpx2.StreamError(_PACKED)
        size = 0
        async for data in self._stream:
            size += len(data)
            if size > self._most:
                raise httpx2.StreamError(too_large(None, self._most))
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()


class _TicketStream(_Bounded):
    """A stream of events with tickets in place of the messages of a response."""

    def __init__(
        self, stream: Any, reader: MessageReader, wanted: Number | None, *, is_json: bool, is_packed: bool
    ) -> None:
        super().__init__(stream, reader.max_bytes, is_packed=is_packed)
        self._reader, self._wanted, self._is_json = reader, wanted, is_json

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the events one by one, and an error if they have no answer and do not go on elsewhere."""
        is_done = self._wanted is None
        async with contextlib.aclosing(self._found()) as events:
            async for event in events:
                messages = event.read(self._reader, self._wanted) if event.name == "message" else []
                can_resume = any(line.startswith(b"id") for line in event.others)
                is_done = is_done or can_resume or any("method" not in message for message in messages)
                data = [self._reader.tickets.issue(message) for message in messages] or [b""]
                for each in data if messages or event.others else ():
                    yield b"\n".join([b"event: message", *event.others, b"data: " + each, b"\n"])
        if not is_done and self._wanted is not None:
            why = _PACKED if self._is_packed else "sent a response without an answer to the request"
            for message in self._reader.no_response(self._wanted, why):
                yield b"data: " + self._reader.tickets.issue(message) + b"\n\n"

    async def _found(self) -> AsyncGenerator[_Event]:
        if self._is_packed:
            return
        if self._is_json:
            body = bytearray()
            async for data in self._stream:
                body += data
                if len(body) > self._most:
                    yield _Event(long=TooLong(bytes(body[:ENDS]), b"", None))
                    return
            yield _Event(data=body)
            return
        events = _Events(self._most)
        async for data in self._stream:
            for event in events.feed(data):
                yield event


def _kind(response: httpx2.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_packed(response: httpx2.Response) -> bool:
    return response.headers.get("content-encoding", "identity").lower() != "identity"


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


def _client(config: MCPServerConfig, hooks: list[Any]) -> httpx2.AsyncClient:
    headers = {"Accept-Encoding": "identity", **(config.headers or {})}
    if config.auth_token:
        headers["Authorization"] = f"Bearer {config.auth_token}"
    return httpx2.AsyncClient(
        headers=headers,
        # No time limit for reads: a stream is silent while a model thinks, and calls have their own limits.
        timeout=httpx2.Timeout(CONNECT_S, read=None, pool=None),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100),
        trust_env=config.trust_env,
        event_hooks={"response": hooks},
    )
