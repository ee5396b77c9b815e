"""`ensure_tool` and `ensure_toolset`, which adapt what people bring."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from torchrl_agentic.errors import derives, lacking
from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.base import Tool, ToolContext, Toolset, open_world
from torchrl_agentic.tools.row_data import NO_DATA, RowData
from torchrl_agentic.tools.signatures import Callee, is_async


class DuckTool(Tool):
    """A look-alike of a tool behind the interface: an object with name, description, input_schema and run."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.name = getattr(target, "name", "")
        self.description = getattr(target, "description", "") or ""
        self.input_schema = getattr(target, "input_schema", None) or {"type": "object"}
        self.output_schema = getattr(target, "output_schema", None)
        self.wants_state = bool(getattr(target, "wants_state", False))
        self.wants_row = bool(getattr(target, "wants_row", False))
        self.opens_at_reset = bool(getattr(target, "opens_at_reset", False))
        self.is_strict = getattr(target, "is_strict", None)
        self.effects = getattr(target, "effects", None)
        self._callee = Callee(target.run)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Hand the call on."""
        return await self._callee(ctx.in_thread, args, ctx)

    async def setup(self) -> None:
        """Call the object's `setup` if it has one."""
        await _call(self.target, "setup")

    async def teardown(self) -> None:
        """Call the object's `teardown` if it has one."""
        await _call(self.target, "teardown")

    async def greeting(self) -> Any:
        """Return what the object says in the first prompt, if it says anything."""
        return await _call(self.target, "greeting")

    async def finish(self) -> float | None:
        """Return what the object says of the whole trajectory, if it says anything."""
        return await _call(self.target, "finish")

    def check_row(self, row: RowData) -> None:
        """Let the object look at a row, if it does."""
        if check := getattr(self.target, "check_row", None):
            check(row)


class DuckSessionTool(DuckTool):
    """A look-alike that opens something per trajectory: its `session` is an async context manager."""

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Open what the object opens; that need not be a `Tool` either."""
        async with self.target.session(trajectory) as live:
            yield _live_tool(live)

    def branch(self, live: Tool, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Let the object open a branch, if it can."""
        if not callable(getattr(self.target, "branch", None)):
            return super().branch(live, trajectory)
        return self._branch(live.target if isinstance(live, DuckTool) else live, trajectory)

    @asynccontextmanager
    async def _branch(self, live: Any, trajectory: str) -> AsyncGenerator[Tool]:
        async with self.target.branch(live, trajectory) as copy:
            yield _live_tool(copy)


def ensure_tool(item: Any) -> Tool:
    """Return a `Tool` for what people bring: a Tool itself, a look-alike, a typed function.

    Args:
        item: A Tool; a function with annotations and a docstring; or an object with `name`, `description`,
            `input_schema` and `run(args, ctx)`, which may block. `setup`, `teardown`, `session` and `branch`
            are used if it has them.

    Raises:
        TypeError: If it is none of these. The message names what a look-alike lacks, or says what to write
            instead.
    """
    kind = type(item).__name__
    if derives(item, Tool):
        if not is_async(item.run):
            raise TypeError(
                f"{kind}.run is no coroutine function: write 'async def run', and ctx.in_thread(...) inside"
            )
        return item
    if isinstance(item, type):
        raise TypeError(f"{item.__name__} is a class; a tool is an object: write {item.__name__}(...)")
    if isinstance(item, Toolset):
        raise TypeError(f"{kind} is a toolset: use compose.add_toolset(...)")
    if hasattr(item, "_process_batch_item"):
        raise TypeError(f"{kind} is a TorchRL tool transform: wrap it as as_tool({kind}(...), name='...')")
    if hasattr(item, "_step") and hasattr(item, "_reset"):
        raise TypeError(
            f"{kind} is a transform, not a tool: put it beside the tools, in an outer Compose:"
            f" TransformedEnv(env, Compose(ToolCompose(...), {kind}(...)))"
        )
    if isinstance(item, Tool):
        return _adapted(item)
    from torchrl_agentic.tools.function import FunctionTool  # it imports a parser of docstrings

    marked = getattr(item, "__tool__", None)
    if isinstance(marked, FunctionTool):
        return marked
    if callable(item):
        return FunctionTool(item)
    if callable(getattr(item, "execute", None)) and callable(getattr(item, "release", None)):
        raise TypeError(f"{kind} begins and ends with each trajectory: wrap it as LifecycleTool({kind}(...))")
    if not callable(getattr(item, "run", None)) and not _lacking_of_toolset(item):
        raise TypeError(f"{kind} is a toolset: use compose.add_toolset(...)")
    raise TypeError(
        "a tool is a Tool, a typed function, or an object with name, description, input_schema and run;"
        f" {kind} lacks {', '.join(lacking(item, Tool))}"
    )


def _adapted(item: Any) -> DuckTool:
    return DuckSessionTool(item) if callable(getattr(item, "session", None)) else DuckTool(item)


def _live_tool(item: Any) -> Tool:
    """Return a Tool for what a look-alike's session opened; of that, only `run` is called."""
    if not derives(item, Tool) and callable(getattr(item, "run", None)):
        return _adapted(item)
    return ensure_tool(item)


_TOOLSETS = (("setup", "teardown"), ("open", "close", "tools"))
"""The members of look-alikes of a toolset. `tools` holds the tools after `open`."""


class DuckToolset(Toolset):
    """A look-alike of a toolset behind the interface."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self._setup, self._teardown = next(names[:2] for names in _TOOLSETS if not _without(target, names))

    @property
    def revision(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  follows the object
        """The object's revision; 0 if it has none."""
        return getattr(self.target, "revision", 0)

    async def setup(self) -> Sequence[Tool]:
        """Open the object and return its tools."""
        return self._tools(await _call(self.target, self._setup))

    async def teardown(self) -> None:
        """Close the object."""
        await _call(self.target, self._teardown)

    async def refresh(self) -> Sequence[Tool]:
        """Return the object's tools as they are now."""
        return self._tools(await _call(self.target, "refresh"))

    def _tools(self, returned: Any) -> Sequence[Tool]:
        return [ensure_tool(item) for item in (self.target.tools if returned is None else returned)]

    def __repr__(self) -> str:
        return repr(self.target)


class DuckWorld(DuckToolset):
    """A look-alike of a toolset with a world: its `session` returns an async context manager."""

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self.name = getattr(target, "name", "") or type(target).__name__

    def session(self, trajectory: str, row: RowData = NO_DATA) -> AbstractAsyncContextManager[Any]:
        """Open the object's world."""
        return open_world(self.target, trajectory, row)

    def branch(self, world: Any, trajectory: str) -> AbstractAsyncContextManager[Any]:
        """Let the object open a branch, if it can."""
        if not callable(getattr(self.target, "branch", None)):
            return super().branch(world, trajectory)
        return self.target.branch(world, trajectory)

    async def finish(self, world: Any) -> float | None:
        """Return what the object says of the whole trajectory, if it says anything."""
        return await _call(self.target, "finish", world)


def ensure_toolset(item: Any) -> Toolset:
    """Return a `Toolset` for what people bring: a Toolset itself, or a look-alike.

    Args:
        item: A Toolset; an object with `setup` and `teardown`, where `setup` returns the tools; or one with
            `open`, `close` and `tools`, which holds the tools once it is open. The methods may block or be
            awaitable.

    Raises:
        TypeError: If it is none of these. The message names what a look-alike lacks.
    """
    if isinstance(item, Toolset):
        return item
    kind = type(item).__name__
    if isinstance(item, type):
        raise TypeError(f"{item.__name__} is a class; a toolset is an object: write {item.__name__}(...)")
    missing = _lacking_of_toolset(item)
    if missing:
        raise TypeError(
            "a toolset is a Toolset, or an object with setup and teardown, or one with open, close and tools;"
            f" {kind} lacks {', '.join(missing)}"
        )
    return DuckWorld(item) if callable(getattr(item, "session", None)) else DuckToolset(item)


def _lacking_of_toolset(item: Any) -> list[str]:
    """Return what an object lacks of the kind of toolset that it is closest to."""
    return min((_without(item, names) for names in _TOOLSETS), key=len)


def _without(item: Any, names: Sequence[str]) -> list[str]:
    return [
        name
        for name in names
        if inspect.getattr_static(item, name, None)
        is None  # a property may refuse before the toolset is open
    ]


async def _call(target: Any, method: str, *args: Any) -> Any:
    """Call a method that may be missing, and await what it returns where that is awaitable."""
    found = getattr(target, method, None)
    value = None if found is None else found(*args)
    return await value if inspect.isawaitable(value) else value
