"""`ForkServerRepl`: the interpreter of a `ForkServerSandbox`, which clones it in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import ClassVar

from torchrl_agentic.errors import FilesNotCopied, InfrastructureError, SandboxError
from torchrl_agentic.repl.base import Repl
from torchrl_agentic.repl.supervised import SupervisedRepl
from torchrl_agentic.sandbox.base import Sandbox
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.sandbox.forkserver_sandbox import ForkServerSandbox
from torchrl_agentic.sandbox.link import Link

logger = logging.getLogger(__name__)


class ForkServerRepl(SupervisedRepl):
    """The interpreter of a `ForkServerSandbox`. Each sandbox has one.

    Args:
        sandbox: The sandbox, which is opened with the interpreter if it is not open; None for one with the
            default limits.
    """

    name: ClassVar[str] = "forkserver"

    def __init__(self, sandbox: ForkServerSandbox | None = None) -> None:
        super().__init__()
        self.sandbox = self._sandbox = ForkServerSandbox() if sandbox is None else sandbox

    def fresh(self, sandbox: Sandbox | None = None) -> ForkServerRepl:
        """Return a new, unopened interpreter with the same settings, in this sandbox or one of its own.

        Raises:
            TypeError: If the sandbox is of another kind.
        """
        if sandbox is not None and not isinstance(sandbox, ForkServerSandbox):
            raise TypeError(f"ForkServerRepl needs a ForkServerSandbox; got {type(sandbox).__name__}")
        return ForkServerRepl(sandbox or self._sandbox.fresh())

    async def fork(self, n: int = 1) -> list[Repl]:
        """Create open copies that continue from the current state, with their memory and files.

        The files are those below /work and /tmp. Return as soon as no cell runs; calls of a copy, or of this
        interpreter, wait until all copies exist. If they cannot be made, calls of a copy raise
        InfrastructureError; or FilesNotCopied, if the reason is what code has left in the workspace.

        Threads, processes and connections of cells are not copied, and end here too. If the copies would
        share something, such as shared memory, the cells run again instead.

        Args:
            n: Number of copies.
        """
        clones = [self.fresh() for _ in range(n)]
        await self._lock.acquire()
        try:
            await self._live()
        except BaseException:
            self._lock.release()
            raise
        for clone in clones:
            clone._opened = clone.owns_sandbox = clone._sandbox.interpreter_taken = True
            clone.cells, clone._untold = list(self.cells), self._untold or self._losses != self.sandbox.losses
            await clone._lock.acquire()  # no other task can hold it
        cloning = asyncio.create_task(self._clone(clones))
        for one in (self, *clones):
            one._sandbox.cloning = cloning
        cloning.add_done_callback(lambda _: self._settle(clones, cloning))
        return [*clones]

    async def _clone(self, clones: Sequence[ForkServerRepl]) -> None:
        """Make copies. They and this interpreter stay locked until they exist."""
        for clone, made in zip(clones, await super().fork(len(clones)), strict=True):
            assert isinstance(made, ForkServerRepl)
            clone._sandbox.adopt(made._sandbox)
            clone.cells, clone._untold = made.cells, made._untold

    def _settle(self, clones: Sequence[ForkServerRepl], cloning: asyncio.Task[None]) -> None:
        """Release the locks. A callback, because that runs also if the task never started."""
        error = asyncio.CancelledError("cancelled") if cloning.cancelled() else cloning.exception()
        if isinstance(error, Exception) and not isinstance(error, InfrastructureError | FilesNotCopied):
            logger.warning("copying an interpreter failed", exc_info=error)
        kind = FilesNotCopied if isinstance(error, FilesNotCopied) else SandboxError
        for one in (self, *clones):
            one._sandbox.cloning = None
            one._lock.release()
            if error is not None and one is not self:
                one._sandbox.lost = kind(f"a copy could not be made: {str(error) or repr(error)}")

    async def interrupt(self) -> None:
        """Stop the running code; do nothing while copies are made."""
        self._check_open()
        if self._sandbox.cloning is None:
            await super().interrupt()

    async def continue_in(self, sandbox: Sandbox, *, owns: bool = False) -> Repl:
        """Create an open copy of this interpreter in a sandbox that is a clone of its own.

        Args:
            sandbox: The clone.
            owns: Close the sandbox with the copy.
        """
        assert isinstance(sandbox, ForkServerSandbox)
        if not sandbox.has_live_clone:
            return await super().continue_in(sandbox, owns=owns)
        clone = ForkServerRepl(sandbox)
        await clone.open()
        clone.owns_sandbox, clone.cells, clone._untold = owns, list(self.cells), self._untold
        return clone

    async def _live(self) -> Link:
        self._check_open()
        link = await self._whole_link()  # a new one after each cloning
        self._sandbox.has_run_code = True
        return link

    def _current(self) -> Link | None:
        return self._sandbox.connection

    async def _judge(self, link: Link) -> str:
        await self._whole_link()
        return ""

    async def _whole_link(self) -> Link:
        try:
            return await self._sandbox.link()
        except SandboxError:
            self._take_loss()  # the error reports it
            raise

    async def _begin(self) -> None:
        self._sandbox.take_interpreter()
        self._losses = self._sandbox.losses

    async def _end(self) -> None:
        await run_to_completion(self._free())

    async def _free(self) -> None:
        await self._sandbox.wait_for_cloning()
        if self.sandbox.is_open and not self.owns_sandbox:
            with contextlib.suppress(SandboxError):
                await (await self._sandbox.link()).ask("restart")
        self._sandbox.interpreter_taken = False

    def __repr__(self) -> str:
        return f"ForkServerRepl({self.sandbox!r})"
