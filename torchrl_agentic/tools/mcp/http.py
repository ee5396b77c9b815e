"""Servers that run elsewhere: MCP over streamable HTTP, or over SSE as older servers have it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx2
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from torchrl_agentic.tools.mcp.config import MCPServerConfig

CONNECT_S = 10.0


@dataclass(slots=True)
class Answers:
    """What the server answered last, of HTTP.

    forgotten: it knows our session no more.
    """

    status: int | None = None
    forgotten: bool = False

    async def note(self, response: httpx2.Response) -> None:
        """Take note of an answer."""
        self.status = response.status_code
        if response.status_code == 404 and "mcp-session-id" in response.request.headers:
            self.forgotten = True

    @property
    def is_refusal(self) -> bool:
        """Whether it may be a server of the other transport, which knows no such request."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in (401, 403, 429)

    def text(self) -> str:
        """Say it, where it was an error."""
        return "" if self.status is None or self.status < 400 else f"it answered {self.status}"


@contextlib.asynccontextmanager
async def streamable_http(config: MCPServerConfig, answers: Answers) -> AsyncGenerator[Any]:
    """Speak over streamable HTTP."""
    async with (
        _client(config, answers) as client,
        streamable_http_client(config.url or "", http_client=client) as streams,
    ):
        yield streams


@contextlib.asynccontextmanager
async def sse(config: MCPServerConfig, answers: Answers) -> AsyncGenerator[Any]:
    """Speak over SSE."""

    def factory(*_: Any, **__: Any) -> httpx2.AsyncClient:
        return _client(config, answers)

    async with sse_client(config.url or "", httpx_client_factory=factory) as streams:
        yield streams


def _client(config: MCPServerConfig, answers: Answers) -> httpx2.AsyncClient:
    headers = dict(config.headers or {})
    if config.auth_token:
        headers["Authorization"] = f"Bearer {config.auth_token}"
    return httpx2.AsyncClient(
        headers=headers,
        # No bound for reading: a stream is silent while a model thinks, and calls have bounds of their own.
        timeout=httpx2.Timeout(CONNECT_S, read=None, pool=None),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100),
        trust_env=config.trust_env,
        event_hooks={"response": [answers.note]},
    )
