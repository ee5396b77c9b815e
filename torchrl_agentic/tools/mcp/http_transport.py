"""Connect to running MCP servers over streamable HTTP, or over SSE for older servers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from torchrl_agentic.tools.mcp.server_config import TOO_MANY, MCPServerConfig, has_too_many_values, too_large

CONNECT_S = 10.0
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")


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
    config: MCPServerConfig, answers: Answers, max_result_bytes: int
) -> AsyncGenerator[Any]:
    """Connect over streamable HTTP.

    Args:
        config: The server.
        answers: Gets the status of each response.
        max_result_bytes: Most bytes of a response.

    Returns:
        An async context manager that yields the streams of the connection.
    """
    async with (
        _client(config, answers, max_result_bytes) as client,
        streamable_http_client(
            config.url or "", http_client=client, max_sse_event_size=max_result_bytes
        ) as streams,
    ):
        yield streams


@contextlib.asynccontextmanager
async def sse(config: MCPServerConfig, answers: Answers, max_result_bytes: int) -> AsyncGenerator[Any]:
    """Connect over SSE, where the SDK limits events to 1 MiB.

    Args:
        config: The server.
        answers: Gets the status of each response.
        max_result_bytes: Most bytes of a response.

    Returns:
        An async context manager that yields the streams of the connection.
    """

    def factory(*_: Any, **__: Any) -> httpx2.AsyncClient:
        return _client(config, answers, max_result_bytes)

    async with sse_client(config.url or "", httpx_client_factory=factory) as streams:
        yield streams


class _Bounded(httpx2.AsyncByteStream):
    """A body that raises an error after `most` bytes, or if it is JSON of too many values."""

    def __init__(self, stream: Any, most: int, *, is_packed: bool) -> None:
        self._stream, self._most, self._is_packed = stream, most, is_packed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._is_packed:
            raise httpx2.StreamError("the response is compressed, although the request did not allow it")
        body = bytearray()
        async for data in self._stream:
            body += data
            if len(body) > self._most:
                raise httpx2.StreamError(too_large(None, self._most))
        if has_too_many_values(body):
            raise httpx2.StreamError(TOO_MANY)
        yield bytes(body)

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Events(httpx2.AsyncByteStream):
    """A stream of events that raises an error before one whose JSON has too many values is complete."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        event = bytearray()
        async for data in self._stream:
            start = max(0, len(event) - 3)
            event += data
            while (end := _EVENT_END.search(event, start)) is not None:
                if has_too_many_values(event[: end.end()]):
                    raise httpx2.SSEError(TOO_MANY)
                del event[: end.end()]
                start = 0
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()


def _client(config: MCPServerConfig, answers: Answers, max_result_bytes: int) -> httpx2.AsyncClient:
    async def bound(response: httpx2.Response) -> None:
        """Bound a body that is read as a whole; the SDK bounds the bytes of each event of a stream."""
        if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            response.stream = _Events(response.stream)
        else:
            is_packed = response.headers.get("content-encoding", "identity").lower() != "identity"
            response.stream = _Bounded(response.stream, max_result_bytes, is_packed=is_packed)

    headers = {"Accept-Encoding": "identity", **(config.headers or {})}
    if config.auth_token:
        headers["Authorization"] = f"Bearer {config.auth_token}"
    return httpx2.AsyncClient(
        headers=headers,
        # No time limit for reads: a stream is silent while a model thinks, and calls have their own limits.
        timeout=httpx2.Timeout(CONNECT_S, read=None, pool=None),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100),
        trust_env=config.trust_env,
        event_hooks={"response": [answers.note, bound]},
    )
