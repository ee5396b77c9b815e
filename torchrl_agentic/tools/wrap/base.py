"""What all wrappers share: a tool around a tool, in a session around its session."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

from torchrl_agentic.errors import StopSignal, ToolError
from torchrl_agentic.messages import JSON, ToolResult
from torchrl_agentic.tools.base import Effects, Tool, ToolContext, effects_of, has_sessions
from torchrl_agentic.tools.tool_adapter import ensure_tool

CallLater: TypeAlias = Callable[[float, Callable[[], None]], Any]
"""`call_later(seconds, callback)`, as an event loop and a `VirtualClock` have it."""


class Wrapped(Tool):
    """A tool around another one, which it is in all that it does not change.

    To write one, override `run`. What is to be kept per trajectory goes into attributes that `begin` sets on
    the live wrapper, with `keeps_state` true; nothing of that sort belongs on the wrapper that all
    trajectories share. Used by hand, outside of any trajectory, the wrapper stands for one itself.

    tool: anything that `ensure_tool` takes; it belongs to the wrapper, which sets it up and tears it down.
    keeps_state: whether each trajectory gets a live wrapper, even where the tool itself has no sessions.
    """

    keeps_state: bool = False

    def __init__(self, tool: Any) -> None:
        self.tool = ensure_tool(tool)
        self.effects = self.tool.effects
        self.opens_sessions = self.keeps_state or has_sessions(self.tool)

    @property
    def default_effects(self) -> Effects:
        """The effects of the tool inside."""
        return effects_of(self.tool)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Hand the call on."""
        return await self.tool.run(args, ctx)

    async def result(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Hand the call on, and make a result of what was returned, or raised for the model to read."""
        try:
            return ToolResult.from_value(await self.tool.run(args, ctx))
        except (ToolError, StopSignal) as error:
            return result_of(error, self.name)

    def begin(self, trajectory: str, source: Any) -> None:
        """Begin a trajectory, on its live wrapper.

        source: the live wrapper, of the same class, that a branch goes on from; None: it is no branch.
        """

    def end(self) -> None:
        """End it; called once for each `begin`."""

    def session(self, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Open what the tool opens, in a wrapper of its own."""
        return self._around(self.tool.session(trajectory), trajectory, None)

    def branch(self, live: Tool, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Open a branch of what the tool has open, in a wrapper that goes on from the other one."""
        assert isinstance(live, type(self))
        return self._around(self.tool.branch(live.tool, trajectory), trajectory, live)

    @asynccontextmanager
    async def _around(
        self, opening: AbstractAsyncContextManager[Tool], trajectory: str, source: Any
    ) -> AsyncGenerator[Tool]:
        async with opening as live:
            twin = copy.copy(self)
            twin.tool = live
            twin.begin(trajectory, source)
            try:
                yield twin
            finally:
                twin.end()

    def spec(self) -> dict[str, JSON]:
        """Describe the tool as it does itself, under the wrapper's name and description."""
        spec = self.tool.spec()
        own = {"name": self.name, "description": self.description}
        return {**spec, "function": {**spec["function"], **own}}

    def __getattr__(self, name: str) -> Any:
        """Find what only some tools have, such as `sandbox` or `reset_rows`, on the tool."""
        if name.startswith("_") or "tool" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.tool, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tool!r})"


class _Delegated:
    """An attribute of `Tool` that is read off the wrapped tool, unless the wrapper has set one of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Wrapped | None, owner: type) -> Any:
        return self if wrapper is None else getattr(wrapper.tool, self.name)


# Whatever a Tool has, or will have, is delegated: a wrapper must not hide what it does not know.
for _name in vars(Tool):
    if not _name.startswith("_") and _name not in vars(Wrapped):
        setattr(Wrapped, _name, _Delegated(_name))


def result_of(error: ToolError | StopSignal, tool: str) -> ToolResult:
    """Make a result of what was raised for the model to read."""
    result = ToolResult.from_error(error, tool)
    assert result is not None
    return result


async def pause(seconds: float, call_later: CallLater | None = None) -> None:
    """Wait, on the event loop's clock or on another one, which may tick on another thread."""
    if call_later is None:
        await asyncio.sleep(seconds)
        return
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    call_later(seconds, lambda: loop.call_soon_threadsafe(over.set) and None)
    await over.wait()
