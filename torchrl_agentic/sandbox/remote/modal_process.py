"""A long-lived process in a Modal sandbox, as two streams of bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from torchrl_agentic.sandbox.cancellation import to_the_end
from torchrl_agentic.sandbox.process import MAX_ERRORS, Capture, exit_or_signal, how
from torchrl_agentic.sandbox.remote.modal_command import Command
from torchrl_agentic.sandbox.remote.modal_container import modal_errors

if TYPE_CHECKING:
    import modal

_MAX_UNREAD = 1 << 20


class Served:
    """A long-lived command that we talk to over its stdin and stdout; a `Process`.

    It belongs to the event loop that it was started on. give_up: called where it would not end.
    """

    def __init__(
        self, remote: modal.Sandbox, words: Sequence[str], give_up: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._give_up = give_up
        self._unread = bytearray()
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._errors = Capture(MAX_ERRORS)
        self._one_writer = asyncio.Lock()
        self._stopped = False
        self.command = Command(remote, words, stdout=self._take, stderr=self._errors.add)

    async def started(self) -> None:
        """Wait until it runs."""
        await self.command.started()
        self.command.reading.add_done_callback(lambda _: self._news.set())

    async def send(self, data: bytes) -> None:
        """Write to its stdin."""
        async with self._one_writer:
            await self.command.write(data)

    async def receive(self) -> bytes:
        """Read what it wrote to stdout; empty at the end.

        Raises:
            SandboxError: the sandbox is lost, or the connection to it.
        """
        while not self._unread and not self.command.reading.done():
            self._news.clear()
            await self._news.wait()
        data = bytes(self._unread)
        self._unread.clear()
        self._room.set()
        if not data and not self._stopped and not self.command.reading.cancelled():
            with modal_errors("tell what a process printed"):
                self.command.reading.result()
        return data

    async def kill(self) -> None:
        """End it and everything it started, other than in sessions of their own."""
        self._stopped = True
        self._room.set()
        await to_the_end(self._kill())

    async def wait(self) -> str:
        """Wait until it has ended, and say how."""
        ended = self.command.ended
        await asyncio.wait([ended])
        if ended.cancelled() or (self._stopped and ended.exception() is not None):
            return "ended with its sandbox"
        with modal_errors("tell how a process ended"):
            return how(exit_or_signal(ended.result()))

    def errors(self) -> str:
        """Head and tail of what it wrote to stderr so far."""
        return self._errors.text()

    @property
    def running(self) -> bool:
        """Whether it has not ended yet, as far as we know."""
        return not self.command.ended.done()

    def stop(self) -> None:
        """Read no more, whichever event loop this is called on; for when the sandbox is gone."""
        self._stopped = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.command.stop)

    async def _kill(self) -> None:
        if not await self.command.end():
            await self._give_up()

    async def _take(self, data: bytes) -> None:
        while len(self._unread) >= _MAX_UNREAD and not self._stopped:
            self._room.clear()
            await self._room.wait()
        if not self._stopped:
            self._unread += data
        self._news.set()
