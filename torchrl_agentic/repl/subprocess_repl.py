"""`SubprocessRepl`: a Python process for each interpreter, in any sandbox that can run Python."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import ClassVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.repl.base import ReplResult, StartFailed
from torchrl_agentic.repl.supervised import SupervisedRepl
from torchrl_agentic.sandbox import Process, Sandbox, default_sandbox
from torchrl_agentic.sandbox.bootstrap import BOOT, start_message, supervisor_settings
from torchrl_agentic.sandbox.link import Link
from torchrl_agentic.sandbox.look_alike_sandbox import ensure_sandbox
from torchrl_agentic.sandbox.process import END_S


class SubprocessRepl(SupervisedRepl):
    """A Python process in a sandbox; variables, imports and functions stay from call to call.

    Args:
        sandbox: Where it runs; it is opened with the interpreter if it is not open. None for
            `default_sandbox()`.
        python_argv: Command that starts Python inside; None for that of the sandbox.
        seed: Seed of `random` and of numpy's global generator, so that the same code has the same output.

    Raises:
        TypeError: If `sandbox` is not a sandbox, or lacks a member such as `spawn`.
    """

    name: ClassVar[str] = "subprocess"

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        python_argv: tuple[str, ...] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.sandbox = default_sandbox() if sandbox is None else ensure_sandbox(sandbox, also=["spawn"])
        self.seed = seed
        self._python_argv = python_argv
        self._process: Process | None = None
        self._link: Link | None = None

    def fresh(self, sandbox: Sandbox | None = None) -> SubprocessRepl:
        """Return a new, unopened interpreter with the same settings, in this sandbox or one of its own."""
        return SubprocessRepl(sandbox or self.sandbox.fresh(), python_argv=self._python_argv, seed=self.seed)

    async def _run(self, code: str, timeout: float | None, left: float | None) -> ReplResult:
        try:
            return await super()._run(code, timeout, left)
        except StartFailed as error:  # leftovers of earlier code prevent the start
            if not self._has_run:
                raise
            return self._not_run(error)

    async def _live(self) -> Link:
        self._check_open()
        if self._link is not None and self._link.is_lost:
            await self._judge(self._link)
            self._untold = self._has_run
        if self._link is None:
            await self._begin()
        assert self._link is not None
        return self._link

    def _current(self) -> Link | None:
        return self._link

    async def _judge(self, link: Link) -> None:
        process, self._process, self._link = self._process, None, None
        ended = ""
        if process is not None:
            with contextlib.suppress(TimeoutError, SandboxError):  # end it if it still runs
                async with asyncio.timeout(END_S):
                    ended = await process.wait()
            await process.kill()
        if link.cause is not None:
            raise link.cause
        if await self.sandbox.was_ended_outside(ended):
            _, lost = self._take_loss()
            raise SandboxError(f"the interpreter was lost: its sandbox was {ended} from outside; {lost}")

    async def _begin(self) -> None:
        argv = (*(self._python_argv or self.sandbox.python_argv), "-s", "-B", "-c", BOOT)
        self._process = process = await self.sandbox.spawn(argv)
        try:
            settings = supervisor_settings(self.sandbox.limits)
            await process.send(start_message("supervisor", "alone", settings))
            self._link = link = Link(_ProcessStream(process), output_bytes=self.sandbox.limits.output_bytes)
            await link.ask("start", seed=self.seed)
        except (SandboxError, EOFError):
            await process.kill()
            said = process.errors().strip() or await process.wait()
            raise StartFailed(f"Python does not start inside: {said}") from None
        except BaseException:
            await process.kill()
            raise

    async def _end(self) -> None:
        process, self._process, self._link = self._process, None, None
        if process is not None:
            await process.kill()

    def __repr__(self) -> str:
        return f"SubprocessRepl({self.sandbox!r})"


class _ProcessStream:
    """A process as a `Stream`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def try_send(self, data: bytes, fds: Sequence[int]) -> int:
        """Send nothing without waiting; a process stream cannot carry open files."""
        assert not fds
        return 0

    async def send(self, data: bytes) -> None:
        """Send all bytes."""
        await self._process.send(data)

    async def receive(self) -> bytes:
        """Wait for bytes and return them."""
        return await self._process.receive()
