"""`ServiceClient`: posts JSON to a service with retries, deadlines and limits; tokens in private files."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import functools
import math
import os
import random
import re
import stat
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.limits import CircuitOpen, ClusterRateLimiter, Limiter, RateLimiter
from torchrl_agentic.limits.backoff import backoff_pause_s
from torchrl_agentic.limits.token_bucket import JITTER, MAX_PAUSE_S
from torchrl_agentic.messages import JSON
from torchrl_agentic.text import read_json
from torchrl_agentic.tools.base import Clock, ToolContext
from torchrl_agentic.tools.per_loop import PerLoop

MIN_TOKEN = 16
"""Shortest token, in characters; a shorter one can be guessed."""
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/-]{{{MIN_TOKEN},}}=*", re.ASCII)
_MAKE = "python -c 'import secrets; print(secrets.token_urlsafe())'"


def check_token(token: str, where: str = "the token") -> str:
    """Return a token if it can be sent in a header and is long enough.

    Args:
        token: The token.
        where: Name of the token in the error message.

    Raises:
        ValueError: If it is too short or has other characters; the message does not contain the token.
    """
    if not _TOKEN.fullmatch(token):
        raise ValueError(
            f"{where} has {len(token)} characters; expected at least {MIN_TOKEN}, of letters, digits and "
            f"-._~+/; make one with: {_MAKE}"
        )
    return token


def read_token(path: str | Path) -> str:
    """Read the token in a file; space around it is left out.

    Args:
        path: The file. Only its owner and its group may read it.

    Raises:
        ValueError: If all users of the machine can read or change the file, or if it has no token.
        OSError: If it cannot be read.
    """
    with open(os.path.expanduser(path), "rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            raise ValueError(f"all users can read or change {path} (mode {mode:04o}); run: chmod 600 {path}")
        data = file.read(1 << 16)
    return check_token(data.decode("utf-8", "replace").strip(), f"the token in {path}")


def bearer(path: str | Path | None) -> dict[str, str]:
    """Return the headers that send the token in a file; none without a file.

    Raises:
        ValueError: If the file does not have a token, or if all users can read it.
        OSError: If it cannot be read.
    """
    return {} if path is None else {"Authorization": f"Bearer {read_token(path)}"}


BUSY = frozenset({429, 503})
"""Statuses of an overloaded service."""
TRANSIENT = BUSY | {502, 504}
"""Statuses after which another try may succeed."""
MAX_RESPONSE_BYTES = 64 << 20
BREAK_AFTER, BREAK_S = 10, 10.0
MARGIN_S, MARGIN_SHARE = 0.5, 0.1
"""A client gives up this many seconds, or this share of its time, before the deadline of its call."""
CLEANUP_S = 5.0
"""Maximum seconds that a call may take to end after its time is over."""
LEAST_SHARE = 0.05
"""A call is not sent if it gets its first slot with less than this share of its time left."""
_SHOWN = 300


class ServiceError(InfrastructureError):
    """A request to a service failed.

    Args:
        message: The message.
        reason: The cause in one word, for programs.
        is_transient: Whether another try may succeed.
        retry_after: Seconds that the service asked to wait; None if it did not.
        status: HTTP status; None if there was no response.
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
        more = {"is_transient": self.is_transient, "retry_after": self.retry_after, "status": self.status}
        return (functools.partial(ServiceError, **more), (str(self), self.reason))


@dataclass(frozen=True, slots=True)
class ServiceResponse:
    """The response of a service.

    Attributes:
        status: HTTP status, below 500.
        data: The JSON of the body, or its text if it is not JSON.
        queue_s: Seconds spent waiting for the limiter and between tries.
        run_s: Seconds of the last try.
        tries: Number of tries.
    """

    status: int
    data: JSON
    queue_s: float
    run_s: float
    tries: int


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to go on trying. A call of a ToolCompose also ends before its `per_call_timeout`.

    Args:
        deadline_s: Seconds for all tries, pauses and waits for a slot of the limiter.
        tries: Most tries.
        first_s: Pause after the first try, in seconds; each further pause is twice as long, and a random part
            is added. The pause that a service asks for takes precedence.
        longest_s: Longest pause, in seconds.

    Raises:
        ValueError: If a number is not above 0.
    """

    deadline_s: float = 300.0
    tries: int = 6
    first_s: float = 0.2
    longest_s: float = 10.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("deadline_s", "tries", "first_s", "longest_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0; got {getattr(self, name)}")


class ServiceClient:
    """Client that posts JSON to one service; an async context manager, usable from several event loops.

    Args:
        name: Name of the service in error messages.
        limiter: Limiter of which each try holds a slot, but not the pauses between tries; it is told the
            outcome of each try. None: no limit.
        max_connections: Most connections of this process.
        patience: How long to go on trying; None: the default.
        headers: Headers of each request.
        trust_env: Whether to use the proxies of the environment.

    Attributes:
        answered_at: Time of the last successful try, in seconds of the event loop's clock.
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
        self._clients = PerLoop[httpx.AsyncClient]()
        self.answered_at = -math.inf

    async def post(
        self,
        url: str,
        payload: JSON | Callable[[float | None], JSON],
        *,
        timeout: float,
        check: Callable[[JSON], None] | None = None,
        ctx: ToolContext | None = None,
    ) -> ServiceResponse:
        """Post JSON, and retry after transient failures until there is a response.

        With a context, the call ends with an error shortly before `ctx.deadline`. The wait for the first slot
        counts as queueing while the service responds to other calls; if it responds to none, the call ends as
        if it did not wait. While the circuit of the limiter is not closed, a call has only one try.

        Args:
            url: URL to post to.
            payload: The JSON, or a function that returns it for each try from the seconds that are left.
            timeout: Seconds for one try.
            check: Raises a `ServiceError` for an invalid response; None: no check.
            ctx: Context of the tool call that the request belongs to; None: no tool call.

        Returns:
            The response.

        Raises:
            ServiceError: If no try got a response with a status below 500.
            CircuitOpen: If the circuit of the limiter is open, because the service has failed repeatedly.
        """
        limiter = self.limiter
        call = _ServiceCall(self, ctx)
        most = 1 if limiter is not None and limiter.circuit != "closed" else self.patience.tries
        tries, last = 0, None
        bound = asyncio.timeout(None)
        try:
            async with bound:
                call.expire = lambda: bound.reschedule(call.now())
                while True:
                    tries += 1
                    try:
                        async with await call.slots() as stack:
                            del stack
                            started = call.now()
                            body = payload(call.left_s) if callable(payload) else payload
                            status, data = await self._try(url, body, timeout, check)
                        ended = call.now()
                        return ServiceResponse(status, data, started - call.began, ended - started, tries)
                    except (ServiceError, CircuitOpen) as error:
                        last = error
                        seconds = pause_s(tries, error, self.patience)
                        if tries >= most or seconds is None:
                            raise
                        if isinstance(error, CircuitOpen) and call.now() + seconds >= call.until:
                            raise
                    if call.now() + seconds >= call.until:
                        raise TimeoutError
                    await asyncio.sleep(seconds)
        except TimeoutError:
            if limiter is not None and (bound.expired() or last is None) and self.answered_at < call.began:
                limiter.record_failure(str(last or "no response"))
            cause = (
                f"; last error: {last}" if last else "" if tries > 1 else ", or its limiter had no free slot"
            )
            n_tries = "1 try" if tries == 1 else f"{tries} tries"
            text = f"{self.name} did not respond within {call.until - call.began:.3g} s and {n_tries}{cause}"
            raise ServiceError(text, "deadline") from None
        finally:
            call.end()

    async def slots(self) -> contextlib.AsyncExitStack:
        """Wait for a connection and a slot of the limiter.

        Returns:
            A stack that holds both until it is closed.
        """
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._connections.slot())
            if self.limiter is not None:
                await stack.enter_async_context(self.limiter.slot())
            return stack.pop_all()

    async def _try(
        self, url: str, payload: JSON, timeout: float, check: Callable[[JSON], None] | None
    ) -> tuple[int, JSON]:
        try:
            found = await self._send(url, payload, timeout)
            if check is not None and found[0] < 400:
                check(found[1])
        except ServiceError as error:
            if self.limiter is not None:
                # A late response is a sign of overload too; "sandbox_error" is a response of a live service.
                if error.status in BUSY or error.reason == "timeout":
                    self.limiter.record_overload(error.retry_after)
                elif error.reason != "sandbox_error":
                    self.limiter.record_failure(str(error))
            raise
        self.answered_at = asyncio.get_running_loop().time()
        if self.limiter is not None:
            self.limiter.record_success()
        return found

    async def _send(self, url: str, payload: JSON, timeout: float) -> tuple[int, JSON]:
        try:
            async with asyncio.timeout(timeout):
                async with self._client().stream("POST", url, json=payload, timeout=timeout) as response:
                    body = bytearray()
                    async for chunk in response.aiter_bytes():
                        body += chunk
                        if len(body) > MAX_RESPONSE_BYTES:
                            raise self._error(f"sent more than {MAX_RESPONSE_BYTES:,} bytes", "too_large")
        except (TimeoutError, httpx.TimeoutException):
            raise self._error(f"did not respond within {timeout:g} s", "timeout", is_transient=True) from None
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise self._error(f"cannot be reached: {what}", "connection", is_transient=True) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._error(f"got no request: {error}", "request") from error
        return response.status_code, self._read(response, bytes(body))

    def _read(self, response: httpx.Response, body: bytes) -> JSON:
        text = body.decode("utf-8", "replace")
        status = response.status_code
        if status >= 500 or status in BUSY:
            raise self._error(
                f"responded with {status}: {text[:_SHOWN]}",
                "busy" if status in BUSY else "server",
                is_transient=status in TRANSIENT,
                retry_after=retry_after_s(response.headers.get("retry-after"), time.time()),
                status=status,
            )
        if 300 <= status < 400:
            where = response.headers.get("location", "another URL")
            raise self._error(f"responded with {status}, a redirect to {where}", "moved", status=status)
        try:
            return read_json(body)
        except ValueError:
            if status >= 400:
                return text
            raise self._error(f"sent invalid JSON: {text[:_SHOWN]!r}", "garbage") from None

    def _error(self, text: str, reason: str, **more: Any) -> ServiceError:
        return ServiceError(f"{self.name} {text}", reason, **more)

    def _client(self) -> httpx.AsyncClient:
        return self._clients.get(lambda: httpx.AsyncClient(**self._options))

    async def close(self) -> None:
        """Close the connections of this event loop; a later call opens new ones."""
        if (client := self._clients.pop()) is not None:
            await client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _ServiceCall:
    """The time of one call of a service, which expires at `until` on the event loop's clock.

    While the call waits for its first slot, each response of the service to another call moves `until` back.
    From its expiry to its end, the clock of the tool call is stopped, for up to `CLEANUP_S`: on a busy event
    loop the tool call would otherwise reach its own deadline meanwhile, and the model would be blamed.
    """

    def __init__(self, service: ServiceClient, ctx: ToolContext | None) -> None:
        self._service, self._ctx = service, ctx
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self.began = self.now()
        self._limit_s = seconds_left(ctx)
        self._latest = self.began + service.patience.deadline_s
        self._is_queueing = True
        self.until = self._latest if self._limit_s is None else min(self._latest, self.began + self._limit_s)
        self.expire: Callable[[], None] = lambda: None
        self._stopped_clock: Clock | None = None
        self._timer = self._loop.call_at(self.until, self._ring)

    @property
    def left_s(self) -> float | None:
        """Seconds until the call expires; None if the call belongs to no tool call with a deadline."""
        return None if self._limit_s is None else self.until - self.now()

    async def slots(self) -> contextlib.AsyncExitStack:
        """Wait for the slots of a try; the wait for those of the first try counts as queueing.

        Raises:
            TimeoutError: If the remaining time is too short for a try.
        """
        if self._ctx is None or not self._is_queueing:
            return await self._service.slots()
        found, self._ctx = await self._ctx.queue(self._service.slots())
        self._postpone()
        self._is_queueing = False
        left = seconds_left(self._ctx)
        if left is not None:
            self.until = min(self.until, self.now() + left)
        if self._limit_s is not None and self.until - self.now() < LEAST_SHARE * self._limit_s:
            await found.aclose()
            raise TimeoutError
        return found

    def end(self) -> None:
        """Stop the timer, and let the clock of the tool call go on."""
        self._timer.cancel()
        clock, self._stopped_clock = self._stopped_clock, None
        if clock is not None:
            clock.go_on()

    def _postpone(self) -> None:
        if self._is_queueing and self._limit_s is not None:
            since = max(self.began, self._service.answered_at)
            self.until = min(self._latest, since + self._limit_s)

    def _ring(self) -> None:
        self._postpone()
        if self.now() < self.until:
            self._timer = self._loop.call_at(self.until, self._ring)
            return
        if self._ctx is not None and self._ctx.clock is not None:
            self._stopped_clock = self._ctx.clock
            self._stopped_clock.stop()
            self._timer = self._loop.call_later(CLEANUP_S, self.end)
        self.expire()


def seconds_left(ctx: ToolContext | None) -> float | None:
    """Return the seconds that a client may take for a call, a little less than its dispatcher allows.

    Args:
        ctx: Context of the call, or None.

    Returns:
        The seconds, or None if the call has no deadline.
    """
    if ctx is None or ctx.deadline is None:
        return None
    left = ctx.deadline - asyncio.get_running_loop().time()
    return left - min(MARGIN_S, MARGIN_SHARE * left)


def pause_s(tries: int, error: ServiceError | CircuitOpen, patience: Patience) -> float | None:
    """Return the pause after a try in seconds, or None if another try cannot help.

    Args:
        tries: Number of tries so far.
        error: The error of the last try.
        patience: How long to go on trying.
    """
    if isinstance(error, CircuitOpen):
        return _longer(error.retry_after)
    if not error.is_transient:
        return None
    if error.retry_after is not None:
        return _longer(min(error.retry_after, MAX_PAUSE_S))
    pause = backoff_pause_s(tries, patience.first_s) + patience.first_s * random.random()
    return min(patience.longest_s, pause)


def _longer(seconds: float) -> float:
    return seconds * (1 + JITTER * random.random())


def retry_after_s(header: str | None, now: float) -> float | None:
    """Return the seconds of a Retry-After header.

    Args:
        header: Value of the header, seconds or a date; None if there is none.
        now: Current time, in seconds since the epoch.

    Returns:
        The seconds, or None if the header is invalid or in the past.
    """
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return seconds if seconds > 0 else None  # None for NaN too


async def shared_limiter(kind: str, url: str, rate_limit: int | None, is_global: bool) -> Limiter | None:
    """Return a limiter for a service.

    Args:
        kind: Kind of the service; part of the limiter's name.
        url: URL of the service; part of the limiter's name, without user and password.
        rate_limit: Most requests at a time; None: no limit.
        is_global: Whether all processes that use the URL share the limit.

    Returns:
        The limiter, or None if there is no limit.
    """
    if rate_limit is None:
        return None
    if is_global:
        parts = urllib.parse.urlsplit(url)
        name = f"{kind} {parts._replace(netloc=parts.netloc.rpartition('@')[2]).geturl()}"
        return await asyncio.to_thread(  # on a thread, because it gets its first lease here
            ClusterRateLimiter,
            name,
            max_concurrent=rate_limit,
            break_after=BREAK_AFTER,
            break_seconds=BREAK_S,
        )
    return RateLimiter(max_concurrent=rate_limit, break_after=BREAK_AFTER, break_seconds=BREAK_S)
