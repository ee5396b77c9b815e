"""LifecycleTool: an object that has create, execute, calc_reward and release, as a tool with sessions."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import typing
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import pydantic

from torchrl_agentic.messages import JSON, ToolResult
from torchrl_agentic.text import shorten
from torchrl_agentic.tools.base import Tool, ToolContext, current_row, current_session
from torchrl_agentic.tools.row_data import Columns, RowData
from torchrl_agentic.tools.signatures import AsyncCallable, Keywords, keywords_of
from torchrl_agentic.tools.verl.base_tool import number_of, schema_of_target

logger = logging.getLogger(__name__)

_METHODS = ("create", "execute", "calc_reward", "release")
_POSITIONAL = {"create": 1, "execute": 2, "calc_reward": 1, "release": 1}
"""How many arguments each method gets by position: `instance_id`, and the `parameters` of the call."""


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
        open_at_reset: whether `create` runs when a trajectory begins; else at its first call, and what it
            answers is not shown.

    Raises:
        TypeError: a method or the schema is missing.
    """

    needs_row = True

    def __init__(self, target: Any, *, name: str | None = None, open_at_reset: bool = True) -> None:
        kind = target.__name__ if isinstance(target, type) else type(target).__name__
        if isinstance(target, type):
            raise TypeError(f"{kind} is a class; a tool is an object: write {kind}(config, tool_schema)")
        if missing := [method for method in _METHODS if not callable(getattr(target, method, None))]:
            raise TypeError(f"{kind} has no {missing[0]}(); a tool with a life has {', '.join(_METHODS)}")
        self.target = target
        methods = {method: getattr(target, method) for method in _METHODS}
        self.async_methods = {name: AsyncCallable(method) for name, method in methods.items()}
        self.keywords = {name: keywords_of(method) for name, method in methods.items()}
        told = schema_of_target(target)
        self.description, self.input_schema, self.is_strict = (
            told.description,
            told.parameters,
            told.is_strict,
        )
        self.name = name or told.name
        self.open_at_reset = open_at_reset
        self.warned_of: set[str] = set()

    def check_row(self, row: RowData) -> None:
        """Check that the methods take what the row has for them, by name and by type.

        Raises:
            ValueError: If a method does not know an argument, needs another one, or is annotated with a type
                that the value does not have.
        """
        for name, stage in self._stages.items():
            try:
                stage.check(row.kwargs(self.name, f"{name}_kwargs"), needs_all=self.open_at_reset)
            except ValueError as error:
                raise ValueError(f"tools_kwargs: {self.name}: {name}_kwargs: {error}") from None

    def stage(self, name: str) -> _Stage:
        """Return what a method takes from a row."""
        return self._stages[name]

    @cached_property
    def _stages(self) -> dict[str, _Stage]:
        return {name: _Stage(name, getattr(self.target, name)) for name in _METHODS}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_stages"}

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


class _Stage:
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
            adapter = _adapter(hints.get(each.name, Any))
            if adapter is not None:
                self.hints[each.name], self.adapters[each.name] = hints.get(each.name, Any), adapter

    def given(self, row: Columns) -> Columns:
        """Return the arguments of a row without those that are None for want of a value.

        Files of columns fill up with None what only other rows have.
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
            if name in self.adapters and not _fits(self.adapters[name], value):
                expected = inspect.formatannotation(self.hints[name])
                met = f"{shorten(value)} ({type(value).__name__})"
                raise ValueError(f"parameter {name!r} of {self.name}() is annotated {expected}; got {met}")
        missing = [name for name in self.needed if name not in row] if needs_all else []
        if missing:
            raise ValueError(f"{self.name}() needs {missing[0]!r}, which the row does not have")


def _adapter(hint: Any) -> pydantic.TypeAdapter[Any] | None:
    """Make a check of a type, or None if the type cannot be checked."""
    for config in (pydantic.ConfigDict(arbitrary_types_allowed=True), None):
        with contextlib.suppress(Exception):  # whatever other libraries raise for an annotation
            return pydantic.TypeAdapter(hint, config=config)
    return None


def _fits(adapter: pydantic.TypeAdapter[Any], value: Any) -> bool:
    """Return whether a value has a type, itself or as JSON has it: a list for a tuple, a text for a date."""
    try:
        adapter.validate_python(value, strict=True)
    except pydantic.ValidationError:
        try:
            adapter.validate_json(json.dumps(value), strict=True)
        except (ValueError, TypeError, RecursionError):
            return False
    except Exception:  # of an annotation that cannot be resolved
        return True
    return True


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

    async def initial_message(self) -> Any:
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

    async def final_reward(self) -> float | None:
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
        row = self.tool.stage(name).given(self.row.kwargs(self.name, f"{name}_kwargs"))
        kwargs = _arguments(self.tool.keywords[name], name, row, self.data)
        threads = ctx.threads if ctx is not None else getattr(current_session.get(), "threads", None)
        off_loop = ctx or ToolContext(call_id="", threads=threads)
        return await self.tool.async_methods[name](off_loop.in_thread, *args, **kwargs)


def _arguments(keywords: Keywords, name: str, row: Columns, data: AgentData) -> dict[str, Any]:
    """Choose the keywords that a method takes: the row's, all of them as one, and where we stand."""
    whole: dict[str, Any] = {f"{name}_kwargs": dict(row)}
    if name == "execute":
        whole["agent_data"] = data
    taken = {key: value for key, value in whole.items() if key in keywords}
    if f"{name}_kwargs" in keywords.names:
        return taken
    return {**row, **taken}
