"""No sandbox at all: plain processes on the host, for code that you have read.

Stops:
- nothing; wall time, output and leftovers of a command are bounded, so that programs behave
Does not stop:
- anything that your user may do on this machine
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.base import CLAIMS, SandboxResult, checked
from torchrl_agentic.sandbox.process import Served, serve, start
from torchrl_agentic.sandbox.python_runtime import env_on_host, find_python
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits
from torchrl_agentic.sandbox.workspace import Workspace, inside
from torchrl_agentic.sandbox.workspace_folder import FolderSandbox, result_of


class UnsafeSubprocessSandbox(FolderSandbox):
    """Runs commands as plain processes, with all the rights you have. It warns each time it opens.

    Files live in a private folder, which is the working folder; paths to tools and Python are the host's.
    """

    name: ClassVar[str] = "unsafe"
    isolated: ClassVar[bool] = False
    network: ClassVar[frozenset[Network]] = frozenset({"none", "loopback", "allowlist", "full"})
    cannot: ClassVar[frozenset[str]] = frozenset(CLAIMS)

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Which limits hold here: none."""
        names = ("cpu_seconds", "memory_bytes", "memory_total", "max_processes", "disk_bytes", "disk_total")
        return dict.fromkeys((*names, "network", "seccomp"), False)

    def fresh(self) -> UnsafeSubprocessSandbox:
        """Make another one with the same settings, not open yet."""
        return UnsafeSubprocessSandbox(self.limits)

    async def open(self) -> None:
        """Make ready, and say that this is no sandbox."""
        if self._workspace is None:
            warnings.warn(
                "UnsafeSubprocessSandbox runs code with all your rights; for a model's use BubblewrapSandbox",
                stacklevel=2,
            )
            self._workspace = Workspace(self.limits)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        limits: ResourceLimits | None = None,
    ) -> SandboxResult:
        """Run one command to its end."""
        effective = self.limits.narrow(limits)
        folder = self._opened().path
        start_in = os.path.join(folder, *inside(cwd or "."))
        env = env_on_host(effective, folder)
        try:
            command = await start(checked(argv), env=env, cwd=start_in, stdin=stdin)
        except OSError as error:
            return SandboxResult("", str(error), 127, 0.0)
        ended = await self._run_to_end(command, effective)
        return result_of(ended, ended.code)

    async def spawn(self, argv: Sequence[str]) -> Served:
        """Start a long-lived process."""
        folder = self._opened().path
        env = env_on_host(self.limits, folder)
        try:
            served = await serve(checked(argv), env=env, cwd=folder)
        except OSError as error:
            raise SandboxError(f"{argv[0]} cannot be started: {error}") from error
        return self._keep(served)

    @property
    def python_argv(self) -> tuple[str, ...]:
        """The command that starts Python."""
        found = find_python()
        return (found[0],) if found is not None else super().python_argv
