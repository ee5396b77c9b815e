"""`UnsafeSubprocessSandbox`: plain processes on the host without isolation, for code that you have read.

Stops:
- nothing; wall time, output and leftovers of a command are bounded, for well-behaved programs
Does not stop:
- anything that your user may do on this machine
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torchrl_agentic.errors import SandboxError, check_posix
from torchrl_agentic.sandbox.base import THREATS, SandboxResult, check_argv, enforced
from torchrl_agentic.sandbox.process import ServerProcess, start_command, start_server
from torchrl_agentic.sandbox.python_runtime import env_on_host
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits
from torchrl_agentic.sandbox.workspace import Workspace, inside
from torchrl_agentic.sandbox.workspace_folder import FolderSandbox, result_of


class UnsafeSubprocessSandbox(FolderSandbox):
    """Run commands as plain processes with all rights of your user. It warns each time it opens.

    Files are in a private folder, which is the working folder; paths to tools and Python are those of the
    host.
    """

    name: ClassVar[str] = "unsafe"
    isolated: ClassVar[bool] = False
    network: ClassVar[frozenset[Network]] = frozenset({"none", "loopback", "allowlist", "full"})
    not_stopped: ClassVar[frozenset[str]] = frozenset(THREATS)
    unenforced: ClassVar[Mapping[str, str]] = dict.fromkeys(enforced(), "it isolates nothing")

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Map each limit to False: none is enforced."""
        return enforced()

    def fresh(self) -> UnsafeSubprocessSandbox:
        """Return a new, unopened sandbox with the same settings."""
        return UnsafeSubprocessSandbox(self.limits)

    async def open(self) -> None:
        """Create the private folder, and warn that nothing is isolated."""
        check_posix("UnsafeSubprocessSandbox")
        if self._workspace is None:
            warnings.warn(
                "UnsafeSubprocessSandbox runs code with all your rights; for a model use default_sandbox()",
                stacklevel=2,
            )
            self._workspace = Workspace(self.limits)

    async def _run(
        self, argv: Sequence[str], limits: ResourceLimits, stdin: bytes | None, cwd: str | None
    ) -> SandboxResult:
        folder = self._opened().path
        start_in = os.path.join(folder, *inside(cwd or "."))
        env = env_on_host(limits, folder)
        try:
            command = await start_command(argv, env=env, cwd=start_in, stdin=stdin)
        except OSError as error:
            return SandboxResult("", str(error), 127, 0.0)
        ended = await self._communicate(command, limits)
        return result_of(ended, ended.code)

    async def spawn(self, argv: Sequence[str]) -> ServerProcess:
        """Start a long-lived process."""
        folder = self._opened().path
        env = env_on_host(self.limits, folder)
        try:
            server = await start_server(check_argv(argv), env=env, cwd=folder)
        except OSError as error:
            raise SandboxError(f"{argv[0]} cannot be started: {error}") from error
        return self._keep(server)

    @property
    def python_argv(self) -> tuple[str, ...]:
        """Return the command that starts Python: the running one, with the packages of its environment."""
        return (sys.executable,) if sys.executable else super().python_argv
