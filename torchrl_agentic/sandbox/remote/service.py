"""Calls of a service that keeps sandboxes: their failures are ours, and what they began is ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.cancellation import to_the_end

T = TypeVar("T")
CLEANUP_S = 15.0
"""How long it may take to end something, and so how long a caller who was cancelled waits at most."""
_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def from_service(what: str) -> Generator[None]:
    """Make a SandboxError of whatever the SDK of a service raises; its cause is the original.

    An SDK, its HTTP library and its protocol have no common base, and some raise bare Exceptions too.
    """
    try:
        yield
    except SandboxError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, asyncio.CancelledError):  # connectrpc wraps it
            raise error.__cause__ from None
        raise SandboxError(f"{what}: {str(error) or type(error).__name__}") from error


async def patiently(attempt: Callable[[], Awaitable[T]]) -> T:
    """Try something harmless up to three times.

    Raises:
        SandboxError: that of the third time.
    """
    for pause in (0.1, 0.5):
        with contextlib.suppress(SandboxError):
            return await attempt()
        await asyncio.sleep(pause)
    return await attempt()


async def clean_up(work: Coroutine[Any, Any, object]) -> None:
    """End something while an error is on its way already, which says more than one of this."""
    try:
        await to_the_end(in_time(work))
    except SandboxError as error:
        _logger.warning("cleaning up failed: %s", error)


async def in_time(work: Coroutine[Any, Any, T]) -> T:
    """End something.

    Raises:
        SandboxError: it failed, or took more than CLEANUP_S.
    """
    try:
        async with asyncio.timeout(CLEANUP_S):
            return await work
    except TimeoutError:
        raise SandboxError(f"no answer within {CLEANUP_S:g} s") from None
