"""One call's way over the network: the request, its redirects, the body of what answers last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import httpcore
import httpx

from torchrl_agentic.errors import ToolError
from torchrl_agentic.schema import shorten
from torchrl_agentic.tools.web.backend import WireLimit, current
from torchrl_agentic.tools.web.body import ACCEPTED, Ended, inflater_for, read_body
from torchrl_agentic.tools.web.failure import explained
from torchrl_agentic.tools.web.policy import HostPolicy
from torchrl_agentic.tools.web.request import READING, Ask, redirected

Secrets: TypeAlias = Callable[[Ask], Mapping[str, str]]
"""The headers that go to the origin of a request and that the model does not know of."""

_NETWORK = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)
_CLOSED = (httpcore.ReadError, httpcore.WriteError, httpcore.RemoteProtocolError)
REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. redirects: the URLs before `url`. ended: how the body ended."""

    status: int
    url: str
    headers: httpx.Headers
    ended: Ended
    redirects: tuple[str, ...] = ()
    method: str = "GET"


async def exchange(
    transport: httpx.AsyncBaseTransport,
    ask: Ask,
    *,
    policy: HostPolicy,
    secrets: Secrets,
    max_redirects: int,
    max_bytes: int,
) -> Answer:
    """Send a request, follow where it is redirected, and read the body into `current`'s.

    Raises:
        ToolError: it may not go where it is redirected, or the network failed; the message says why.
        InfrastructureError: this machine cannot connect to anything.
    """
    redirects: list[str] = []
    while True:
        response = await _send(transport, ask, secrets)
        try:
            location = response.headers.get("location")
            if response.status_code not in REDIRECTS or location is None:
                ended = await _read(response, ask, max_bytes)
                url = str(ask.target.url)
                return Answer(
                    response.status_code, url, response.headers, ended, tuple(redirects), ask.method
                )
        finally:
            await response.aclose()
        redirects.append(str(ask.target.url))
        ask = _next(
            ask, response.status_code, location, policy, len(redirects) > max_redirects, max_redirects
        )


async def _send(transport: httpx.AsyncBaseTransport, ask: Ask, secrets: Secrets) -> httpx.Response:
    host, port = ask.target.host, ask.target.port
    progress = current.get()
    headers = {"accept": "*/*", "accept-encoding": ACCEPTED, **ask.headers, **secrets(ask)}
    while True:
        progress.doing, progress.connected = f"waiting for the answer of {host}", False
        try:
            request = httpx.Request(ask.method, ask.target.url, headers=headers, content=ask.content)
            return await transport.handle_async_request(request)
        except WireLimit:
            raise ToolError(f"{host}:{port} sends headers without end", {"reason": "not HTTP"}) from None
        except _NETWORK as error:
            # A connection that was kept may have been closed by the server in this moment: make another one.
            if not progress.connected and ask.method in READING and isinstance(error, _CLOSED):
                continue
            raise explained(error, host, port) from error


async def _read(response: httpx.Response, ask: Ask, max_bytes: int) -> Ended:
    progress = current.get()
    progress.doing = f"reading the answer of {ask.target.host}"
    # What has no body may still say how it would be compressed. It is read all the same, to its end, which
    # keeps the connection.
    bare = ask.method == "HEAD" or response.status_code in (204, 304)
    inflater = None if bare else inflater_for(response.headers.get("content-encoding", ""))
    try:
        return await read_body(response.aiter_raw(), inflater, max_bytes, progress.body)
    except _NETWORK:
        return Ended(problem="the connection broke off before the end")


def _next(ask: Ask, status: int, location: str, policy: HostPolicy, too_many: bool, most: int) -> Ask:
    """Check where a redirect leads, as strictly as what the model wrote."""
    origin = str(ask.target.url)
    shown = f"{shorten(origin, 200)} redirects to {shorten(location, 200)!a}"
    if too_many:
        raise ToolError(f"{shown}; it is not followed, {most} redirects are the most", {"reason": "redirect"})
    try:
        target = policy.target(str(ask.target.url.join(location)))
        return redirected(ask, status, target)
    except (httpx.InvalidURL, ValueError):
        raise ToolError(f"{shown}, which is no URL", {"reason": "redirect"}) from None
    except ToolError as error:
        raise ToolError(f"{shown}; that is not followed: {error}", {"reason": "redirect"}) from None
