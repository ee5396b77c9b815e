"""`Repl`, the interface of all interpreters: run code, keep what it defines, return the result."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from torchrl_agentic.errors import Interface, SandboxError
from torchrl_agentic.sandbox import Sandbox

ReplStatus = Literal["ok", "error", "timeout", "died", "limit"]
KEPT = "interpreter state is kept"
LOST = "interpreter state was lost (files in /work are kept)"
ALL_LOST = "interpreter state and all files were lost"
REPLAY_S = 60.0
"""Maximum seconds of each cell that runs again for a clone."""


@dataclass(frozen=True, slots=True)
class ReplDisplay:
    """An object that code displayed other than by printing, such as an image.

    Attributes:
        media_type: Media type of the data.
        data: The data.
    """

    media_type: str
    data: Any


@dataclass(frozen=True, slots=True)
class ReplError:
    """An exception that code did not catch.

    Attributes:
        ename: Name of its type.
        evalue: Its text.
        traceback: Its traceback through the cells.
    """

    ename: str
    evalue: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class ReplResult:
    """The result of running some code.

    Attributes:
        stdout: Standard output of the code.
        stderr: Standard error of the code.
        display: Objects that the code displayed.
        error: The exception that the code did not catch, or None.
        timed_out: True if the code was stopped at its timeout.
        execution_count: Number of the cell, from 1; -1 if the code did not run.
        value: The repr of the last line, if that is an expression that is not None.
        status: "ok"; "error" for an exception; "timeout"; "died" if the interpreter ended; "limit" if it was
            stopped for its use of resources.
        message: A message of the interpreter itself: that the code was stopped, or that state was lost.
        state_lost: True if definitions of earlier cells are lost.
        omitted_bytes: Number of bytes of output that were cut.
        background: Output of processes of earlier cells since the last call.
    """

    stdout: str = ""
    stderr: str = ""
    display: tuple[ReplDisplay, ...] = ()
    error: ReplError | None = None
    timed_out: bool = False
    execution_count: int = -1
    value: str | None = None
    status: ReplStatus = "ok"
    message: str = ""
    state_lost: bool = False
    omitted_bytes: int = 0
    background: str = ""

    @property
    def text(self) -> str:
        """The whole result as one text, without the last newline of each part."""
        trace = (
            "" if self.error is None else self.error.traceback or f"{self.error.ename}: {self.error.evalue}"
        )
        label = "[background output since the last call]\n" if self.background.strip() else ""
        parts = (label + self.background, self.stdout, self.stderr, self.value or "", trace, self.message)
        return "\n".join(part.rstrip("\n") for part in parts if part.rstrip("\n"))


class Repl(metaclass=Interface, members=("sandbox", "open", "close", "execute", "interrupt", "restart")):
    """A stateful interpreter in a sandbox. An async context manager.

    `isinstance(item, Repl)` is also true for objects that merely have `sandbox`, `open`, `close`, `execute`,
    `interrupt` and `restart`; see `ensure_repl`.

    Definitions stay until `restart` or `close`. Errors of the code are results, never exceptions.
    """

    name: ClassVar[str] = ""
    sandbox: Sandbox
    cells: list[str]
    """Code that was executed since the start or the last restart, to be run again in a clone."""
    owns_sandbox: bool = False
    """True if closing it closes its sandbox: if it has opened the sandbox, or was created with it."""

    @abstractmethod
    def fresh(self, sandbox: Sandbox | None = None) -> Repl:
        """Return a new, unopened interpreter with the same settings.

        Args:
            sandbox: Its sandbox; None for one of its own.
        """

    @abstractmethod
    async def open(self) -> None:
        """Start the interpreter, and its sandbox if necessary. Do nothing if it is open.

        Raises:
            SandboxError: If it cannot be started.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the interpreter, and its sandbox if it opened that. Do nothing if it is closed."""

    @abstractmethod
    async def execute(self, code: str, *, timeout: float | None = None) -> ReplResult:
        """Run code.

        Code that exceeds its timeout is interrupted. If it does not react, the interpreter is killed and a
        new one starts at the next call. The result reports both. Cancelling does the same.

        If the interpreter ends while a cell runs, that cell has ended it, and the result has the status
        "died". If it ends between two cells, leftovers such as a timer have ended it, and the next result
        reports that state was lost. In both cases a new interpreter serves the next call. From inside a
        sandbox it cannot be determined who killed it, so only losses that no code inside can cause are
        errors.

        Args:
            code: The code.
            timeout: Maximum seconds, waiting for earlier code included; None for no limit.

        Raises:
            InfrastructureError: If the interpreter or its sandbox was lost before any code had run in it, or
                was ended from outside the sandbox. The code did not run to its end; the next call gets a new
                interpreter.
        """

    @abstractmethod
    async def interrupt(self) -> None:
        """Stop the running code, as Ctrl-C would. Definitions stay."""

    @abstractmethod
    async def restart(self) -> None:
        """Forget all definitions. Files stay."""

    async def fork(self, n: int = 1) -> list[Repl]:
        """Create open copies that continue from the current state, each in its own sandbox.

        If the sandbox cannot be cloned with its processes, all cells run again in fresh sandboxes, which then
        get the files of /work. No cell may run meanwhile.

        Args:
            n: Number of copies.

        Raises:
            FilesNotCopied: If code has left more files than fit, or what cannot be copied.
            InfrastructureError: If a copy cannot be made otherwise. If `fork` returns before the copies
                exist, later calls of a copy raise what went wrong.
        """
        sandboxes = await self.sandbox.clones(n)
        clones: list[Repl] = []
        try:
            for sandbox in sandboxes:
                clones.append(await self.continue_in(sandbox, owns=True))
        except BaseException:
            for clone in clones:
                await clone.close()
            for sandbox in sandboxes:
                await sandbox.close()
            raise
        return clones

    async def continue_in(self, sandbox: Sandbox, *, owns: bool = False) -> Repl:
        """Create an open copy of this interpreter in a sandbox that is a clone of its own.

        Args:
            sandbox: The clone.
            owns: Close the sandbox with the copy.
        """
        clone = self.fresh(sandbox)
        await clone.open()
        clone.owns_sandbox = owns
        for code in self.cells:
            await clone.execute(code, timeout=REPLAY_S)
        if self.cells:
            await self.sandbox.copy_files(sandbox)
        return clone

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class StartFailed(SandboxError):
    """An interpreter did not start in a sandbox that works."""
