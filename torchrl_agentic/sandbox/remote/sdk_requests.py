"""Requests to a service through its SDK: errors, retries, time limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import TypeVar

from torchrl_agentic.errors import SandboxError

T = TypeVar("T")


class RefusedError(SandboxError):
    """The service answered that it did not do what was requested."""


@contextlib.contextmanager
def sdk_errors(what: str, refusals: tuple[type[Exception], ...] = ()) -> Generator[None]:
    """Raise SandboxError for any error of an SDK, with the original as its cause.

    An SDK, its HTTP library and its protocol have no common base class, and some raise bare exceptions.

    Args:
        what: Start of the message, such as "Docker could not start a command".
        refusals: Errors with which the service refuses a request; they raise RefusedError. After any other
            error the service may have done what was requested.
    """
    try:
        yield
    except (SandboxError, EOFError):
        raise
    except Exception as error:
        kind = RefusedError if isinstance(error, refusals) else SandboxError
        raise kind(f"{what}: {str(error) or type(error).__name__}") from error


async def request_with_retries(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Make a request up to three times; see `sdk_errors`. It must be repeatable.

    Args:
        what: Start of the message of an error.
        call: Makes the request.
    """
    for pause_s in (0.1, 0.5):
        with contextlib.suppress(SandboxError), sdk_errors(what):
            return await call()
        await asyncio.sleep(pause_s)
    with sdk_errors(what):
        return await call()


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncGenerator[None]:
    """Raise SandboxError if the block takes longer.

    Args:
        seconds: Maximum duration.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise SandboxError(f"no answer within {seconds:g} s") from None
