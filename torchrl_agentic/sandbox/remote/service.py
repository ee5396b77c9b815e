"""Requests to a service through its SDK: their errors, their repetition, their time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import TypeVar

from torchrl_agentic.errors import SandboxError

T = TypeVar("T")


@contextlib.contextmanager
def from_service(what: str) -> Generator[None]:
    """Raise SandboxError for anything that an SDK raises, with the original as its cause.

    An SDK, its HTTP library and its protocol have no common base class, and some raise bare exceptions.
    """
    try:
        yield
    except (SandboxError, EOFError):
        raise
    except Exception as error:
        raise SandboxError(f"{what}: {str(error) or type(error).__name__}") from error


async def ask(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Make a request that may be repeated, up to three times; see `from_service`."""
    for pause_s in (0.1, 0.5):
        with contextlib.suppress(SandboxError), from_service(what):
            return await call()
        await asyncio.sleep(pause_s)
    with from_service(what):
        return await call()


@contextlib.asynccontextmanager
async def in_time(seconds: float) -> AsyncGenerator[None]:
    """Raise SandboxError if a block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise SandboxError(f"no answer within {seconds:g} s") from None
