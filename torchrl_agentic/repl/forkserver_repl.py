"""The interpreter that a fork server has started with its sandbox: live at once, cloned in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import ClassVar

from torchrl_agentic.errors import InfrastructureError, SandboxError
from torchrl_agentic.repl.base import Repl
from torchrl_agentic.repl.supervised import SupervisedRepl
from torchrl_agentic.sandbox.base import Sandbox
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.sandbox.forkserver_sandbox import ForkServerSandbox
from torchrl_agentic.sandbox.link import Link

logger = logging.getLogger(__name__)


class ForkServerRepl(SupervisedRepl):
    """The interpreter of a `ForkServerSandbox`; each has one.

    sandbox: None for one with the default limits. It is opened with the interpreter if it is not open.
    """

    name: ClassVar[str] = "forkserver"

    def __init__(self, sandbox: ForkServerSandbox | None = None) -> None:
        super().__init__()
        self.sandbox = self._sandbox = ForkServerSandbox() if sandbox is None else sandbox

    def fresh(self, sandbox: Sandbox | None = None) -> ForkServerRepl:
        """Make another one, not open yet, in a sandbox of its own or in this one.

        Raises:
            TypeError: the sandbox is of another kind.
        """
        if sandbox is not None and not isinstance(sandbox, ForkServerSandbox):
            raise TypeError(f"a fork server's interpreter cannot live in a {type(sandbox).__name__}")
        return ForkServerRepl(sandbox or self._sandbox.fresh())

    async def fork(self, n: int = 1) -> list[Repl]:
        """Make open copies that go on from here, with all that is in memory and below /work and /tmp.

        Returns at once when no cell runs: what is asked of a copy, or of this one, waits until all are there.
        Where they cannot be made, whoever uses one is told by an InfrastructureError.

        Threads, processes and connections that cells have left are not copied, and end here too. Where there
        is something that would be shared, such as shared memory, the cells are run again instead.
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
            await clone._lock.acquire()  # nobody else has it
        cloning = asyncio.create_task(self._clone(clones))
        for one in (self, *clones):
            one._sandbox.cloning = cloning
        cloning.add_done_callback(lambda _: self._settle(clones, cloning))
        return [*clones]

    async def _clone(self, clones: Sequence[ForkServerRepl]) -> None:
        """Let these become copies; we and they are locked until then."""
        for clone, made in zip(clones, await super().fork(len(clones)), strict=True):
            assert isinstance(made, ForkServerRepl)
            clone._sandbox.adopt(made._sandbox)
            clone.cells, clone._untold = made.cells, made._untold

    def _settle(self, clones: Sequence[ForkServerRepl], cloning: asyncio.Task[None]) -> None:
        """Let whoever waits go on. A callback, since that is called also if the task never began."""
        error = asyncio.CancelledError("cancelled") if cloning.cancelled() else cloning.exception()
        if isinstance(error, Exception) and not isinstance(error, InfrastructureError):
            logger.warning("an interpreter could not be copied", exc_info=error)
        for one in (self, *clones):
            one._sandbox.cloning = None
            one._lock.release()
            if error is not None and one is not self:
                one._sandbox.lost = f"a copy could not be made: {str(error) or repr(error)}"

    async def interrupt(self) -> None:
        """Stop the code that runs now; while copies are made there is none."""
        self._check_open()
        if self._sandbox.cloning is None:
            await super().interrupt()

    async def continue_in(self, sandbox: Sandbox, *, owns: bool = False) -> Repl:
        """Make an open copy of this interpreter in a sandbox that is a clone of ours."""
        assert isinstance(sandbox, ForkServerSandbox)
        if not sandbox.has_live_clone:
            return await super().continue_in(sandbox, owns=owns)
        clone = ForkServerRepl(sandbox)
        await clone.open()
        clone.owns_sandbox, clone.cells, clone._untold = owns, list(self.cells), self._untold
        return clone

    async def _live(self) -> Link:
        self._check_open()
        link = await self._whole_link()  # another one after each cloning
        self._sandbox.has_run_code = True
        return link

    def _current(self) -> Link | None:
        return self._sandbox.connection

    async def _judge(self, link: Link) -> None:
        await self._whole_link()

    async def _whole_link(self) -> Link:
        try:
            return await self._sandbox.link()
        except SandboxError:
            self._take_loss()  # the error tells of it
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
