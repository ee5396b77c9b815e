"""What every interpreter is: it runs code, keeps what the code defined, and says what came of it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from torchrl_agentic.errors import Interface
from torchrl_agentic.sandbox import Sandbox

ReplStatus = Literal["ok", "error", "timeout", "died", "limit"]
KEPT = "interpreter state is kept"
LOST = "interpreter state was lost (files in /work are kept)"
ALL_LOST = "interpreter state and all files were lost"
REPLAY_S = 60.0
"""How long each cell may take when cells are run again for a clone."""


@dataclass(frozen=True, slots=True)
class ReplDisplay:
    """Something that code showed other than by printing: an image, say."""

    media_type: str
    data: Any


@dataclass(frozen=True, slots=True)
class ReplError:
    """An exception that code let through: the name of its type, its text, its traceback through the cells."""

    ename: str
    evalue: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class ReplResult:
    """What came of running some code.

    value: the repr of its last line, if that is an expression that is not None. message: what the interpreter
    itself has to say: that the code was stopped, or that state was lost. execution_count: numbers the cells
    from 1; -1 if the code did not run. state_lost: whether what earlier cells defined is gone. omitted_bytes:
    output that was cut. background: what earlier cells left running has printed since the last call. status:
    "died" if the interpreter ended, "limit" if it was stopped for what it used.
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
        """All of it as one text, without the last newline of each part."""
        trace = (
            "" if self.error is None else self.error.traceback or f"{self.error.ename}: {self.error.evalue}"
        )
        label = "[background output since the last call]\n" if self.background.strip() else ""
        parts = (label + self.background, self.stdout, self.stderr, self.value or "", trace, self.message)
        return "\n".join(part.rstrip("\n") for part in parts if part.rstrip("\n"))


class Repl(metaclass=Interface, members=("sandbox", "open", "close", "execute", "interrupt", "restart")):
    """A stateful interpreter in a sandbox; an async context manager.

    `isinstance(item, Repl)` is true of look-alikes too: objects with a `sandbox`, `open`, `close`, `execute`,
    `interrupt` and `restart`; see `ensure_repl`.

    What code defines stays until `restart` or `close`. Errors of the code are results, never exceptions.
    """

    name: ClassVar[str] = ""
    sandbox: Sandbox
    cells: list[str]
    """What was executed since the beginning or the last restart, to be run again in a clone."""
    owns_sandbox: bool = False
    """Whether closing it closes its sandbox: if it has opened that, or was made with it."""

    @abstractmethod
    def fresh(self, sandbox: Sandbox | None = None) -> Repl:
        """Make another one with the same settings, not open yet, in a sandbox of its own or in this one."""

    @abstractmethod
    async def open(self) -> None:
        """Start it, and its sandbox if need be; opening what is open does nothing.

        Raises:
            SandboxError: it cannot be started.
        """

    @abstractmethod
    async def close(self) -> None:
        """End it, and its sandbox if it opened that; closing what is closed does nothing."""

    @abstractmethod
    async def execute(self, code: str, *, timeout: float | None = None) -> ReplResult:
        """Run code. The time, in seconds, covers waiting for earlier code too.

        Code that exceeds it is interrupted; if it does not react, the interpreter is killed and begins anew
        at the next call. Either way the result says so. Cancelling does the same.

        An interpreter that ends while a cell runs was ended by that cell: the result has the status "died".
        One that ends between two cells was ended by what they left, say a timer: the next result says that
        state was lost. Either way a new interpreter serves the next call. Whether somebody else killed it
        cannot be told from inside a sandbox, so only losses that no code inside can cause are errors.

        Raises:
            InfrastructureError: The interpreter or its sandbox was lost before any code had run in it, or was
                ended by what lies outside of the sandbox. The code was not run to its end; the next call gets
                a new interpreter.
        """

    @abstractmethod
    async def interrupt(self) -> None:
        """Stop the code that runs now, as Ctrl-C would; what was defined stays."""

    @abstractmethod
    async def restart(self) -> None:
        """Forget all that was defined. Files stay."""

    async def fork(self, n: int = 1) -> list[Repl]:
        """Make open copies that go on from here, each in a sandbox of its own.

        Where the sandbox cannot be cloned with what lives in it, all cells are run again in fresh ones, which
        then get the files from /work. No cell may run meanwhile.

        Raises:
            InfrastructureError: a copy cannot be made. Interpreters whose `fork` returns before there are any
                tell whoever uses one.
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
        """Make an open copy of this interpreter in a sandbox that is a clone of ours.

        owns: whether closing the copy closes the sandbox.
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
