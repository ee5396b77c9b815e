"""`Wrapped`, the base class of wrappers: a tool around a tool, with a session around its session."""

# Properties of a wrapper override attributes of `Tool`, because they follow the tool inside.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

from torchrl_agentic.errors import StopSignal, ToolError
from torchrl_agentic.messages import JSON, ToolResult
from torchrl_agentic.tools.base import Effects, Tool, ToolContext, effects_of, has_sessions
from torchrl_agentic.tools.row_data import RowData
from torchrl_agentic.tools.schema_simplify import Schema
from torchrl_agentic.tools.tool_adapter import ensure_tool

CallLater: TypeAlias = Callable[[float, Callable[[], None]], Any]
"""`call_later(seconds, callback)`, as in an event loop and `VirtualClock`."""


class Wrapped(Tool):
    """A tool around another tool; it delegates everything that a subclass does not override.

    To write a wrapper, override `run`. For state of a trajectory, set `keeps_state` and store the state in
    attributes that `begin` sets on the live wrapper, never on the wrapper that all trajectories share. A
    wrapper that is used by hand, outside of any trajectory, is its own live wrapper.

    Args:
        tool: Anything that `ensure_tool` takes. The wrapper owns it: it sets it up and tears it down.

    Attributes:
        tool: The tool inside; in a live wrapper, the live tool.
        keeps_state: Whether each trajectory gets a live wrapper even if the tool inside is stateless.
    """

    keeps_state: bool = False

    def __init__(self, tool: Any) -> None:
        self.tool = ensure_tool(tool)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Run the tool inside."""
        return await self.tool.run(args, ctx)

    async def result(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run the tool inside, and convert its value, `ToolError` or `StopSignal` to a result.

        Args:
            args: Arguments of the call.
            ctx: Context of the call.

        Returns:
            The result.
        """
        try:
            return ToolResult.from_value(await self.tool.run(args, ctx))
        except (ToolError, StopSignal) as error:
            result = ToolResult.from_error(error, self.name)
            assert result is not None
            return result

    def begin(self, trajectory: str, source: Any) -> None:
        """Begin a trajectory; called on its live wrapper.

        Args:
            trajectory: Name of the trajectory.
            source: The live wrapper, of the same class, that a branch continues; None if it is no branch.
        """

    def end(self) -> None:
        """End the trajectory; called once for each `begin`."""

    def session(self, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Open the session of the tool inside, and a live wrapper around it."""
        return self._around(self.tool.session(trajectory), trajectory, None)

    def branch(self, live: Tool, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Open a branch of the live tool inside, and a live wrapper that continues the other one."""
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
        """Return the spec of the tool inside, with the wrapper's name and description."""
        spec = self.tool.spec()
        own = {"name": self.name, "description": self.description}
        return {**spec, "function": {**spec["function"], **own}}

    @property
    def stateful(self) -> bool:
        """True if the tool inside has sessions or the wrapper keeps state."""
        return self.keeps_state or has_sessions(self.tool)

    # All members from here on delegate to the tool inside.

    @property
    def name(self) -> str:
        """Name of the tool inside."""
        return self.tool.name

    @property
    def description(self) -> str:
        """Description of the tool inside."""
        return self.tool.description

    @property
    def input_schema(self) -> Schema:
        """Input schema of the tool inside."""
        return self.tool.input_schema

    @property
    def output_schema(self) -> Schema | None:
        """Output schema of the tool inside."""
        return self.tool.output_schema

    @property
    def wants_state(self) -> bool:
        """True if the tool inside reads `ToolContext.state`."""
        return self.tool.wants_state

    @property
    def needs_row(self) -> bool:
        """True if the tool inside reads `ToolContext.row`."""
        return self.tool.needs_row

    @property
    def open_at_reset(self) -> bool:
        """True if the session of the tool inside opens when a trajectory begins."""
        return self.tool.open_at_reset

    @property
    def is_strict(self) -> bool | None:
        """The key `strict` in the spec of the tool inside."""
        return self.tool.is_strict

    @property
    def origin(self) -> str:
        """Where the tool inside comes from."""
        return self.tool.origin

    @property
    def effects(self) -> Effects | None:
        """Effects that the tool inside declares."""
        return self.tool.effects

    @property
    def default_effects(self) -> Effects:
        """Effects of the tool inside."""
        return effects_of(self.tool)

    async def setup(self) -> None:
        """Set up the tool inside."""
        await self.tool.setup()

    async def teardown(self) -> None:
        """Tear down the tool inside."""
        await self.tool.teardown()

    async def initial_message(self) -> Any:
        """Return the initial message of the live tool inside."""
        return await self.tool.initial_message()

    @property
    def unwrapped(self) -> Tool:
        """The tool inside all wrappers."""
        return self.tool.unwrapped

    @property
    def has_final_reward(self) -> bool:
        """True if the tool inside has a final reward."""
        return self.tool.has_final_reward

    async def final_reward(self) -> float | None:
        """Return the final reward of the live tool inside."""
        return await self.tool.final_reward()

    def check_row(self, row: RowData) -> None:
        """Check that the data set has what the tool inside needs."""
        self.tool.check_row(row)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only some tools have, such as `sandbox`, `repl` or `reset_rows`."""
        if name.startswith("_") or "tool" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.tool, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tool!r})"


async def pause(seconds: float, call_later: CallLater | None = None) -> None:
    """Sleep on a given clock.

    Args:
        seconds: Time to sleep, in seconds.
        call_later: The clock, which may tick on another thread; None: that of the event loop.
    """
    if call_later is None:
        await asyncio.sleep(seconds)
        return
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    call_later(seconds, lambda: loop.call_soon_threadsafe(over.set) and None)
    await over.wait()
