"""`FolderSandbox`: base of sandboxes on this host with a private folder and child processes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox import cgroups
from torchrl_agentic.sandbox.base import Sandbox, SandboxResult, check_argv
from torchrl_agentic.sandbox.cancellation import run_in_thread
from torchrl_agentic.sandbox.process import Child, CommandProcess, CompletedCommand, communicate
from torchrl_agentic.sandbox.resource_limits import ResourceLimits
from torchrl_agentic.sandbox.workspace import Workspace

C = TypeVar("C", bound=Child)


class FolderSandbox(Sandbox):
    """A sandbox with files in a `Workspace` and processes in a control group that limits their memory.

    A subclass calls `_make_place` in `open`, and passes the children that it starts to `_keep` or
    `_communicate`.
    """

    unenforced: ClassVar[Mapping[str, str]] = {
        "disk_total": "the files are in a folder of the host, which has no quota",
        "max_processes": "the system counts the processes of the whole user",
        "memory_bytes": "the system has no such limit",
        "seccomp": "there is no filter for this system or processor",
    }

    def __init__(self, limits: ResourceLimits | None = None) -> None:
        super().__init__(limits)
        self._workspace: Workspace | None = None
        self._group: cgroups.MemoryGroup | None = None
        self._children: set[Child] = set()

    @property
    def is_open(self) -> bool:
        """Return whether the sandbox can be used."""
        return self._workspace is not None

    async def close(self) -> None:
        """End all processes and remove all files."""
        children, self._children = self._children, set()
        for child in children:
            await child.kill()
        workspace, self._workspace = self._workspace, None
        group, self._group = self._group, None
        if workspace is not None:
            await run_in_thread(workspace.remove)
        if group is not None:
            await run_in_thread(group.remove)

    def _make_place(self) -> None:
        """Create the folder for files and, if possible, the control group for processes."""
        total = self.limits.memory_total_bytes
        try:
            if total is not None and cgroups.why_not() is None:
                self._group = cgroups.MemoryGroup(total)
            self._workspace = Workspace(self.limits)
        except OSError as error:
            group, self._group = self._group, None
            if group is not None:
                group.remove(patience_s=0)
            raise SandboxError(f"the sandbox cannot be opened: {error}") from error

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        limits: ResourceLimits | None = None,
    ) -> SandboxResult:
        """Run one command and wait until it ends; see `Sandbox.run`.

        Args:
            argv: The command and its arguments.
            stdin: Standard input of the command; None for empty input.
            cwd: Working folder, a path inside the sandbox; None for /work.
            limits: Limits of this command; they can only narrow those of the sandbox. None for those.
        """
        narrowed = self.limits.narrow(limits)
        self._opened()
        return await self._run(check_argv(argv), narrowed, stdin, cwd)

    @abstractmethod
    async def _run(
        self, argv: Sequence[str], limits: ResourceLimits, stdin: bytes | None, cwd: str | None
    ) -> SandboxResult:
        """Run a command within limits that are narrowed already."""

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file inside."""
        await run_in_thread(self._opened().write, path, data)

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file inside."""
        return await run_in_thread(self._opened().read, path, max_bytes)

    async def copy_files(self, other: Sandbox) -> None:
        """Copy the files below /work into another open sandbox."""
        if isinstance(other, FolderSandbox):
            await run_in_thread(self._opened().copy_to, other._opened())
        else:
            await super().copy_files(other)

    def _opened(self) -> Workspace:
        if self._workspace is None:
            raise SandboxError("the sandbox is not open: use 'async with', or call open() first")
        return self._workspace

    def _keep(self, child: C) -> C:
        """Register a child, so that `close` ends it, and forget those that have ended."""
        self._children = {other for other in self._children if other.process.returncode is None} | {child}
        return child

    async def _communicate(self, child: CommandProcess, limits: ResourceLimits) -> CompletedCommand:
        """Wait for a child within its limits. `close` ends it meanwhile."""
        self._keep(child)
        try:
            return await communicate(child, timeout=limits.wall_seconds, output_bytes=limits.output_bytes)
        finally:
            self._children.discard(child)


def result_of(ended: CompletedCommand, code: int | None) -> SandboxResult:
    """Return the result of a command.

    Args:
        ended: The command.
        code: Its exit code, -n for signal n; None if it was killed before it had one.
    """
    return SandboxResult(
        stdout=ended.stdout.text(),
        stderr=ended.stderr.text(),
        exit_code=-9 if ended.code is None or code is None else code,
        wall_seconds=ended.wall_s,
        timed_out=ended.code is None,
        truncated=bool(ended.stdout.omitted or ended.stderr.omitted),
    )
