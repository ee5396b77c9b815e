"""Calls to Docker: what may be tried again, what an error is, and what must come to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, TypeVar

from torchrl_agentic.errors import SandboxError

if TYPE_CHECKING:
    from aiodocker.execs import Exec
    from aiodocker.stream import Stream

T = TypeVar("T")
REQUEST_S = 60.0
PAUSES_S = (0.0, 0.02, 0.1, 0.3, 0.6)


async def ended(execution: Exec) -> int:
    """Give the exit code of an exec whose output has ended; Docker may take a moment to know it.

    Raises:
        SandboxError: it goes on, or never began.
    """
    for pause_s in PAUSES_S:
        await asyncio.sleep(pause_s)
        state = await insist(execution.inspect)
        if not state["Running"] and state["ExitCode"] is not None:
            return int(state["ExitCode"])
    raise SandboxError("the connection to a command in the container was cut")


async def close_stream(stream: Stream) -> None:
    """Close a connection, whatever is left of it."""
    with contextlib.suppress(AssertionError, OSError):
        await stream.close()


def transport_of(stream: Stream) -> asyncio.WriteTransport:
    """Give the transport below a connection that was taken over.

    Raises:
        ConnectionError: it is gone already.
    """
    response = stream._resp  # pyright: ignore[reportPrivateUsage]  aiodocker has no other way
    transport = response and response.connection and response.connection.transport
    if not isinstance(transport, asyncio.WriteTransport):
        raise ConnectionError("the connection was cut")
    return transport


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """Ask Docker for what may be asked twice, again after a failure that may pass."""
    from aiodocker.exceptions import DockerError

    for pause_s in PAUSES_S:
        try:
            return await call()
        except DockerError as error:
            if error.status != 429 and error.status < 500:
                raise
        await asyncio.sleep(pause_s)
    return await call()


@contextlib.contextmanager
def reported(doing: str) -> Generator[None]:
    """Make what goes wrong between us and Docker a SandboxError."""
    from aiodocker.exceptions import DockerError
    from aiohttp import ClientError

    try:
        yield
    except DockerError as error:
        raise SandboxError(f"Docker could not {doing}: {error.message}") from error
    except (ClientError, OSError, AssertionError) as error:  # aiodocker asserts that connections live
        raise SandboxError(f"Docker could not {doing}: {str(error) or type(error).__name__}") from error
