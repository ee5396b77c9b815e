"""The HTTP client below a tool: connections that are checked when they are made, and no other state."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from typing import Any, cast

import httpcore
import httpx

from torchrl_agentic.tools.web.backend import CountedStream, PinnedBackend
from torchrl_agentic.tools.web.page import PageReader

KEEP_ALIVE_S = 2.0
"""How long an idle connection is kept; servers close theirs after 5 s and more."""
MAX_IDLE = 20


class _Stream(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._response.aiter_stream():
            yield chunk

    async def aclose(self) -> None:
        if _has_left_over(self._response):
            cast("CountedStream", self._response.extensions["network_stream"]).spoiled = True
        await self._response.aclose()


def _has_left_over(response: httpcore.Response) -> bool:
    """Whether a server has sent more than its answer, which would be read as the answer to the next request.

    httpcore does not say, so this looks inside; where that has changed no connection is used twice.
    """
    try:
        connection = cast("Any", response.stream)._stream._connection
        return bool(connection._h11_state.trailing_data[0])
    except AttributeError:
        return True


class PinnedTransport(httpx.AsyncBaseTransport):
    """Sends requests over connections of a `PinnedBackend`. The exceptions are those of httpcore.

    It is used without an `httpx.AsyncClient` around it, which would keep cookies from one trajectory to
    another and read where redirects lead before we do.
    """

    def __init__(self, backend: PinnedBackend, ssl_context: ssl.SSLContext) -> None:
        # How many there may be at once is for a rate limiter to say; waiting here would count as slowness.
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=None,
            max_keepalive_connections=MAX_IDLE,
            keepalive_expiry=KEEP_ALIVE_S,
            network_backend=backend,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; its body and that of the answer are streams."""
        assert isinstance(request.stream, httpx.AsyncByteStream)
        url = request.url
        response = await self._pool.handle_async_request(
            httpcore.Request(
                method=request.method,
                url=httpcore.URL(
                    scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
                ),
                headers=request.headers.raw,
                content=request.stream,
            )
        )
        return httpx.Response(response.status, headers=response.headers, stream=_Stream(response))

    async def aclose(self) -> None:
        """Close what is idle, and break off what is not."""
        await self._pool.aclose()


class Client:
    """What a tool holds on one event loop. Calls of all trajectories share connections, and nothing else."""

    def __init__(self, backend: PinnedBackend, ssl_context: ssl.SSLContext) -> None:
        self.pages = PageReader()
        self.transport = PinnedTransport(backend, ssl_context)

    async def aclose(self) -> None:
        """Close the connections."""
        await self.transport.aclose()


def make_ssl_context(ca_file: str | None) -> ssl.SSLContext:
    """Make what checks certificates: those of certifi, or those of a file; nothing from the environment.

    Raises:
        OSError: the file cannot be read.
    """
    return httpx.create_ssl_context(
        verify=True if ca_file is None else ssl.create_default_context(cafile=ca_file), trust_env=False
    )
