"""What sandboxes on this host share: a private folder for the files, and processes that are ours to end."""

from __future__ import annotations

from typing import TypeVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox import cgroups
from torchrl_agentic.sandbox.base import Sandbox, SandboxResult
from torchrl_agentic.sandbox.cancellation import off_loop
from torchrl_agentic.sandbox.process import Child, Command, Ended, run_to_end
from torchrl_agentic.sandbox.resource_limits import ResourceLimits
from torchrl_agentic.sandbox.workspace import Workspace

C = TypeVar("C", bound=Child)


class FolderSandbox(Sandbox):
    """A sandbox with its files in a `Workspace`, and its processes in a group that bounds their memory.

    A subclass calls `_make_place` in `open`, and hands the children it starts to `_keep` or `_run_to_end`.
    """

    def __init__(self, limits: ResourceLimits | None = None) -> None:
        super().__init__(limits)
        self._workspace: Workspace | None = None
        self._group: cgroups.MemoryGroup | None = None
        self._children: set[Child] = set()

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._workspace is not None

    async def close(self) -> None:
        """End all processes and remove all files."""
        children, self._children = self._children, set()
        for child in children:
            await child.kill()
        workspace, self._workspace = self._workspace, None
        group, self._group = self._group, None
        if workspace is not None:
            await off_loop(workspace.remove)
        if group is not None:
            await off_loop(group.remove)

    def _make_place(self) -> None:
        """Make the folder for files and, where one can be made, the control group for processes."""
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

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file inside."""
        await off_loop(self._opened().write, path, data)

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file inside."""
        return await off_loop(self._opened().read, path, max_bytes)

    async def copy_files(self, other: Sandbox) -> None:
        """Let the /work of another open sandbox hold what ours holds, besides what it has."""
        if isinstance(other, FolderSandbox):
            await off_loop(self._opened().copy_to, other._opened())
        else:
            await super().copy_files(other)

    def _opened(self) -> Workspace:
        if self._workspace is None:
            raise SandboxError("the sandbox is not open: use 'async with', or call open() first")
        return self._workspace

    def _keep(self, child: C) -> C:
        """Take note of a child, to end it at `close`; those that have ended are forgotten."""
        self._children = {other for other in self._children if other.process.returncode is None} | {child}
        return child

    async def _run_to_end(self, child: Command, limits: ResourceLimits) -> Ended:
        """Wait for a child within its limits, and let `close` end it meanwhile."""
        self._keep(child)
        try:
            return await run_to_end(child, timeout=limits.wall_seconds, output_bytes=limits.output_bytes)
        finally:
            self._children.discard(child)


def result_of(ended: Ended, code: int | None) -> SandboxResult:
    """Make the result of a command.

    code: negative for a signal; None where it was killed before it had one.
    """
    return SandboxResult(
        stdout=ended.stdout.text(),
        stderr=ended.stderr.text(),
        exit_code=-9 if ended.code is None or code is None else code,
        wall_seconds=ended.wall_s,
        timed_out=ended.code is None,
        truncated=bool(ended.stdout.omitted or ended.stderr.omitted),
    )
