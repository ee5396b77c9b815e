"""`HTTPSession`: the connections of an engine to its server, over aiohttp."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx

from torchrl_agentic.tools.per_loop import PerLoop

if TYPE_CHECKING:
    import aiohttp

IDLE_S = 4.0
"""Seconds after which an idle connection is closed; uvicorn, which serves vLLM and SGLang, waits for 5."""


class HTTPSession:
    """Connections to a server, as many as there are requests, kept open between them; a pool per event loop.

    aiohttp parses responses in C, and a request takes the same time with any number of connections.
    Proxies and credentials of the environment are ignored, redirects are not followed, and cookies are not
    kept: a cookie of a load balancer would send all trajectories to one server. A request has no time limit.

    Args:
        url: URL of the server, without a path.
        headers: Headers of each request.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        import aiohttp  # now, so that the first request does not wait for it

        self._aiohttp = aiohttp
        self._url, self._headers = url, dict(headers)
        self._certificates = httpx.create_ssl_context(trust_env=False) if url.startswith("https:") else True
        self._sessions: PerLoop[aiohttp.ClientSession] = PerLoop()

    def _open(self) -> aiohttp.ClientSession:
        aiohttp = self._aiohttp
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ssl=self._certificates),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(),  # callers bound the whole request
        )

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Raised if the server cannot be reached, or the connection breaks, also while a response is read."""
        return self._aiohttp.ClientError, ConnectionError  # aiohttp does not wrap all of the latter

    def request(
        self, method: str, path: str, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Make a request; a connection whose response was not read to its end is closed.

        Args:
            method: Method, in capital letters.
            path: Path, with its query.
            options: Further arguments of `aiohttp.ClientSession.request`.

        Returns:
            The context of the response.

        Raises:
            Exception: One of `errors`, also while the response is read.
        """
        session = self._sessions.get(self._open)
        return session.request(method, self._url + path, allow_redirects=False, **options)

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        if (session := self._sessions.pop()) is not None:
            await session.close()
