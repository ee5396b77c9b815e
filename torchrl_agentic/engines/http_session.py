"""`HTTPSession`: the requests of an engine to its server, over aiohttp, with their retries."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import httpx
from pydantic_core import to_json

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.per_loop import PerLoop
from torchrl_agentic.tools.service import BUSY, Patience, ServiceError, pause_s, retry_after_s

if TYPE_CHECKING:
    import aiohttp

IDLE_S = 4.0
"""Seconds after which an idle connection is closed; uvicorn, which serves vLLM and SGLang, waits for 5."""
SHOWN = 300
"""Number of characters of a response that an error shows."""
_LATE = 408
_CHECK_S = 10.0


class HTTPSession:
    """Connections to a server, as many as there are requests, kept open between them; a pool per event loop.

    aiohttp parses responses in C, and a request takes the same time with any number of connections.
    Proxies and credentials of the environment are ignored, redirects are not followed, and cookies are not
    kept: a cookie of a load balancer would send all trajectories to one server.

    Args:
        url: URL of the server, without a path.
        headers: Headers of each request.
        timeout: Time limit for one try of a request, in seconds; None: no limit.
        patience: How often to try again after transient failures, and with which pauses.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], *, timeout: float | None, patience: Patience
    ) -> None:
        import aiohttp  # now, so that the first request does not wait for it

        self._aiohttp = aiohttp
        self._errors = aiohttp.ClientError, ConnectionError  # aiohttp does not wrap all of the latter
        self._url, self._headers = url, dict(headers)
        self._timeout, self._patience = timeout, patience
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

    def _request(
        self, method: str, path: str, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Make a request; a connection whose response was not read to its end is closed."""
        session = self._sessions.get(self._open)
        return session.request(method, self._url + path, allow_redirects=False, **options)

    async def get(self, path: str) -> tuple[int, str]:
        """Return status and body of the response to a quick question.

        Args:
            path: Path, with its query.

        Raises:
            InfrastructureError: If the server cannot be reached, or does not answer in time.
        """
        try:
            async with asyncio.timeout(_CHECK_S), self._request("GET", path) as response:
                return response.status, (await response.read()).decode("utf-8", "replace")
        except (TimeoutError, *self._errors) as error:
            what = str(error) or type(error).__name__
            raise InfrastructureError(f"{self._url} cannot be reached: {what}") from error

    @contextlib.asynccontextmanager
    async def post(
        self, path: str, payload: JSON, headers: Mapping[str, str]
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Post JSON, and yield the response.

        Args:
            path: Path, with its query.
            payload: The JSON.
            headers: Additional headers.

        Raises:
            ServiceError: If the server cannot be reached or fails, also while the response is read.
            ValueError: If it refuses the request.
        """
        body = to_json(payload)
        headers = {"Content-Type": "application/json", **headers}
        try:
            async with self._request("POST", path, data=body, headers=headers) as response:
                if response.status >= 300:
                    text = (await response.read()).decode("utf-8", "replace")[:SHOWN]
                    self._raise_for(path, response, text)
                yield response
        except self._errors as error:
            what = f"{self._url} cannot be reached: {str(error) or type(error).__name__}"
            raise ServiceError(what, "connection", is_transient=True) from error

    def _raise_for(self, path: str, response: aiohttp.ClientResponse, text: str) -> None:
        status = response.status
        what = f"{self._url}{path} responded with {status}: {text}"
        if status >= 500 or status in BUSY or status == _LATE:
            wait = retry_after_s(response.headers.get("retry-after"), time.time())
            raise ServiceError(what, "server", is_transient=True, retry_after=wait, status=status)
        raise ValueError(what)

    async def with_retries(
        self, attempt: Callable[[], Awaitable[None]], may_retry: Callable[[], bool]
    ) -> None:
        """Run an attempt until it succeeds, or fails for good.

        Args:
            attempt: Makes the request once; it raises ServiceError if that fails.
            may_retry: Returns whether it may be made again.

        Raises:
            ServiceError: That of the last attempt.
        """
        began = time.monotonic()
        for tries in itertools.count(1):
            bound = asyncio.timeout(self._timeout)
            try:
                async with bound:
                    await attempt()
                    return
            except TimeoutError:
                if not bound.expired():
                    raise
                what = f"{self._url} did not answer within {self._timeout:g} s"
                last = ServiceError(what, "timeout", is_transient=True)
            except ServiceError as error:
                last = error
            pause = pause_s(tries, last, self._patience)
            if pause is None or tries >= self._patience.tries or not may_retry():
                raise last
            if time.monotonic() + pause > began + self._patience.deadline_s:
                raise last
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        if (session := self._sessions.pop()) is not None:
            await session.close()
