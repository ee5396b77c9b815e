"""`Sandbox`, the interface of all sandboxes: run commands and keep files, out of reach of the host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Protocol, Self

from torchrl_agentic.errors import FilesNotCopied, Interface, PathNotGranted
from torchrl_agentic.sandbox.inside.files import WORK, locate
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits

__all__ = [
    "THREATS",
    "WORK",
    "Process",
    "Sandbox",
    "SandboxResult",
    "check_argv",
    "enforced",
    "granted_place",
]

_ARCHIVE = ".torchrl_agentic.tar"
_PACK = 'cd "$1" && find . -mindepth 1 ! -path "./$2" -print0 | tar --null --no-recursion -S -T - -cf "$2"'
THREATS: Mapping[str, str] = {
    "host_files": "read or write files of the host, or of another sandbox, that were not granted",
    "host_metadata": "learn which files the host has, or change their rights and times",
    "host_paths": "learn the paths on the host of folders that it is shown, such as packages",
    "host_processes": "see, signal or share memory with processes of the host or of another sandbox",
    "network": "reach a network that was not granted",
    "privileges": "gain rights, change the machine, or use parts of the kernel that only attacks need",
    "file_locks": "lock files that it shares with the host or with other sandboxes, by flock(2)",
    "terminal": "use terminals of the trainer or of another sandbox",
    "memory": "take more memory than its limits",
    "cpu": "take more processor time than its limits",
    "leftover_cpu": "take more processor time than the limit with processes that a cell leaves running",
    "processes": "run more processes than its limits",
    "file_size": "take more space in files than its limits",
    "daemons": "let processes outlive the command that started them by leaving its session",
    "killed_trainer": "run on after the trainer has ended without closing the sandbox",
}
"""What hostile code may try, by name. A sandbox stops all of it except the threats in its `not_stopped`."""


_LIMITS = (
    "cpu_seconds", "memory_bytes", "memory_total", "max_processes", "disk_bytes", "disk_total", "network",
    "seccomp",
)  # fmt: skip


def enforced(*names: str, **others: bool) -> Mapping[str, bool]:
    """Return the `limits_enforced` of a sandbox.

    Args:
        names: Limits that are enforced.
        others: Whether further ones are; all others are not.
    """
    return {name: others.get(name, name in names) for name in _LIMITS}


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The result of a command.

    Attributes:
        stdout: Standard output as text; invalid UTF-8 is replaced.
        stderr: Standard error as text.
        exit_code: Exit code; -n if signal n ended the command, 127 if the command does not exist.
        wall_seconds: Duration of the command.
        timed_out: True if the command was stopped at its wall limit.
        truncated: True if the middle of an output was cut. The text then states how many bytes are omitted.
        artifacts: Contents of files that the command wrote, by path, or None if the backend does not report
            them.
    """

    stdout: str
    stderr: str
    exit_code: int
    wall_seconds: float
    timed_out: bool = False
    truncated: bool = False
    artifacts: Mapping[str, bytes] | None = None


class Process(Protocol):
    """A long-lived process in a sandbox, driven through its stdin and stdout."""

    async def send(self, data: bytes) -> None:
        """Write to the stdin of the process. Return when there is room for more.

        Args:
            data: Bytes to write.

        Raises:
            EOFError: If the process has closed its stdin.
        """
        ...

    async def receive(self) -> bytes:
        """Return output of the process as soon as there is any; b"" at the end of its stdout."""
        ...

    async def kill(self) -> None:
        """Kill the process and everything that it started. Return when they have ended."""
        ...

    async def wait(self) -> str:
        """Wait until the process has ended. Return how it ended, worded for an error message."""
        ...

    def errors(self) -> str:
        """Return the head and the tail of what the process has written to stderr so far."""
        ...


class Sandbox(metaclass=Interface, members=("limits", "open", "close", "run", "write_file", "read_file")):
    """An isolated place for commands and files, from `open` to `close`. An async context manager.

    `isinstance(item, Sandbox)` is also true for objects that merely have `limits`, `open`, `close`, `run`,
    `write_file` and `read_file`; see `ensure_sandbox`.

    Attributes:
        name: Name by which users select this kind of sandbox.
        limits: Limits of the whole sandbox.
    """

    name: ClassVar[str] = ""
    isolated: ClassVar[bool] = True
    """True if hostile code is kept from the host."""
    network: ClassVar[frozenset[Network]] = frozenset({"none"})
    """Values that `limits.network` may have; any other raises ValueError in the constructor."""
    fork: ClassVar[bool] = False
    """True if clones keep the memory of the interpreter; otherwise a clone runs all cells again."""
    files: ClassVar[bool] = True
    """True if files that one command writes to /work are there for the next command."""
    losses: int = 0
    """Number of times that the sandbox lost all processes and files and continued empty."""
    not_stopped: ClassVar[frozenset[str]] = frozenset()
    """Names from `THREATS` that this sandbox does not stop. The conformance cases test all others."""
    unenforced: ClassVar[Mapping[str, str]] = {}
    """Why this kind of sandbox does not enforce a limit, by its name; see `tiers.why_not_enforced`."""

    def __init__(self, limits: ResourceLimits | None = None) -> None:
        self.limits = limits or ResourceLimits()
        if self.limits.network not in self.network:
            kinds = " or ".join(repr(kind) for kind in sorted(self.network))
            raise ValueError(
                f"{type(self).__name__} supports the networks {kinds}; got {self.limits.network!r}"
            )

    @property
    @abstractmethod
    def limits_enforced(self) -> Mapping[str, bool]:
        """Map each limit to whether it is enforced here; "memory_total" is that of all processes together."""

    @abstractmethod
    def fresh(self) -> Sandbox:
        """Return a new, unopened sandbox with the same settings."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Return whether the sandbox can be used."""

    @abstractmethod
    async def open(self) -> None:
        """Open the sandbox. Do nothing if it is open.

        Raises:
            SandboxError: If it cannot work on this machine. The message says what is missing.
        """

    @abstractmethod
    async def close(self) -> None:
        """End all processes and remove all files. Do nothing if the sandbox is closed."""

    @abstractmethod
    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        limits: ResourceLimits | None = None,
    ) -> SandboxResult:
        """Run one command and wait until it ends.

        Args:
            argv: The command and its arguments.
            stdin: Standard input of the command; None for empty input.
            cwd: Working folder, a path inside the sandbox; None for /work.
            limits: Limits of this command; they can only narrow those of the sandbox. None for those.

        Raises:
            SandboxError: If the sandbox failed. A command that fails is a result.
            ValueError: If `argv` is empty or contains a null character.
        """

    @abstractmethod
    async def spawn(self, argv: Sequence[str]) -> Process:
        """Start a long-lived process. It ends with the sandbox at the latest.

        Args:
            argv: The command and its arguments.

        Raises:
            SandboxError: If the sandbox failed.
        """

    async def was_ended_outside(self, ended: str) -> bool:
        """Return whether something outside, which code inside cannot reach, ended a process of `spawn`.

        Args:
            ended: How the process ended, from `Process.wait`.
        """
        return False

    @abstractmethod
    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file below /work or below a folder of `limits.fs_write_roots`, and create its folders.

        Args:
            path: Path inside; relative paths start at /work.
            data: Content of the file.

        Raises:
            PathNotGranted: If the path lies elsewhere; it is a ToolError and a PermissionError.
            PermissionError: If the path goes through a link.
        """

    @abstractmethod
    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file below /work or below a folder that the limits grant.

        Args:
            path: Path inside; relative paths start at /work.
            max_bytes: Maximum number of bytes to read, from the start; None for the whole file.

        Raises:
            FileNotFoundError: If there is no such file.
            IsADirectoryError: If the path is a folder.
            PathNotGranted: If the path lies elsewhere; it is a ToolError and a PermissionError.
            PermissionError: If the path goes through a link, or is not a regular file.
        """

    async def clones(self, n: int) -> Sequence[Sandbox]:
        """Create open sandboxes of the same kind with copies of the files below /work.

        If `fork` is True, they also have copies of the running interpreter.

        Args:
            n: Number of sandboxes.

        Raises:
            FilesNotCopied: If code inside has left more than fits, or what cannot be copied.
            SandboxError: If they cannot be created.
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
        """Copy the files below /work into another open sandbox. Its other files stay.

        Args:
            other: The sandbox to copy to.

        Raises:
            FilesNotCopied: If code inside has left more than fits, or what cannot be copied.
            SandboxError: If a sandbox is lost.
        """
        await self._pack_up("sh", "-c", _PACK, "sh", WORK, _ARCHIVE)
        try:
            await other.write_file(_ARCHIVE, await self.read_file(_ARCHIVE))
        except OSError as error:  # code inside has replaced the archive, or it does not fit
            raise FilesNotCopied(f"files cannot be copied: {error}") from error
        await self._pack_up("rm", "-f", f"{WORK}/{_ARCHIVE}")
        await other._pack_up("tar", "-C", WORK, "--overwrite", "-xf", f"{WORK}/{_ARCHIVE}")
        await other._pack_up("rm", "-f", f"{WORK}/{_ARCHIVE}")

    async def _pack_up(self, *argv: str) -> None:
        result = await self.run(argv)
        if result.exit_code:
            raise FilesNotCopied(f"files cannot be copied: {result.stderr.strip() or result.exit_code}")

    @property
    def python_argv(self) -> tuple[str, ...]:
        """Return the command that starts Python inside."""
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


def granted_place(path: str, roots: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Split a path inside the sandbox at the innermost granted folder that contains it, or at /work.

    Args:
        path: The path.
        roots: Granted folders.

    Returns:
        The folder, and the steps from it to the path.

    Raises:
        PathNotGranted: If the path lies elsewhere.
    """
    try:
        return locate(path, roots)
    except PermissionError as error:
        raise PathNotGranted(f"{error}; granted folders: {', '.join(roots) or 'none'}") from None


def check_argv(argv: Sequence[str]) -> list[str]:
    """Check a command and return it as a list.

    Args:
        argv: The command and its arguments.

    Raises:
        ValueError: If it is empty, is not a sequence of strings, or contains a null character or half of a
            surrogate pair.
    """
    if isinstance(argv, str) or not argv:
        raise ValueError(
            f"expected a command as a non-empty list of strings, e.g. ['ls', '-l']; got {argv!r}"
        )
    words = list(argv)
    for word in words:
        if "\0" in word:
            raise ValueError(f"a command cannot contain a null character; got {word[:100]!r}")
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"a command cannot contain half of a surrogate pair; got {word[:100]!a}"
            ) from None
    return words
