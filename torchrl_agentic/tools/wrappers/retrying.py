"""`Retrying`, a tool whose calls are retried after transient failures."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import urllib.error
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from torchrl_agentic.errors import InfrastructureError, StopSignal, ToolError
from torchrl_agentic.limits.backoff import backoff_pause_s
from torchrl_agentic.messages import JSON, Status, ToolResult
from torchrl_agentic.tools.base import ToolContext, effects_of
from torchrl_agentic.tools.wrappers.base import CallLater, Wrapped, pause

_NETWORK = frozenset(
    {
        errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH,
        errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.ETIMEDOUT,
    }
)  # fmt: skip
_OF_LIBRARIES = frozenset(
    {
        ("aiohttp", "ClientConnectionError"), ("httpcore", "NetworkError"), ("httpcore", "TimeoutException"),
        ("httpx", "TransportError"), ("requests", "ConnectionError"), ("requests", "Timeout"),
    }
)  # fmt: skip
"""Exceptions of HTTP clients for a missing response, by package and class, so that none is imported."""

Outcome = ToolResult | InfrastructureError | TimeoutError
IdempotencyKey = str | Callable[[Mapping[str, JSON], ToolContext], JSON]


class Retrying(Wrapped):
    """A tool whose calls are retried after it was not available or timed out.

    A retry follows

    - results with the status INFRA or TIMEOUT, and `InfrastructureError`;
    - `TimeoutError`, `ConnectionError`, failed name look-ups and other network errors, also those of httpx,
      aiohttp, requests and urllib; see `is_connection_error`;
    - the exceptions in `on`.

    Any other exception is a bug: its call gets the status CRASH and no retry. A tool should raise
    `InfrastructureError` for a transient failure. If the last try ends with a connection error or one of
    `on`, the result is INFRA.

    The pause after the first try is `first_s` seconds and doubles, up to `longest_s`. A random part is added
    to each pause, and none is shorter than the service asked for. No try begins after the deadline of the
    call. Under a `RateLimiter`, each try takes a slot, and none is held during a pause. After a retry,
    `metrics["retries"]` counts them.

    A tool that changes anything is only retried with an `idempotency_key`, by which its service recognizes
    two tries as one call.

    Args:
        tool: The tool.
        attempts: Number of tries at most, the first one included.
        first_s: First pause, in seconds.
        longest_s: Longest pause, in seconds.
        on: Further types of exceptions that are retried.
        idempotency_key: Name of the argument with the key, which is filled in unless the model has set it; or
            a function that returns the key for arguments and context, None for a call that must not be
            repeated. The key is the same for all tries of a call, and different for each call.
        call_later: Clock that pauses wait on, for tests; None: that of the event loop.

    Raises:
        TypeError: If `on` contains anything but types of exceptions.
        ValueError: If the tool changes things and there is no key, the key names no argument of the tool,
            or a number is out of range.
    """

    def __init__(
        self,
        tool: Any,
        attempts: int = 3,
        *,
        first_s: float = 0.2,
        longest_s: float = 10.0,
        on: Iterable[type[Exception]] = (),
        idempotency_key: IdempotencyKey | None = None,
        call_later: CallLater | None = None,
    ) -> None:
        super().__init__(tool)
        if attempts < 1 or not 0 < first_s <= longest_s:
            raise ValueError(
                "expected attempts of 1 or more and 0 < first_s <= longest_s;"
                f" got attempts={attempts}, first_s={first_s}, longest_s={longest_s}"
            )
        effects = effects_of(self)
        if idempotency_key is None and effects.may_change:
            raise ValueError(
                f"{self.name!r} may change things ({effects}): a second try could do them twice. Pass an"
                " idempotency_key by which its service recognizes retries, or declare the tool's effects if"
                " it only reads"
            )
        known = self.input_schema.get("properties", {})
        if isinstance(idempotency_key, str) and idempotency_key not in known:
            raise ValueError(f"{self.name!r} has no argument {idempotency_key!r}; it has: {', '.join(known)}")
        self.attempts, self.first_s, self.longest_s = attempts, first_s, longest_s
        self.idempotency_key, self.call_later = idempotency_key, call_later
        self.on = _exceptions(on)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run the tool until a try does not fail transiently, or no try or no time is left."""
        args, tries = self._keyed(args, ctx)
        retries, outcome = 0, await self._try(args, ctx)
        while is_transient(outcome) and retries + 1 < tries:
            pause_s = backoff_pause_s(retries + 1, self.first_s, self.longest_s)
            asked_s = getattr(outcome, "retry_after", None) or 0.0
            seconds = max(pause_s, asked_s) + self.first_s * random.random()  # callers do not return at once
            if ctx.clock is not None:
                ctx = replace(ctx, deadline=ctx.clock.deadline)  # a try that queued has moved it
            if ctx.deadline is not None and asyncio.get_running_loop().time() + seconds >= ctx.deadline:
                break
            try:
                ctx = await self._pause(seconds, outcome, ctx)
            except InfrastructureError as error:  # an open circuit
                outcome = error
                break
            retries, outcome = retries + 1, await self._try(args, ctx)
        if not retries:
            if isinstance(outcome, ToolResult):
                return outcome
            raise outcome
        if not isinstance(outcome, ToolResult):
            outcome = ToolResult.from_error(outcome, self.name) or ToolResult(status=Status.INFRA)
        metrics = dict(outcome.metrics or {})
        metrics["retries"] = retries + metrics.get("retries", 0)
        return replace(outcome, metrics=metrics)

    async def _pause(self, seconds: float, outcome: Outcome, ctx: ToolContext) -> ToolContext:
        """Pause without the slot of the call, and wait for it again; return a context to continue with.

        Raises:
            CircuitOpen: If the circuit breaker of the limiter refuses the next try.
        """
        slot = ctx.slot
        if slot is None:
            await pause(seconds, self.call_later)
            return ctx
        if isinstance(outcome, InfrastructureError):
            slot.record(has_answered=False, reason=str(outcome))
        elif isinstance(outcome, ToolResult) and outcome.status is Status.INFRA:
            slot.record(has_answered=False, reason=outcome.text)
        slot.release()
        await pause(seconds, self.call_later)
        return (await ctx.queue(slot.acquire()))[1]

    async def _try(self, args: Mapping[str, JSON], ctx: ToolContext) -> Outcome:
        try:
            return await self.result(args, ctx)
        except (InfrastructureError, TimeoutError) as error:
            return error
        except Exception as error:
            if not isinstance(error, self.on) and not is_connection_error(error):
                raise
            lost = InfrastructureError(f"{type(error).__name__}: {error}".removesuffix(": "))
            lost.__cause__ = error
            return lost

    def _keyed(self, args: Mapping[str, JSON], ctx: ToolContext) -> tuple[Mapping[str, JSON], int]:
        """Return the arguments with their key, and the number of tries."""
        key = self.idempotency_key
        if isinstance(key, str):
            return {key: f"{ctx.trajectory}/{ctx.call_id}", **args}, self.attempts
        return args, 1 if key is not None and key(args, ctx) is None else self.attempts


def is_connection_error(error: BaseException) -> bool:
    """Return True if an exception means that a server was not reached or did not respond.

    True for `ConnectionError`, `socket.gaierror`, `TimeoutError`, `urllib.error.URLError` (not `HTTPError`,
    which is a response), an `OSError` with an error number of the network, and the corresponding exceptions
    of httpx, httpcore, aiohttp and requests.
    """
    if isinstance(error, urllib.error.HTTPError):
        return False
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror | urllib.error.URLError):
        return True
    if isinstance(error, OSError) and error.errno in _NETWORK:
        return True
    names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    return not names.isdisjoint(_OF_LIBRARIES)


def _exceptions(kinds: Iterable[type[Exception]]) -> tuple[type[Exception], ...]:
    """Check the types of exceptions that `Retrying` retries."""
    if isinstance(kinds, type):
        raise TypeError(f"expected a tuple of exceptions: on=({kinds.__name__},)")
    found = tuple(kinds)
    for kind in cast("tuple[object, ...]", found):
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise TypeError(f"expected types of exceptions in on; got {kind!r}")
        if issubclass(kind, ToolError | StopSignal):
            raise TypeError(
                f"{kind.__name__} is a message for the model and is never retried; leave it out of on"
            )
    return found


def is_transient(outcome: Outcome) -> bool:
    """Return True if another try may succeed."""
    if isinstance(outcome, ToolResult):
        return outcome.is_error and outcome.status in (Status.INFRA, Status.TIMEOUT)
    return bool(getattr(outcome, "is_transient", True))
