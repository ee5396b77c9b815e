"""`LifecycleTool`: runs an object with verl's create, execute, calc_reward and release as a `Tool`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import typing
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import pydantic

from torchrl_agentic.messages import JSON, ToolResult, as_number
from torchrl_agentic.text import shorten
from torchrl_agentic.tools.base import AsyncCallable, Tool, ToolContext, current_row, current_session
from torchrl_agentic.tools.options import type_checker, type_error
from torchrl_agentic.tools.row_data import Columns, RowData
from torchrl_agentic.tools.signatures import Keywords, keywords_of
from torchrl_agentic.tools.verl.base_tool import description_of

logger = logging.getLogger(__name__)

METHODS = ("create", "execute", "calc_reward", "release")
"""Methods of verl's `BaseTool`, in the order of a trajectory."""
_POSITIONAL = {"create": 1, "execute": 2, "calc_reward": 1, "release": 1}
"""Number of positional arguments of each method: `instance_id`, and the `parameters` of the call."""


@dataclass(slots=True)
class AgentData:
    """State of a trajectory, for tools whose `execute` takes `agent_data`.

    Attributes:
        request_id: Name of the trajectory.
        tools_kwargs: The row's arguments for all tools.
        extra_fields: Values of the tool, kept as long as the trajectory.
        tool_rewards: Rewards of the tool's calls so far.
        assistant_turns: Number of turns so far, with the current one.
    """

    request_id: str
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])
    tool_rewards: list[float] = field(default_factory=list[float])
    assistant_turns: int = 0


class LifecycleTool(Tool):
    """A tool from an object with the methods of verl's `BaseTool`, one instance per trajectory.

    `create` runs when a trajectory starts, with the row's `create_kwargs`; its response is added to the first
    prompt. `execute` runs once per call; the calls of one trajectory run one after the other. `calc_reward`
    and `release` run once when the trajectory ends; the reward is added to ("agentic", "trajectory_reward"),
    and `release` runs even after errors. Methods that are not coroutine functions run on a thread.

    A method gets the row's arguments one by one, and as `create_kwargs={…}` if it has this parameter or
    `**kwargs`.

    Args:
        target: The object; one for all trajectories, which it distinguishes by `instance_id`.
        name: The name that the model calls; None: that of the schema.
        open_at_reset: Whether `create` runs when a trajectory starts. If not, it runs at the first call, and
            its response is not shown.

    Attributes:
        target: The object.
        async_methods: Its methods as `AsyncCallable`, by name.
        keywords: Keywords of its methods, by name.
        has_warned: Whether a text that `execute` returned as reward was logged.

    Raises:
        TypeError: If a method or the schema is missing.
    """

    needs_row = True

    def __init__(self, target: Any, *, name: str | None = None, open_at_reset: bool = True) -> None:
        kind = target.__name__ if isinstance(target, type) else type(target).__name__
        if isinstance(target, type):
            raise TypeError(f"{kind} is a class; a tool is an object: write {kind}(config, tool_schema)")
        if missing := [method for method in METHODS if not callable(getattr(target, method, None))]:
            raise TypeError(f"{kind} has no {missing[0]}(); expected the methods {', '.join(METHODS)}")
        self.target = target
        methods = {method: getattr(target, method) for method in METHODS}
        self.async_methods = {name: AsyncCallable(method) for name, method in methods.items()}
        self.keywords = {name: keywords_of(method) for name, method in methods.items()}
        found = description_of(target)
        self.description, self.input_schema = found.description, found.parameters
        self.is_strict = found.is_strict
        self.name = name or found.name
        self.open_at_reset = open_at_reset
        self.has_warned = False

    def check_row(self, row: RowData) -> None:
        """Check the row's arguments for the methods, by name and by type.

        Raises:
            ValueError: If a method has no such parameter, needs another argument, or has an annotation that
                the value does not fit.
        """
        for name, stage in self._stages.items():
            try:
                stage.check(row.kwargs(self.name, f"{name}_kwargs"), needs_all=self.open_at_reset)
            except ValueError as error:
                raise ValueError(f"tools_kwargs: {self.name}: {name}_kwargs: {error}") from None

    @property
    def has_final_reward(self) -> bool:
        """True: each instance is asked for its `calc_reward`."""
        return True

    def stage(self, name: str) -> _MethodArguments:
        """Return the arguments that a method takes from a row."""
        return self._stages[name]

    @cached_property
    def _stages(self) -> dict[str, _MethodArguments]:
        return {name: _MethodArguments(name, getattr(self.target, name)) for name in METHODS}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_stages"}

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run a call by hand, in a session of its own."""
        async with self.session(ctx.trajectory) as live:
            return await live.run(args, ctx)

    @contextlib.asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[_Instance]:
        """Create an instance, and release it when the trajectory ends."""
        instance = _Instance(self, trajectory, current_row.get())
        await instance.begin()
        try:
            yield instance
        finally:
            # Shielded, so that a cancelled owner releases the instance too.
            await asyncio.shield(asyncio.ensure_future(instance.end()))


class _MethodArguments:
    """The arguments that a method takes from a row."""

    def __init__(self, name: str, method: Callable[..., Any]) -> None:
        self.name = name
        self.keywords = keywords_of(method)
        self.takes_all_in_one = f"{name}_kwargs" in self.keywords.names
        self.needed: list[str] = []
        self.optional: set[str] = set()
        self.positional: set[str] = set()
        self.hints: dict[str, Any] = {}
        self.adapters: dict[str, pydantic.TypeAdapter[Any]] = {}
        try:
            parameters = list(inspect.signature(method).parameters.values())
            hints = typing.get_type_hints(method)
        except (TypeError, ValueError, NameError):
            return
        by_position = [each for each in parameters if each.kind is not each.KEYWORD_ONLY][: _POSITIONAL[name]]
        self.positional = {each.name for each in by_position if each.kind is not each.VAR_POSITIONAL}
        for each in parameters:
            if each.name in self.positional or each.kind not in (
                each.POSITIONAL_OR_KEYWORD,
                each.KEYWORD_ONLY,
            ):
                continue
            if each.default is each.empty and each.name != "agent_data":
                self.needed.append(each.name)
            if each.default is not each.empty:
                self.optional.add(each.name)
            adapter = type_checker(hints.get(each.name, Any))
            if adapter is not None:
                self.hints[each.name], self.adapters[each.name] = hints.get(each.name, Any), adapter

    def given(self, row: Columns) -> Columns:
        """Return the arguments of a row without those that are None because only other rows have a value.

        A column file stores None for each key that some row has.
        """
        if self.takes_all_in_one:
            return row
        return {
            name: value
            for name, value in row.items()
            if value is not None or (name in self.keywords and name not in self.optional)
        }

    def check(self, row: Columns, *, needs_all: bool) -> None:
        if self.takes_all_in_one:
            return
        for name, value in self.given(row).items():
            if name in self.positional:
                raise ValueError(f"{self.name}() gets {name!r} from the trajectory, not from the row")
            if name not in self.keywords:
                known = ", ".join(sorted(self.keywords.names - self.positional)) or "none"
                raise ValueError(f"{self.name}() has no parameter {name!r}; parameters: {known}")
            if name in self.adapters and type_error(self.adapters[name], value):
                expected = inspect.formatannotation(self.hints[name])
                met = f"{shorten(value)} ({type(value).__name__})"
                raise ValueError(f"parameter {name!r} of {self.name}() is annotated {expected}; got {met}")
        missing = [name for name in self.needed if name not in row] if needs_all else []
        if missing:
            raise ValueError(f"{self.name}() needs {missing[0]!r}, which the row does not have")


class _Instance(Tool):
    """The instance of a `LifecycleTool` in one trajectory."""

    def __init__(self, tool: LifecycleTool, trajectory: str, row: RowData) -> None:
        self.tool, self.row, self.name = tool, row, tool.name
        self.id: Any = f"{trajectory}:{uuid.uuid4().hex}"  # trajectories of other environments share names
        self.response: Any = None
        self.data = AgentData(trajectory, row.tools_kwargs)

    async def begin(self) -> None:
        made: Any = await self._call("create", self.id)
        if isinstance(made, tuple):
            made, self.response = cast("tuple[Any, Any]", made)
        self.id = self.id if made is None else made

    async def initial_message(self) -> Any:
        """Return the response of `create`, or None if it is empty."""
        response = self.response
        is_empty = getattr(response, "is_empty", None)
        if response in (None, "") or (callable(is_empty) and is_empty()):
            return None
        return ToolResult.from_verl(response)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Execute one call."""
        self.data.assistant_turns = ctx.turn + 1
        returned = await self._call("execute", self.id, dict(args), ctx=ctx)
        if isinstance(returned, tuple) and len(cast("tuple[Any, ...]", returned)) > 1:
            response, reward, *rest = cast("tuple[Any, ...]", returned)
            returned = (response, self._reward_of_call(reward), *rest)
        result = ToolResult.from_verl(returned)
        if result.reward is not None:
            self.data.tool_rewards.append(result.reward)
        return result

    async def final_reward(self) -> float | None:
        """Return the value of `calc_reward`."""
        return await self._call("calc_reward", self.id)

    def _reward_of_call(self, value: Any) -> float | None:
        """Return the reward that `execute` returned; treat a text as None, and log that once.

        verl's first sandbox tool returned the text of its response as the reward.
        """
        if value is None or not isinstance(value, str):
            return None if value is None else as_number(value)
        if not self.tool.has_warned:
            self.tool.has_warned = True
            logger.warning(
                "tool %s: execute() returned a text as reward, treated as None; expected a number or None",
                self.name,
            )
        return None

    async def end(self) -> None:
        try:
            await self._call("release", self.id)
        except (SystemExit, KeyboardInterrupt) as error:  # raised in a task, they would end the event loop
            raise RuntimeError(f"release() of {self.name!r} raised {error!r}") from error

    async def _call(self, name: str, *args: Any, ctx: ToolContext | None = None) -> Any:
        row = self.tool.stage(name).given(self.row.kwargs(self.name, f"{name}_kwargs"))
        kwargs = _arguments(self.tool.keywords[name], name, row, self.data)
        threads = ctx.threads if ctx is not None else getattr(current_session.get(), "threads", None)
        off_loop = ctx or ToolContext(call_id="", threads=threads)
        return await self.tool.async_methods[name](off_loop.in_thread, *args, **kwargs)


def _arguments(keywords: Keywords, name: str, row: Columns, data: AgentData) -> dict[str, Any]:
    """Return the keyword arguments of a method: the row's, all of them in one mapping, and `agent_data`."""
    whole: dict[str, Any] = {f"{name}_kwargs": dict(row)}
    if name == "execute":
        whole["agent_data"] = data
    taken = {key: value for key, value in whole.items() if key in keywords}
    if f"{name}_kwargs" in keywords.names:
        return taken
    return {**row, **taken}
