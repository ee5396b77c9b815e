"""Which requests a server accepts: tokens, hosts, queue and memory; each refusal has an HTTP status."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torchrl_agentic.tools.service import check_token


class RequestRefused(Exception):
    """A request that is refused. The message is sent to the client."""

    status: ClassVar[int] = 422

    @property
    def headers(self) -> dict[str, str]:
        """Additional headers of the response."""
        return {}


class BadRequest(RequestRefused):
    """A request that cannot be carried out."""


class Forbidden(RequestRefused):
    """A request from a source that is not accepted."""

    status: ClassVar[int] = 403


class UnsupportedMediaType(RequestRefused):
    """A body of a media type that is not accepted."""

    status: ClassVar[int] = 415


class Unauthorized(RequestRefused):
    """A request without the token."""

    status: ClassVar[int] = 401

    @property
    def headers(self) -> dict[str, str]:
        """The authentication scheme to use."""
        return {"WWW-Authenticate": "Bearer"}


class Overloaded(RequestRefused):
    """A request beyond the capacity of the server.

    Args:
        retry_after_s: Seconds until a retry makes sense.
        what: What the server lacks.
    """

    status: ClassVar[int] = 429

    def __init__(self, retry_after_s: int, what: str = "too many runs are waiting") -> None:
        super().__init__(f"{what}; retry in {retry_after_s} s")
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """When to retry."""
        return {"Retry-After": str(self.retry_after_s)}


_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\s:@/\[\]]+))(?P<port>:\d*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use a server. Web pages in a browser may not in any case.

    A page can send requests to servers on the machine of its reader. A browser marks them with `Origin` and
    `Sec-Fetch-Site`, and does not send JSON to another site that has not allowed it. A page whose host name
    was later bound to the address of the server ("DNS rebinding") is recognised by that name in `Host`.

    Args:
        token: Token that requests must send as `Authorization: Bearer …`; None for no token.
        hosts: Names and addresses without a port that `Host` may have besides those of loopback; None for
            any.

    Raises:
        ValueError: If the token or a host is invalid.
    """

    token: str | None = field(default=None, repr=False)
    hosts: Sequence[str] | None = ()

    def __post_init__(self) -> None:
        if self.token is not None:
            check_token(self.token)
        for host in self.hosts or ():
            found = _HOST.fullmatch(host.lower())
            if found is None or found["port"] is not None:
                raise ValueError(
                    f"{host!r} cannot be an allowed host; expected a name or an address, without a port"
                )

    def check(self, headers: Mapping[str, Sequence[str]], *, needs_token: bool) -> None:
        """Check the headers of a request.

        Args:
            headers: Values of headers by lower-case names.
            needs_token: True if this request must send the token, if there is one.

        Raises:
            Forbidden: If it comes from a web page, or is meant for another host.
            Unauthorized: If it does not have the token.
        """
        host = _only(headers, "host")
        if not self._is_served(host):
            raise Forbidden(
                f"requests to the host {host[:200]!r} are not accepted; use localhost, or start the server "
                "with --allowed-host for that host"
            )
        for origin in headers.get("origin", ()):
            # If any host is accepted, the name of a page may have been bound to this address.
            if self.hosts is None or origin not in (f"http://{host}", f"https://{host}"):
                raise Forbidden("requests of web pages are not accepted")
        if any(site.lower() not in ("same-origin", "none") for site in headers.get("sec-fetch-site", ())):
            raise Forbidden("requests of web pages are not accepted")
        if needs_token and self.token is not None:
            scheme, _, given = _only(headers, "authorization").partition(" ")
            is_right = hmac.compare_digest(given.strip().encode(), self.token.encode())
            if not (is_right and scheme.lower() == "bearer"):
                raise Unauthorized("a token is required: send the header Authorization: Bearer …")

    def _is_served(self, host: str) -> bool:
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return False
        if self.hosts is None:
            return True
        name = found["v6"] or found["name"]
        return is_loopback(name) or name in {known.lower().strip("[]") for known in self.hosts}


def is_loopback(name: str) -> bool:
    """Return whether a name or an address always means the machine of the client."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _only(headers: Mapping[str, Sequence[str]], name: str) -> str:
    """Return the value of a header that occurs once, otherwise ""."""
    values = headers.get(name, ())
    return values[0] if len(values) == 1 else ""


_NEWEST = 0.1
"""Weight of the latest run in the mean."""


class RequestQueue:
    """Runs a limited number of requests at once, in order of arrival, and keeps a limited number waiting.

    Args:
        max_concurrency: Maximum number of running requests.
        max_queue: Maximum number of waiting requests.

    Raises:
        ValueError: If `max_concurrency` is below 1 or `max_queue` below 0.
    """

    def __init__(self, *, max_concurrency: int, max_queue: int) -> None:
        if max_concurrency < 1 or max_queue < 0:
            raise ValueError(
                "max_concurrency must be at least 1 and max_queue at least 0; "
                f"got {max_concurrency}, {max_queue}"
            )
        self.max_concurrency, self.max_queue = max_concurrency, max_queue
        self._inside = self._running = 0
        self._places = asyncio.Semaphore(max_concurrency)
        self._mean_s: float | None = None

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a place, or are still sending their bodies."""
        return self._inside - self._running

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """Count the block as running or waiting; enter before a body is read.

        Raises:
            Overloaded: If too many requests wait already.
        """
        if self._inside >= self.max_concurrency + self.max_queue:
            raise Overloaded(self.retry_after_s())
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncGenerator[None]:
        """Wait for a place, and occupy it during the block. Requires `entered`."""
        await self._places.acquire()
        self._running += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self._running -= 1
            self._places.release()
            self.note(time.monotonic() - began)

    def retry_after_s(self) -> int:
        """Return the seconds until the queue is likely shorter, from the durations of the latest runs."""
        return max(1, math.ceil((self._mean_s or 0.0) * (self.waiting + 1) / self.max_concurrency))

    def note(self, seconds: float) -> None:
        """Record the duration of a run, in seconds."""
        old = seconds if self._mean_s is None else self._mean_s
        self._mean_s = old + _NEWEST * (seconds - old)


class MemoryBudget:
    """The memory that all requests together may use.

    Args:
        max_bytes: Maximum number of bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0

    @contextlib.contextmanager
    def hold(self, count: int) -> Generator[Callable[[int], None]]:
        """Reserve bytes during the block. Yield a function that reduces the reservation.

        Args:
            count: Number of bytes.

        Raises:
            Overloaded: If too many bytes are reserved already.
        """
        if self.held + count > self.max_bytes:
            raise Overloaded(1, f"current requests use {self.held} of {self.max_bytes} bytes")
        self.held += count

        def keep(rest: int) -> None:
            nonlocal count
            self.held -= count - rest
            count = rest

        try:
            yield keep
        finally:
            self.held -= count
