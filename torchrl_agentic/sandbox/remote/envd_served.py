"""A long-lived process in an E2B sandbox, as a pair of streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from torchrl_agentic.sandbox.process import MAX_ERRORS, Capture, how
from torchrl_agentic.sandbox.remote.envd import EnvdProcess

if TYPE_CHECKING:
    from e2b import AsyncSandbox

UNREAD = 32
"""How many pieces of output, of 32 KiB at most, wait to be received before the process has to wait."""


class EnvdServed:
    """A long-lived process in an E2B sandbox. touch: awaited at each `send`, to keep the sandbox alive."""

    def __init__(self, machine: AsyncSandbox, touch: Callable[[], Awaitable[object]]) -> None:
        self._stderr = Capture(MAX_ERRORS)
        self._process = EnvdProcess(machine, self._keep, self._stderr)
        self._touch = touch
        self._unread: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = asyncio.Semaphore(UNREAD)
        self._writing = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()
        self._over = False

    @property
    def over(self) -> bool:
        """Whether it has ended, or was given up."""
        return self._over or self._process.done

    async def start(self, args: Sequence[str]) -> None:
        """Start it; see `EnvdProcess.start`."""
        await self._process.start(args, stdin=True)

    async def _keep(self, data: bytes) -> None:
        if data and not self._over:
            await self._room.acquire()
        self._unread.put_nowait(data)

    async def send(self, data: bytes) -> None:
        """Write to its stdin. What was begun is written to its end, also if the caller is cancelled."""
        await self._touch()
        task = asyncio.create_task(self._write(data))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise EOFError("the process reads no more") from None
            raise

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            await self._process.write(data)

    async def receive(self) -> bytes:
        """Read what it wrote to stdout; empty at the end.

        Raises:
            SandboxError: the connection to it was lost.
        """
        data = await self._unread.get()
        if data:
            self._room.release()
            return data
        self._unread.put_nowait(b"")
        if not self._over:
            await self._process.exit_code(None)
        return b""

    async def kill(self) -> None:
        """End it and its session; output that nobody received does not hold that up."""
        self._end()
        await self._process.kill()

    def abandon(self) -> None:
        """Take note that the sandbox is gone."""
        self._end()
        self._process.abandon()
        for task in self._writes:
            task.cancel()

    def _end(self) -> None:
        self._over = True
        self._room.release()
        self._unread.put_nowait(b"")

    async def wait(self) -> str:
        """Wait until it has ended, and say how."""
        code = await self._process.exit_code(None)
        return "killed" if code is None else how(code)

    def errors(self) -> str:
        """Head and tail of what it wrote to stderr so far."""
        return self._stderr.text()
