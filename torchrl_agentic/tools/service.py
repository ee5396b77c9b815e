"""A client of one HTTP service: pooled connections, one limiter, retries where they help, one deadline."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import functools
import json
import random
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx
import stamina

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.limits import CircuitOpen, ClusterRateLimiter, Limiter, RateLimiter
from torchrl_agentic.limits.adapt import JITTER, MAX_PAUSE_S
from torchrl_agentic.messages import JSON

BUSY = frozenset({429, 503})
"""What a service answers that has too much to do."""
WORTH_RETRYING = BUSY | {502, 504}
MAX_ANSWER_BYTES = 64 << 20
BREAK_AFTER, BREAK_S = 10, 10.0
_SHOWN = 300


class ServiceError(InfrastructureError):
    """A service did not do what it was asked to.

    reason: one word for programs. is_transient: it may next time; retry_after: seconds that it asked for.
    status: of HTTP, if there was an answer.
    """

    def __init__(
        self,
        message: str,
        reason: str,
        *,
        is_transient: bool = False,
        retry_after: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.is_transient = is_transient
        self.retry_after = retry_after
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return (_remade, (str(self), self.reason, self.is_transient, self.retry_after, self.status))


def _remade(
    text: str, reason: str, is_transient: bool, retry_after: float | None, status: int | None
) -> ServiceError:
    return ServiceError(text, reason, is_transient=is_transient, retry_after=retry_after, status=status)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a service answered.

    status: of HTTP, below 500. data: the JSON; where there was none, the text. queue_s: seconds spent waiting
    for the limiter and between tries; run_s: in the last try. tries: how many it took.
    """

    status: int
    data: JSON
    queue_s: float
    run_s: float
    tries: int


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to go on trying.

    deadline_s: for all of it, with the waiting. tries: how many at most. first_s, longest_s: the pause after
    the first try, which doubles, and its bound; each is longer by a random part. Where a service says how
    long to wait, that counts.
    """

    deadline_s: float = 300.0
    tries: int = 6
    first_s: float = 0.2
    longest_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuse what means nothing.

        Raises:
            ValueError: a number that is not above 0.
        """
        for name in ("deadline_s", "tries", "first_s", "longest_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0; got {getattr(self, name)}")


class ServiceClient:
    """Posts JSON to one service.

    limiter: holds the slot of each try, not between tries; it is told what came of it. max_connections: of
    this process. trust_env: whether proxies of the environment are used. An async context manager; it may be
    used from several event loops.
    """

    def __init__(
        self,
        name: str,
        limiter: Limiter | None = None,
        *,
        max_connections: int = 10,
        patience: Patience | None = None,
        headers: Mapping[str, str] | None = None,
        trust_env: bool = False,
    ) -> None:
        self.name = name
        self.limiter = limiter
        self.patience = patience or Patience()
        self._connections = RateLimiter(max_concurrent=max_connections)
        self._options: dict[str, Any] = {
            "limits": httpx.Limits(
                max_connections=max_connections, max_keepalive_connections=max_connections
            ),
            "headers": dict(headers or {}),
            "trust_env": trust_env,
        }
        self._clients: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}

    async def post(
        self,
        url: str,
        payload: JSON,
        *,
        timeout: float,
        check: Callable[[JSON], None] | None = None,
    ) -> Answer:
        """Post JSON, again where that may help, until there is an answer.

        timeout: seconds for one try. check: raises a `ServiceError` for an answer that is none.

        Raises:
            ServiceError: there was no answer, or none below 500, in all tries and all the time.
            CircuitOpen: the service has failed so often that it is not tried now.
        """
        began, tries = time.monotonic(), 0
        patience, last = self.patience, ""
        attempts = stamina.retry_context(
            on=functools.partial(_backoff, began + patience.deadline_s),
            attempts=patience.tries,
            timeout=patience.deadline_s,
            wait_initial=patience.first_s,
            wait_max=patience.longest_s,
            wait_jitter=patience.first_s,
        )
        try:
            async with asyncio.timeout(patience.deadline_s):
                async for attempt in attempts:
                    with attempt:
                        tries += 1
                        try:
                            started, response = await self._try(url, payload, timeout, check)
                        except ServiceError as error:
                            last = f"; last: {error}"
                            raise
                        now = time.monotonic()
                        status, data = response
                        return Answer(status, data, started - began, now - started, tries)
        except TimeoutError:
            text = f"{self.name} gave no answer within {patience.deadline_s:g} s and {tries} tries{last}"
            raise ServiceError(text, "deadline") from None
        raise AssertionError("unreachable: the last try returns or raises")

    async def _try(
        self, url: str, payload: JSON, timeout: float, check: Callable[[JSON], None] | None
    ) -> tuple[float, tuple[int, JSON]]:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._connections.slot())
            if self.limiter is not None:
                await stack.enter_async_context(self.limiter.slot())
            started = time.monotonic()
            try:
                found = await self._send(url, payload, timeout)
                if check is not None and found[0] < 400:
                    check(found[1])
            except ServiceError as error:
                if self.limiter is not None:
                    # One that answers too late has too much to do as well; one that says that it failed is
                    # there.
                    if error.status in BUSY or error.reason == "timeout":
                        self.limiter.overloaded(error.retry_after)
                    elif error.reason != "sandbox_error":
                        self.limiter.failed()
                raise
            if self.limiter is not None:
                self.limiter.succeeded()
            return started, found

    async def _send(self, url: str, payload: JSON, timeout: float) -> tuple[int, JSON]:
        try:
            async with asyncio.timeout(timeout):
                async with self._client().stream("POST", url, json=payload, timeout=timeout) as response:
                    body = bytearray()
                    async for chunk in response.aiter_bytes():
                        body += chunk
                        if len(body) > MAX_ANSWER_BYTES:
                            raise self._error("sent more than we take", "too_large")
        except (TimeoutError, httpx.TimeoutException):
            raise self._error(f"did not answer within {timeout:g} s", "timeout", is_transient=True) from None
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise self._error(f"cannot be reached: {what}", "connection", is_transient=True) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._error(f"cannot be asked: {error}", "request") from error
        return response.status_code, self._read(response, bytes(body))

    def _read(self, response: httpx.Response, body: bytes) -> JSON:
        text = body.decode("utf-8", "replace")
        status = response.status_code
        if status >= 500 or status in BUSY:
            raise self._error(
                f"answered {status}: {text[:_SHOWN]}",
                "busy" if status in BUSY else "server",
                is_transient=status in WORTH_RETRYING,
                retry_after=retry_after_s(response.headers.get("retry-after"), time.time()),
                status=status,
            )
        if 300 <= status < 400:
            where = response.headers.get("location", "elsewhere")
            raise self._error(f"answered {status}, and wants to be asked at {where}", "moved", status=status)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            if status >= 400:
                return text
            raise self._error(f"answered what is no JSON: {text[:_SHOWN]!r}", "garbage") from None

    def _error(self, text: str, reason: str, **more: Any) -> ServiceError:
        return ServiceError(f"{self.name} {text}", reason, **more)

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients = {one: client for one, client in self._clients.items() if not one.is_closed()}
            self._clients[loop] = httpx.AsyncClient(**self._options)
        return self._clients[loop]

    async def close(self) -> None:
        """Close the connections of this event loop; a later call opens new ones."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}}  # connections stay where they are


def _backoff(until: float, error: Exception) -> bool | float:
    """Say whether, and if somebody said so when, to try again."""
    if isinstance(error, CircuitOpen):
        in_time = time.monotonic() + error.retry_after < until
        return _longer(error.retry_after) if in_time else False
    if not isinstance(error, ServiceError) or not error.is_transient:
        return False
    if error.retry_after is None:
        return True
    return _longer(min(error.retry_after, MAX_PAUSE_S))


def _longer(seconds: float) -> float:
    return seconds * (1 + JITTER * random.random())


def retry_after_s(header: str | None, now: float) -> float | None:
    """Read a Retry-After header: seconds, or a date; None where it is neither, or in the past."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return seconds if seconds > 0 else None  # NaN is not


async def shared_limiter(kind: str, url: str, rate_limit: int | None, is_global: bool) -> Limiter | None:
    """Make the limiter of a service: for all processes that name it, or for this one; None: no limit."""
    if rate_limit is None:
        return None
    if is_global:
        parts = urllib.parse.urlsplit(url)
        name = f"{kind} {parts._replace(netloc=parts.netloc.rpartition('@')[2]).geturl()}"
        return await asyncio.to_thread(  # it asks for its first lease
            ClusterRateLimiter,
            name,
            max_concurrent=rate_limit,
            break_after=BREAK_AFTER,
            break_seconds=BREAK_S,
        )
    return RateLimiter(max_concurrent=rate_limit, break_after=BREAK_AFTER, break_seconds=BREAK_S)
