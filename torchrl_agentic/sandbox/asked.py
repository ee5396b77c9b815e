"""Processes that end others of theirs when asked: killed at once, they would leave some behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from torchrl_agentic.sandbox.process import END_S, Child, Command, Served


class AskedCommand(Command):
    """A command that is asked to end before it is killed."""

    def __init__(self, command: Command) -> None:
        super().__init__(command.process, command.stdout_fd, command.stderr_fd)

    async def _kill(self) -> None:
        await _ask(self.process)
        await super()._kill()


class AskedServed(Child):
    """A long-lived process that is asked to end before it is killed."""

    def __init__(self, served: Served) -> None:
        super().__init__(served.process)
        self.send, self.receive, self.errors = served.send, served.receive, served.errors
        self._served = served

    async def _kill(self) -> None:
        await _ask(self.process)
        await self._served.kill()


async def _ask(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()
