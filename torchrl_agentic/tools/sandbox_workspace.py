"""`WorkspaceTool` and `FileExchange`: tools of a trajectory that share a sandbox and its files."""

from __future__ import annotations

import asyncio
import copy
import mimetypes
import weakref
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self, cast

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import FileRefPart
from torchrl_agentic.sandbox import Sandbox, default_sandbox
from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.duck_typed_sandbox import ensure_template
from torchrl_agentic.sandbox.workspace import inside
from torchrl_agentic.tools.base import Tool, ToolContext
from torchrl_agentic.tools.per_trajectory import PerTrajectory


class _SharedSandbox:
    """A sandbox that the tools of one trajectory share."""

    def __init__(self, template: Sandbox) -> None:
        self.sandbox = template.fresh()
        self._opening = asyncio.Lock()

    async def open(self, like: Sandbox | None) -> Sandbox:
        """Open the sandbox unless it is open, as a clone of `like` if that is given."""
        async with self._opening:
            if like is not None and not self.sandbox.is_open:
                (self.sandbox,) = await like.clones(1)
            await self.sandbox.open()
        return self.sandbox


_workspaces = PerTrajectory[_SharedSandbox]()


@asynccontextmanager
async def shared_sandbox(
    template: Sandbox, trajectory: str, *, like: Sandbox | None = None, is_default: bool = False
) -> AsyncGenerator[Sandbox]:
    """Open a fresh sandbox of a template's kind, or the one that another tool of this trajectory has open.

    The last tool to leave closes it.

    Args:
        template: The kind of the sandbox; tools with the same template share it.
        trajectory: Name of the trajectory.
        like: An open sandbox of another trajectory, to clone instead.
        is_default: Whether the tool was given no sandbox: all such tools of a trajectory share one.
    """
    owner = None if is_default else template
    member = _workspaces.join(trajectory, lambda: _SharedSandbox(template), owner=owner)
    try:
        yield await member.value.open(like)
    finally:
        if member.leave():
            await member.value.sandbox.close()


class WorkspaceTool(Tool):
    """A tool that works in a sandbox: one per trajectory, shared by the tools with the same template.

    Effects on the resource "workspace" keep writes and reads in order.

    Args:
        sandbox: Template of a sandbox, as for `PythonTool`. None: `default_sandbox()`; all tools of a
            trajectory that are given None share one sandbox. Tools that are used by hand, outside of any
            trajectory, share nothing.

    Raises:
        TypeError: If `sandbox` is not a sandbox, or a look-alike that lacks a member.
        SandboxError: If no sandbox is given and none works on this machine.
    """

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self.shares_default = sandbox is None
        self.sandbox = default_sandbox() if sandbox is None else ensure_template(sandbox)

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Self]:
        """Open a sandbox for this trajectory, or share the one that another tool has opened."""
        async with shared_sandbox(self.sandbox, trajectory, is_default=self.shares_default) as sandbox:
            yield self._in(sandbox)

    @asynccontextmanager
    async def branch(self, live: Tool, trajectory: str) -> AsyncGenerator[Self]:
        """Open a clone of another trajectory's sandbox, or share the one that another tool has opened."""
        assert isinstance(live, WorkspaceTool)
        async with shared_sandbox(
            self.sandbox, trajectory, like=live.sandbox, is_default=self.shares_default
        ) as sandbox:
            yield self._in(sandbox)

    def _in(self, sandbox: Sandbox) -> Self:
        live = copy.copy(self)
        live.sandbox = sandbox
        return live

    async def teardown(self) -> None:
        """Close the sandbox if the tool was used by hand."""
        await self.sandbox.close()


MAX_OUTPUTS = 32
"""Most files that one result refers to."""

_uploaded: weakref.WeakKeyDictionary[Sandbox, set[str]] = weakref.WeakKeyDictionary()


class FileExchange:
    """Files that a tool gets from the environment's row, and files that its results refer to.

    Args:
        uploads: Key of the environment's row whose value maps paths below /work to text or bytes. These files
            are written before the first call, once for all tools that share a sandbox. None: no files.
        outputs: Folder below /work; the result of a call refers to the files that are new or have changed
            there. None: no folder.

    Raises:
        ValueError: If `outputs` is not below /work.
    """

    def __init__(self, uploads: str | None = None, outputs: str | None = None) -> None:
        if outputs is not None:
            inside(outputs)
        self.uploads, self.outputs = uploads, outputs
        self._seen: dict[str, str] = {}

    def fresh(self) -> FileExchange:
        """Return a new exchange with the same settings, for another trajectory."""
        return FileExchange(self.uploads, self.outputs)

    async def before(self, sandbox: Sandbox, ctx: ToolContext) -> None:
        """Write the files of the row, unless they were written before.

        Args:
            sandbox: An open sandbox.
            ctx: Context of the call.

        Raises:
            InfrastructureError: If there is no row, its value has another type, or a path leaves the sandbox.
        """
        if self.uploads is None:
            return
        if ctx.state is None:
            raise InfrastructureError(
                "uploads come from the row: write ToolCompose(pass_state_to_tools=True)"
            )
        done = _uploaded.setdefault(sandbox, set())
        if self.uploads in done:
            return
        done.add(self.uploads)
        for path, content in _files(ctx.state, self.uploads).items():
            data = content.encode() if isinstance(content, str) else content
            try:
                await sandbox.write_file(path, data)
            except OSError as error:
                raise InfrastructureError(f"{self.uploads!r} of the row: {error}") from None

    async def after(self, sandbox: Sandbox) -> tuple[FileRefPart, ...]:
        """Return references to the files that are new or have changed since the last call."""
        if self.outputs is None:
            return ()
        folder = "/".join((WORK, *inside(self.outputs)))
        found = await sandbox.run(["find", folder, "-type", "f", "-printf", r"%T@ %i %s\t%p\0"])
        entries = (entry.partition("\t") for entry in found.stdout.split("\0") if "\t" in entry)
        now = {path: state for state, _, path in entries}
        changed = sorted(path for path, state in now.items() if self._seen.get(path) != state)
        self._seen = now
        return tuple(FileRefPart(path, mimetypes.guess_type(path)[0]) for path in changed[:MAX_OUTPUTS])


def _files(state: Any, key: str) -> Mapping[str, str | bytes]:
    """Return the files of a row, whose value may be a dict or a TensorDict."""
    value: Any = state.get(key, None)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        value = value.to_dict() if hasattr(value, "to_dict") else getattr(value, "data", value)
    found = cast("Mapping[Any, Any]", value) if isinstance(value, Mapping) else {None: None}
    if not all(isinstance(path, str) and isinstance(text, str | bytes) for path, text in found.items()):
        raise InfrastructureError(f"{key!r} of the row: expected a mapping from paths to text or bytes")
    return found
