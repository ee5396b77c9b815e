"""The interpreter that a fork server has started with its sandbox: live at once, cloned in milliseconds."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.repl.base import Repl
from torchrl_agentic.repl.supervised import SupervisedRepl
from torchrl_agentic.sandbox.base import Sandbox
from torchrl_agentic.sandbox.forkserver import ForkServerSandbox
from torchrl_agentic.sandbox.link import Link


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

        Threads, processes and connections that cells have left are not copied, and end here too. Where there
        is something that would be shared, such as shared memory, the cells are run again instead.
        """
        async with self._lock:
            self._live()
            return await super().fork(n)

    async def continue_in(self, sandbox: Sandbox, *, owns: bool = False) -> Repl:
        """Make an open copy of this interpreter in a sandbox that is a clone of ours."""
        assert isinstance(sandbox, ForkServerSandbox)
        if not sandbox.has_live_clone:
            return await super().continue_in(sandbox, owns=owns)
        clone = ForkServerRepl(sandbox)
        await clone.open()
        clone.owns_sandbox, clone.cells, clone._untold = owns, list(self.cells), self._untold
        return clone

    def _live(self) -> Link:
        self._check_open()
        return self._sandbox.link  # another one after each cloning

    async def _begin(self) -> None:
        self._sandbox.take_interpreter()

    async def _end(self) -> None:
        if self.sandbox.is_open and not self.owns_sandbox:
            with contextlib.suppress(SandboxError):
                await self._sandbox.link.ask("restart")
        self._sandbox.interpreter_taken = False

    def __repr__(self) -> str:
        return f"ForkServerRepl({self.sandbox!r})"
