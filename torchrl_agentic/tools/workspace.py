"""One sandbox per trajectory for all tools that were given the same one, or none: they share its files."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Self

from torchrl_agentic.sandbox import Sandbox, default_sandbox
from torchrl_agentic.sandbox.adapt import ensure_template
from torchrl_agentic.tool import Tool, current_session


class _Shared:
    """A sandbox that the tools of one trajectory have open, and how many of them."""

    def __init__(self, template: Sandbox) -> None:
        self.template = template  # kept, so that no other template gets its identity meanwhile
        self.sandbox = template.fresh()
        self.users = 0
        self.opening = asyncio.Lock()

    async def open(self, like: Sandbox | None) -> Sandbox:
        """Open the sandbox, as a clone of another one if that is given, unless it is open."""
        async with self.opening:
            if like is not None and not self.sandbox.is_open:
                (self.sandbox,) = await like.clones(1)
            await self.sandbox.open()
        return self.sandbox


_open: dict[tuple[int, object], _Shared] = {}


@asynccontextmanager
async def shared_sandbox(
    template: Sandbox, trajectory: str, *, like: Sandbox | None = None, is_default: bool = False
) -> AsyncGenerator[Sandbox]:
    """Open a fresh sandbox of a template's kind, or the one that another tool of this trajectory has open.

    The last tool to leave closes it.

    Args:
        template: Which kind, and what its tools have in common.
        trajectory: Name of the trajectory.
        like: An open sandbox of another trajectory, to be cloned rather.
        is_default: Whether the tool was given no sandbox: all such tools of a trajectory have one in common.
    """
    key = (0 if is_default else id(template), current_session.get() or trajectory)
    shared = _open.get(key)
    if shared is None:
        shared = _open[key] = _Shared(template)
    shared.users += 1
    try:
        yield await shared.open(like)
    finally:
        shared.users -= 1
        if shared.users == 0:
            del _open[key]
            await shared.sandbox.close()


class WorkspaceTool(Tool):
    """A tool that works in a sandbox: one per trajectory, shared with the tools that are given the same.

    Effects on the resource "workspace" keep writes and reads in order.

    Args:
        sandbox: A template, as for `PythonTool`. None: `default_sandbox()`; all tools that are given none
            share one workspace per trajectory. Used by hand, outside of any trajectory, each has its own.

    Raises:
        TypeError: If it is not a sandbox, or a look-alike that lacks something.
        SandboxError: If no sandbox is given, and none works here.
    """

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self.shares_default = sandbox is None
        self.sandbox = default_sandbox() if sandbox is None else ensure_template(sandbox)

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Self]:
        """Open a sandbox for this trajectory, or join the tools that have."""
        async with shared_sandbox(self.sandbox, trajectory, is_default=self.shares_default) as sandbox:
            yield self._in(sandbox)

    @asynccontextmanager
    async def branch(self, live: Tool, trajectory: str) -> AsyncGenerator[Self]:
        """Open a clone of another trajectory's sandbox, or join the tools that have."""
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
        """Close the sandbox that was used by hand, if it was."""
        await self.sandbox.close()
