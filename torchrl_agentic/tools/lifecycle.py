"""LifecycleTool: an object that has create, execute, calc_reward and release, as a tool with sessions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torchrl_agentic.callee import Callee, Keywords, keywords_of
from torchrl_agentic.messages import JSON, ToolResult
from torchrl_agentic.row import Columns, RowData
from torchrl_agentic.tool import Tool, ToolContext, current_row, current_session
from torchrl_agentic.tools.verl import number_of, schema_of_target

logger = logging.getLogger(__name__)

_METHODS = ("create", "execute", "calc_reward", "release")


@dataclass(slots=True)
class AgentData:
    """Where a trajectory stands, for tools whose `execute` takes `agent_data`.

    extra_fields: the tool's own, kept as long as the trajectory.
    """

    request_id: str
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])
    tool_rewards: list[float] = field(default_factory=list[float])
    assistant_turns: int = 0


class LifecycleTool(Tool):
    """A tool that begins and ends with each trajectory: an object of the shape of verl's `BaseTool`.

    `create` runs once per trajectory, with the row's `create_kwargs`, when it begins; what it answers stands
    in the first prompt. `execute` runs per call; the calls of one trajectory come one after the other.
    `calc_reward` runs once at the end, and its value joins ("agentic", "trajectory_reward"); then `release`,
    once, whatever happened before. Methods that are no coroutine functions run on a thread.

    Both ways of passing a row's arguments are served: one by one, and as `create_kwargs={…}` where the
    method takes that or `**kwargs`.

    Args:
        target: the object; one for all trajectories, which it tells apart by `instance_id`.
        name: what the model calls it; by default what the schema says.
        opens_at_reset: whether `create` runs when a trajectory begins; else at its first call, and what it
            answers is not shown.

    Raises:
        TypeError: a method or the schema is missing.
    """

    wants_row = True

    def __init__(self, target: Any, *, name: str | None = None, opens_at_reset: bool = True) -> None:
        kind = target.__name__ if isinstance(target, type) else type(target).__name__
        if isinstance(target, type):
            raise TypeError(f"{kind} is a class; a tool is an object: write {kind}(config, tool_schema)")
        if missing := [method for method in _METHODS if not callable(getattr(target, method, None))]:
            raise TypeError(f"{kind} has no {missing[0]}(); a tool with a life has {', '.join(_METHODS)}")
        self.target = target
        methods = {method: getattr(target, method) for method in _METHODS}
        self.callees = {name: Callee(method) for name, method in methods.items()}
        self.keywords = {name: keywords_of(method) for name, method in methods.items()}
        told = schema_of_target(target)
        self.description, self.input_schema, self.is_strict = (
            told.description,
            told.parameters,
            told.is_strict,
        )
        self.name = name or told.name
        self.opens_at_reset = opens_at_reset
        self.warned_of: set[str] = set()

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Answer a call by hand, in a life of one call."""
        async with self.session(ctx.trajectory) as live:
            return await live.run(args, ctx)

    @contextlib.asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[_Life]:
        """Create, and release when the trajectory is over."""
        life = _Life(self, trajectory, current_row.get())
        await life.begin()
        try:
            yield life
        finally:
            # A cancelled owner releases all the same.
            await asyncio.shield(asyncio.ensure_future(life.end()))


class _Life(Tool):
    """What one trajectory has of the tool."""

    def __init__(self, tool: LifecycleTool, trajectory: str, row: RowData) -> None:
        self.tool, self.row, self.name = tool, row, tool.name
        self.id: Any = f"{trajectory}:{uuid.uuid4().hex}"  # other environments have trajectories of this name
        self.said: Any = None
        self.data = AgentData(trajectory, row.tools_kwargs)

    async def begin(self) -> None:
        made: Any = await self._call("create", self.id)
        if isinstance(made, tuple):
            made, self.said = cast("tuple[Any, Any]", made)
        self.id = self.id if made is None else made

    async def greeting(self) -> Any:
        """Give what `create` has answered, if anything."""
        said = self.said
        is_empty = getattr(said, "is_empty", None)
        return (
            None if said in (None, "") or (callable(is_empty) and is_empty()) else ToolResult.from_verl(said)
        )

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Execute one call."""
        self.data.assistant_turns = ctx.turn + 1
        returned = await self._call("execute", self.id, dict(args), ctx=ctx)
        if isinstance(returned, tuple) and len(cast("tuple[Any, ...]", returned)) > 1:
            response, reward, *rest = cast("tuple[Any, ...]", returned)
            returned = (response, self._number("execute", reward), *rest)
        result = ToolResult.from_verl(returned)
        if result.reward is not None:
            self.data.tool_rewards.append(result.reward)
        return result

    async def finish(self) -> float | None:
        """Ask what the trajectory was worth."""
        return self._number("calc_reward", await self._call("calc_reward", self.id))

    def _number(self, method: str, value: Any) -> float | None:
        """Return a reward as a number; take what is not one for None, and say so once per tool and method.

        verl's first sandbox tool returned the text of its response as the reward.
        """
        number = None if value is None else number_of(value)
        if value is not None and number is None and method not in self.tool.warned_of:
            self.tool.warned_of.add(method)
            logger.warning(
                "tool %s: %s() returned a %s as reward; expected a number or None, and took it for None",
                self.name,
                method,
                type(value).__name__,
            )
        return number

    async def end(self) -> None:
        try:
            await self._call("release", self.id)
        except (SystemExit, KeyboardInterrupt) as error:  # out of a task, these would end the event loop
            raise RuntimeError(f"release() of {self.name!r} raised {error!r}") from error

    async def _call(self, name: str, *args: Any, ctx: ToolContext | None = None) -> Any:
        row = self.row.kwargs(self.name, f"{name}_kwargs")
        kwargs = _arguments(self.tool.keywords[name], name, row, self.data)
        threads = ctx.threads if ctx is not None else getattr(current_session.get(), "threads", None)
        off_loop = ctx or ToolContext(call_id="", threads=threads)
        return await self.tool.callees[name](off_loop.in_thread, *args, **kwargs)


def _arguments(keywords: Keywords, name: str, row: Columns, data: AgentData) -> dict[str, Any]:
    """Choose the keywords that a method takes: the row's, all of them as one, and where we stand."""
    whole: dict[str, Any] = {f"{name}_kwargs": dict(row)}
    if name == "execute":
        whole["agent_data"] = data
    taken = {key: value for key, value in whole.items() if key in keywords}
    if f"{name}_kwargs" in keywords.names:
        return taken
    return {**row, **taken}
