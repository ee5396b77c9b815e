"""A long-lived process in a Docker container, as a pair of streams."""

from __future__ import annotations

import asyncio

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.cancellation import to_the_end
from torchrl_agentic.sandbox.process import MAX_ERRORS, Capture, how
from torchrl_agentic.sandbox.remote.docker_container import END_S, STDERR, Command

MAX_UNREAD = 1 << 20
"""How much output waits for whoever reads it; then the process has to wait."""


class ContainerProcess:
    """A long-lived process in a container; a `Process`."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._errors = Capture(MAX_ERRORS)
        self._unread = bytearray()
        self._changed = asyncio.Condition()
        self._dropped = False
        self._how: str | None = None
        self._reading = asyncio.ensure_future(self._read())
        self._killing: asyncio.Future[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, as far as we know."""
        return self._how is None

    async def send(self, data: bytes) -> None:
        """Write to its stdin."""
        if self._how is not None:
            raise EOFError(f"the process reads no more: {self._how}")
        await self._command.send(data)

    async def receive(self) -> bytes:
        """Read what it wrote to stdout; empty at the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._unread) or self._how is not None)
            data = bytes(self._unread)
            self._unread.clear()
            self._changed.notify_all()
        return data

    async def kill(self) -> None:
        """End it and everything it started."""
        if self._killing is None:
            self._killing = asyncio.ensure_future(self._kill())
        await to_the_end(self._killing)

    async def wait(self) -> str:
        """Wait until it has ended, and say how; what it writes must be read meanwhile."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._how is not None)
        return self._how or ""

    def errors(self) -> str:
        """Head and tail of what it wrote to stderr so far."""
        return self._errors.text()

    async def _read(self) -> None:
        said = "killed"
        try:
            while (piece := await self._command.receive()) is not None:
                number, data = piece
                if number == STDERR:
                    self._errors.add(data)
                    continue
                async with self._changed:
                    self._unread += b"" if self._dropped else data
                    self._changed.notify_all()
                    await self._changed.wait_for(lambda: len(self._unread) < MAX_UNREAD or self._dropped)
            said = how(await self._command.code())
            await self._command.close()
        except SandboxError as error:
            said = str(error)
        finally:
            async with self._changed:
                self._how = said
                self._changed.notify_all()

    async def _kill(self) -> None:
        async with self._changed:
            self._dropped = True
            self._unread.clear()
            self._changed.notify_all()
        await self._command.end()
        await asyncio.wait([self._reading], timeout=END_S)
        self._reading.cancel()
        await self._command.close()
