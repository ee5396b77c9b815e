"""What every sandbox is: a place for commands and files, with nothing of the host's within reach."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Protocol, Self

from torchrl_agentic.errors import Interface, SandboxError
from torchrl_agentic.sandbox.inside.files import WORK
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits

__all__ = ["CLAIMS", "WORK", "Process", "Sandbox", "SandboxResult", "checked"]

_ARCHIVE = ".torchrl_agentic.tar"
_PACK = 'cd "$1" && find . -mindepth 1 ! -path "./$2" -print0 | tar --null --no-recursion -T - -cf "$2"'
CLAIMS: Mapping[str, str] = {
    "host_files": "read or write files of the host, or of another sandbox, that were not granted",
    "host_metadata": "learn which files the host has, or change their rights and times",
    "host_paths": "learn under which paths of the host lies what it is shown, such as packages",
    "host_processes": "see, signal or share memory with processes of the host or of another sandbox",
    "network": "reach a network that was not granted",
    "privileges": "gain rights, change the machine, or use parts of the kernel that only attacks need",
    "file_locks": "lock files that host or other sandboxes have in common with it, with flock(2)",
    "terminal": "use terminals of the trainer or of another sandbox",
    "memory": "take more memory than its limits",
    "cpu": "take more processor time than its limits",
    "leftover_cpu": "take more processor time than the limit with what a cell leaves running behind it",
    "processes": "run more processes than its limits",
    "file_size": "take more space in files than its limits",
    "daemons": "let processes outlive the command that started them by leaving its session",
    "killed_trainer": "run on after the trainer has ended without closing the sandbox",
}
"""What code that means harm would do, by name. A sandbox stops all of it but what its `cannot` names."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a command ended.

    exit_code: negative for a signal; 127: there was no such command. wall_seconds: how long it took.
    timed_out: it was stopped at its wall limit. truncated: output was cut in the middle, the omitted bytes
    are counted in the text.
    artifacts: files that it made, where a backend gives them.
    """

    stdout: str
    stderr: str
    exit_code: int
    wall_seconds: float
    timed_out: bool = False
    truncated: bool = False
    artifacts: Mapping[str, bytes] | None = None


class Process(Protocol):
    """A long-lived process in a sandbox; we write its stdin and read its stdout."""

    async def send(self, data: bytes) -> None:
        """Write to its stdin; returns when there is room for more.

        Raises:
            EOFError: it reads no more.
        """
        ...

    async def receive(self) -> bytes:
        """Read what it wrote to stdout, as soon as there is anything; empty at the end."""
        ...

    async def kill(self) -> None:
        """End it and everything it started; returns when they are gone. May be called again."""
        ...

    async def wait(self) -> str:
        """Wait until it has ended, and say how, in words for an error message."""
        ...

    def errors(self) -> str:
        """Head and tail of what it wrote to stderr so far."""
        ...


class Sandbox(metaclass=Interface, members=("limits", "open", "close", "run", "write_file", "read_file")):
    """An isolated place that lives from `open` to `close`; an async context manager.

    `isinstance(item, Sandbox)` is true of look-alikes too: objects with `limits`, `open`, `close`, `run`,
    `write_file` and `read_file`; see `ensure_sandbox`.

    name: how people choose it. limits: of the whole sandbox.
    """

    name: ClassVar[str] = ""
    isolated: ClassVar[bool] = True
    """Whether code that means harm is kept from the host."""
    network: ClassVar[frozenset[Network]] = frozenset({"none"})
    """The kinds of network that `limits.network` may ask for; others are a ValueError at construction."""
    fork: ClassVar[bool] = False
    """Whether it can be cloned with the memory of what runs in it; where not, cells are run again."""
    files: ClassVar[bool] = True
    """Whether what one command writes into /work is there for the next one."""
    losses: int = 0
    """How often all that it held was lost, files too; each time it went on empty."""
    cannot: ClassVar[frozenset[str]] = frozenset()
    """What it does not stop, of `CLAIMS`. The conformance cases hold it to all the rest."""

    def __init__(self, limits: ResourceLimits | None = None) -> None:
        self.limits = limits or ResourceLimits()
        if self.limits.network not in self.network:
            kinds = " or ".join(repr(kind) for kind in sorted(self.network))
            raise ValueError(f"{type(self).__name__} offers the network {kinds}, not {self.limits.network!r}")

    @property
    @abstractmethod
    def limits_enforced(self) -> Mapping[str, bool]:
        """Say of each limit, by name, whether it holds here; "memory_total" is that of all processes."""

    @abstractmethod
    def fresh(self) -> Sandbox:
        """Make another one with the same settings, not open yet."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether it can be used."""

    @abstractmethod
    async def open(self) -> None:
        """Make ready; opening what is open does nothing.

        Raises:
            SandboxError: it cannot work on this machine; the message says what is missing.
        """

    @abstractmethod
    async def close(self) -> None:
        """End all processes and remove all files; closing what is closed does nothing."""

    @abstractmethod
    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        limits: ResourceLimits | None = None,
    ) -> SandboxResult:
        """Run one command to its end. `limits` can only narrow those of the sandbox; `cwd` is a path inside.

        Raises:
            SandboxError: the sandbox failed, not the command.
            ValueError: argv is empty or holds a null character.
        """

    @abstractmethod
    async def spawn(self, argv: Sequence[str]) -> Process:
        """Start a long-lived process; it ends with the sandbox at the latest.

        Raises:
            SandboxError: the sandbox failed.
        """

    async def was_ended_outside(self, ended: str) -> bool:
        """Return whether something outside ended a process of `spawn`, for sure: code inside cannot.

        Args:
            ended: How it ended, from `Process.wait`.
        """
        return False

    @abstractmethod
    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file below /work, or below a folder in `fs_write_roots`, making its folders.

        Raises:
            PermissionError: the path lies elsewhere, or goes through a link.
        """

    @abstractmethod
    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file below /work, or below a folder that the limits grant, or its first `max_bytes`.

        Raises:
            FileNotFoundError, IsADirectoryError: as for any file.
            PermissionError: the path lies elsewhere, goes through a link, or is no regular file.
        """

    async def clones(self, n: int) -> Sequence[Sandbox]:
        """Make open sandboxes of the same kind that hold the same files below /work.

        With `fork`, they hold the live interpreter too.

        Raises:
            SandboxError: they cannot be made.
        """
        clones: list[Sandbox] = []
        try:
            for _ in range(n):
                clone = self.fresh()
                clones.append(clone)
                await clone.open()
                await self.copy_files(clone)
        except BaseException:
            for clone in clones:
                await clone.close()
            raise
        return clones

    async def copy_files(self, other: Sandbox) -> None:
        """Let the /work of another open sandbox hold what ours holds, besides what it has.

        Raises:
            SandboxError: it holds more than the other one takes.
        """
        await self._pack_up("sh", "-c", _PACK, "sh", WORK, _ARCHIVE)
        await other.write_file(_ARCHIVE, await self.read_file(_ARCHIVE))
        await self._pack_up("rm", "-f", f"{WORK}/{_ARCHIVE}")
        await other._pack_up("tar", "-C", WORK, "--overwrite", "-xf", f"{WORK}/{_ARCHIVE}")
        await other._pack_up("rm", "-f", f"{WORK}/{_ARCHIVE}")

    async def _pack_up(self, *argv: str) -> None:
        result = await self.run(argv)
        if result.exit_code:
            raise SandboxError(f"files cannot be copied: {result.stderr.strip() or result.exit_code}")

    @property
    def python_argv(self) -> tuple[str, ...]:
        """The command that starts Python inside."""
        return ("python3",)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def checked(argv: Sequence[str]) -> list[str]:
    """Refuse a command that cannot be passed on.

    Raises:
        ValueError: it is empty, no list of strings, or holds a null character.
    """
    if isinstance(argv, str) or not argv:
        raise ValueError("a command is a non-empty list of strings, e.g. ['ls', '-l']")
    words = list(argv)
    for word in words:
        if "\0" in word:
            raise ValueError("a command cannot hold a null character")
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ValueError("a command cannot hold half of a surrogate pair") from None
    return words
