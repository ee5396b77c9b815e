"""What every sandbox is: a place for commands and files, with nothing of the host's within reach."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Protocol, Self

from torchrl_agentic.sandbox.limits import ResourceLimits

WORK = "/work"
"""Where code in a sandbox starts, and what relative paths are relative to."""


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
    """A long-lived process in a sandbox, with pipes on its stdout and stderr."""

    stdout_fd: int
    stderr_fd: int

    async def kill(self) -> None:
        """End it and everything it started; returns when they are gone. May be called again."""
        ...

    async def wait(self) -> str:
        """Wait until it has ended, and say how, in words for an error message."""
        ...


class Sandbox(ABC):
    """An isolated place that lives from `open` to `close`; an async context manager.

    name: how people choose it. limits: of the whole sandbox.
    """

    name: ClassVar[str] = ""
    isolated: ClassVar[bool] = True
    """Whether code that means harm is kept from the host."""

    def __init__(self, limits: ResourceLimits | None = None) -> None:
        self.limits = limits or ResourceLimits()

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
    async def spawn(self, argv: Sequence[str], *, pass_fds: Sequence[int] = ()) -> Process:
        """Start a long-lived process. It keeps the numbers of `pass_fds`.

        Raises:
            SandboxError: the sandbox failed.
        """

    @abstractmethod
    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file inside, making its folders.

        Raises:
            PermissionError: the path leaves the workspace or goes through a link.
        """

    @abstractmethod
    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file inside, or its first `max_bytes`.

        Raises:
            FileNotFoundError, IsADirectoryError: as for any file.
            PermissionError: the path leaves the workspace, goes through a link, or is no regular file.
        """

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
