"""Why a server does not do what it is asked to; each has a status of HTTP."""

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
    """A request that is not served; the message is for whoever sent it."""

    status: ClassVar[int] = 422

    @property
    def headers(self) -> dict[str, str]:
        """What the answer has besides."""
        return {}


class BadRequest(RequestRefused):
    """A request that asks for what cannot be."""


class Forbidden(RequestRefused):
    """A request that comes from where none are taken."""

    status: ClassVar[int] = 403


class UnsupportedMediaType(RequestRefused):
    """A body of a kind that is not taken."""

    status: ClassVar[int] = 415


class Unauthorized(RequestRefused):
    """A request without the token."""

    status: ClassVar[int] = 401

    @property
    def headers(self) -> dict[str, str]:
        """Say what is needed."""
        return {"WWW-Authenticate": "Bearer"}


class Overloaded(RequestRefused):
    """More is asked than can wait. retry_after_s: when it is worth asking again, in whole seconds."""

    status: ClassVar[int] = 429

    def __init__(self, retry_after_s: int, what: str = "too many runs are waiting") -> None:
        super().__init__(f"{what}; ask again in {retry_after_s} s")
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Say when."""
        return {"Retry-After": str(self.retry_after_s)}


_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\s:@/\[\]]+))(?P<port>:\d*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use a server. Pages in a browser may not, whatever is set here.

    A page can send requests to servers on the machine of its reader. A browser says so in `Origin` and
    `Sec-Fetch-Site`, and does not send JSON to another site that has not allowed it. A page whose own name
    was bound to the address of the server later on ("DNS rebinding") is told by that name in `Host`.

    Args:
        token: What requests have to send as `Authorization: Bearer …`; None: nothing.
        hosts: Names and addresses that `Host` may have besides those of loopback, without a port; None: any.

    Raises:
        ValueError: If the token or a host cannot be one.
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
                    f"{host!r} is no allowed host; expected a name or an address, without a port"
                )

    def check(self, headers: Mapping[str, Sequence[str]], *, needs_token: bool) -> None:
        """Check the headers of a request.

        Args:
            headers: Values of headers by their names in small letters.
            needs_token: Whether this request has to send the token, if there is one.

        Raises:
            Forbidden: If it comes from a web page, or is meant for another host.
            Unauthorized: If it does not have the token.
        """
        host = _only(headers, "host")
        if not self._is_served(host):
            raise Forbidden(
                f"no requests to the host {host[:200]!r} are served here; ask localhost, or allow that host "
                "when the server starts (--allowed-host)"
            )
        for origin in headers.get("origin", ()):
            # Where any host is served, the name of a page may have been bound to this address.
            if self.hosts is None or origin not in (f"http://{host}", f"https://{host}"):
                raise Forbidden("requests of web pages are not served")
        if any(site.lower() not in ("same-origin", "none") for site in headers.get("sec-fetch-site", ())):
            raise Forbidden("requests of web pages are not served")
        if needs_token and self.token is not None:
            scheme, _, given = _only(headers, "authorization").partition(" ")
            is_right = hmac.compare_digest(given.strip().encode(), self.token.encode())
            if not (is_right and scheme.lower() == "bearer"):
                raise Unauthorized("a token is needed: send the header Authorization: Bearer …")

    def _is_served(self, host: str) -> bool:
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return False
        if self.hosts is None:
            return True
        name = found["v6"] or found["name"]
        return is_loopback(name) or name in {known.lower().strip("[]") for known in self.hosts}


def is_loopback(name: str) -> bool:
    """Return whether a name or an address always means the machine that asks."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _only(headers: Mapping[str, Sequence[str]], name: str) -> str:
    """Return the value of a header that is there once, or ""."""
    values = headers.get(name, ())
    return values[0] if len(values) == 1 else ""


_NEWEST = 0.1
"""How much the latest run counts in the mean."""


class RequestQueue:
    """At most `max_concurrency` runs at once, first come, first served, and at most `max_queue` that wait."""

    def __init__(self, *, max_concurrency: int, max_queue: int) -> None:
        if max_concurrency < 1 or max_queue < 0:
            raise ValueError(
                f"max_concurrency is 1 or more, max_queue 0 or more; got {max_concurrency}, {max_queue}"
            )
        self.max_concurrency, self.max_queue = max_concurrency, max_queue
        self._inside = self._running = 0
        self._places = asyncio.Semaphore(max_concurrency)
        self._mean_s: float | None = None

    @property
    def waiting(self) -> int:
        """How many wait for a place, or send their bodies still."""
        return self._inside - self._running

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """Join those that run or wait, before a body is read.

        Raises:
            Overloaded: too many wait already.
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
        """Wait for a place, and hold it; for those that have entered."""
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
        """Say when the queue will be shorter, going by how long the latest runs took."""
        return max(1, math.ceil((self._mean_s or 0.0) * (self.waiting + 1) / self.max_concurrency))

    def note(self, seconds: float) -> None:
        """Take note of how long a run took."""
        old = seconds if self._mean_s is None else self._mean_s
        self._mean_s = old + _NEWEST * (seconds - old)


class MemoryBudget:
    """The bytes that all requests together may take."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0

    @contextlib.contextmanager
    def hold(self, count: int) -> Generator[Callable[[int], None]]:
        """Take so many bytes; yield what gives all but so many of them back.

        Raises:
            Overloaded: others have taken too much of them.
        """
        if self.held + count > self.max_bytes:
            raise Overloaded(1, f"requests that are under way take {self.held} of {self.max_bytes} bytes")
        self.held += count

        def keep(rest: int) -> None:
            nonlocal count
            self.held -= count - rest
            count = rest

        try:
            yield keep
        finally:
            self.held -= count
