"""`ensure_tool` and `ensure_toolset`, which adapt functions and look-alikes to `Tool` and `Toolset`."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from torchrl_agentic.errors import derives, lacking
from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.base import AsyncCallable, Effects, Tool, ToolContext, Toolset, open_world
from torchrl_agentic.tools.row_data import NO_DATA, RowData
from torchrl_agentic.tools.signatures import is_async


class ToolAdapter(Tool):
    """A `Tool` that delegates to a look-alike: an object with name, description, input_schema and run."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.name = getattr(target, "name", "")
        self.description = getattr(target, "description", "") or ""
        self.input_schema = getattr(target, "input_schema", None) or {"type": "object"}
        self.output_schema = getattr(target, "output_schema", None)
        self.wants_state = bool(getattr(target, "wants_state", False))
        self.needs_row = bool(getattr(target, "needs_row", False))
        self.open_at_reset = bool(getattr(target, "open_at_reset", False))
        self.is_strict = getattr(target, "is_strict", None)
        self.effects = getattr(target, "effects", None)
        self._call_target = AsyncCallable(target.run)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Run the object's `run`, on a thread if it blocks."""
        return await self._call_target(ctx.in_thread, args, ctx)

    async def setup(self) -> None:
        """Call the object's `setup` if it has one."""
        await _call(self.target, "setup")

    async def teardown(self) -> None:
        """Call the object's `teardown` if it has one."""
        await _call(self.target, "teardown")

    async def initial_message(self) -> Any:
        """Call the object's `initial_message` if it has one."""
        return await _call(self.target, "initial_message")

    async def final_reward(self) -> float | None:
        """Call the object's `final_reward` if it has one."""
        return await _call(self.target, "final_reward")

    @property
    def has_final_reward(self) -> bool:
        """True if the object has a `final_reward`."""
        return callable(getattr(self.target, "final_reward", None))

    def check_row(self, row: RowData) -> None:
        """Call the object's `check_row` if it has one."""
        if check := getattr(self.target, "check_row", None):
            check(row)


class SessionToolAdapter(ToolAdapter):
    """A `ToolAdapter` of a look-alike whose `session` returns an async context manager."""

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Open the object's session; the live tool may be a look-alike too."""
        async with self.target.session(trajectory) as live:
            yield _live_tool(live)

    def branch(self, live: Tool, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Call the object's `branch` if it has one.

        Args:
            live: Live tool of the trajectory to copy.
            trajectory: Name of the new trajectory.
        """
        if not callable(getattr(self.target, "branch", None)):
            return super().branch(live, trajectory)
        return self._branch(live.target if isinstance(live, ToolAdapter) else live, trajectory)

    @asynccontextmanager
    async def _branch(self, live: Any, trajectory: str) -> AsyncGenerator[Tool]:
        async with self.target.branch(live, trajectory) as copy:
            yield _live_tool(copy)


def ensure_tool(item: Any) -> Tool:
    """Return a `Tool` for a Tool, a look-alike or a typed function.

    Args:
        item: A Tool; a function with annotations and a docstring; or an object with `name`, `description`,
            `input_schema` and `run(args, ctx)`, which may block. Its `setup`, `teardown`, `session` and
            `branch` are used if it has them.

    Raises:
        TypeError: For any other object. The message names the missing members, or tells what to write
            instead.
    """
    kind = type(item).__name__
    if derives(item, Tool):
        _check_async(item, "run", "await ctx.in_thread(...)")
        _check_async(item, "initial_message", "await asyncio.to_thread(...)")
        _check_async(item, "final_reward", "await asyncio.to_thread(...)")
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
        _check_members(item)
        return _adapted(item)
    if hasattr(item, "__registry_info__"):  # the name of the function is that of all tools: execute
        raise TypeError("this is a tool of inspect_ai; only its registry knows its name: tool(it, name='…')")
    from torchrl_agentic.tools.function import FunctionTool  # it imports a parser of docstrings

    marked = getattr(item, "__tool__", None)
    if isinstance(marked, FunctionTool):
        return marked
    if callable(item):
        return FunctionTool(item)
    if callable(getattr(item, "execute", None)) and callable(getattr(item, "release", None)):
        raise TypeError(
            f"{kind} has verl's create, execute and release: wrap it as LifecycleTool({kind}(...))"
        )
    if not callable(getattr(item, "run", None)) and not _lacking_of_toolset(item):
        raise TypeError(f"{kind} is a toolset: use compose.add_toolset(...)")
    raise TypeError(
        "a tool is a Tool, a typed function, or an object with name, description, input_schema and run;"
        f" {kind} lacks {', '.join(lacking(item, Tool))}"
    )


def _check_async(item: Any, method: str, instead: str) -> None:
    """Raise TypeError if a method of a `Tool` or `Toolset` is not a coroutine function."""
    found = getattr(item, method)
    if inspect.isasyncgenfunction(found):
        raise TypeError(f"{type(item).__name__}.{method} is an async generator: return a value, do not yield")
    if not is_async(found):
        raise TypeError(
            f"{type(item).__name__}.{method} is not a coroutine function: write 'async def {method}', and "
            f"call blocking functions with '{instead}'"
        )


_VALUES: Mapping[str, type[Any]] = {
    "input_schema": Mapping, "output_schema": Mapping, "description": str, "effects": Effects,
    "is_strict": bool,
}  # fmt: skip
"""Types of the values that a look-alike may have; each may be None, too."""
_METHODS: Mapping[str, tuple[Any, ...]] = {
    "run": ({}, None), "setup": (), "teardown": (), "initial_message": (), "final_reward": (),
    "check_row": (None,), "session": ("",), "branch": (None, ""),
}  # fmt: skip
"""Methods that a look-alike may have, with arguments like those that they get."""


def _check_members(item: Any) -> None:
    """Raise TypeError if a member of a look-alike has the name of one of ours, but is something else.

    Tools of other frameworks have such members: LangChain's `input_schema` is a class.
    """
    kind = type(item).__name__
    wrong = [
        f"{name} is {value!r:.60} instead of a {wanted.__name__}"
        for name, wanted in _VALUES.items()
        if not isinstance(value := getattr(item, name, None), wanted | None)
    ]
    for name, args in _METHODS.items():
        method = getattr(item, name, None)
        if method is None or (name == "session" and not callable(method)):
            continue
        try:
            inspect.signature(method).bind(*args)
        except ValueError:  # it has no readable signature
            continue
        except TypeError as error:
            wrong.append(f"{name} cannot be called as a tool's: {error}")
    if wrong:
        raise TypeError(
            f"{kind} looks like a tool, but {'; '.join(wrong)}. If it is a tool of another framework, write "
            "FunctionTool(call, name=…, description=…, schema=…), where call(**arguments) runs it"
        )


def _adapted(item: Any) -> ToolAdapter:
    return SessionToolAdapter(item) if callable(getattr(item, "session", None)) else ToolAdapter(item)


def _live_tool(item: Any) -> Tool:
    """Return a Tool for the live tool of a look-alike's session, of which only `run` is called."""
    if not derives(item, Tool) and callable(getattr(item, "run", None)):
        return _adapted(item)
    return ensure_tool(item)


_TOOLSETS = (("setup", "teardown"), ("open", "close", "tools"))
"""Members of the two kinds of look-alikes of a toolset. `tools` holds the tools after `open`; the others are
methods without arguments."""


class ToolsetAdapter(Toolset):
    """A `Toolset` that delegates to a look-alike."""

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


class WorldAdapter(ToolsetAdapter):
    """A `ToolsetAdapter` of a look-alike with a world: its `session` returns an async context manager."""

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self.name = getattr(target, "name", "") or type(target).__name__
        self.open_at_reset = bool(getattr(target, "open_at_reset", False))

    def session(self, trajectory: str, row: RowData = NO_DATA) -> AbstractAsyncContextManager[Any]:
        """Open the object's world.

        Args:
            trajectory: Name of the trajectory.
            row: Its data set row.
        """
        return open_world(self.target, trajectory, row)

    def branch(self, world: Any, trajectory: str) -> AbstractAsyncContextManager[Any]:
        """Call the object's `branch` if it has one.

        Args:
            world: World of the trajectory to copy.
            trajectory: Name of the new trajectory.
        """
        if not callable(getattr(self.target, "branch", None)):
            return super().branch(world, trajectory)
        return self.target.branch(world, trajectory)

    async def initial_message(self, world: Any) -> Any:
        """Call the object's `initial_message` if it has one."""
        return await _call(self.target, "initial_message", world)

    async def final_reward(self, world: Any) -> float | None:
        """Call the object's `final_reward` if it has one."""
        return await _call(self.target, "final_reward", world)

    @property
    def has_final_reward(self) -> bool:
        """True if the object has a `final_reward`."""
        return callable(getattr(self.target, "final_reward", None))


def ensure_toolset(item: Any) -> Toolset:
    """Return a `Toolset` for a Toolset or a look-alike.

    Args:
        item: A Toolset; an object with `setup` and `teardown`, where `setup` returns the tools; or one with
            `open`, `close` and `tools`, which holds the tools once it is open. The methods may block or be
            awaitable.

    Raises:
        TypeError: For any other object. The message names the missing members.
    """
    if isinstance(item, Toolset):
        _check_async(item, "initial_message", "await asyncio.to_thread(...)")
        _check_async(item, "final_reward", "await asyncio.to_thread(...)")
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
    return WorldAdapter(item) if callable(getattr(item, "session", None)) else ToolsetAdapter(item)


def _lacking_of_toolset(item: Any) -> list[str]:
    """Return the members that an object lacks of the kind of toolset that it is most similar to."""
    return min((_without(item, names) for names in _TOOLSETS), key=len)


def _without(item: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if not _has(item, name)]


def _has(item: Any, name: str) -> bool:
    # Static, because a property, such as that of `tools`, may raise before the toolset is open.
    found = inspect.getattr_static(item, name, None)
    if found is None or name == "tools":
        return found is not None
    try:
        inspect.signature(getattr(item, name)).bind()
    except ValueError:  # it has no readable signature
        return True
    except Exception:  # it is no method, or one that takes arguments, or a property that raises
        return False
    return True


async def _call(target: Any, method: str, *args: Any) -> Any:
    """Call a method if it exists, and await its value if it is awaitable."""
    found = getattr(target, method, None)
    value = None if found is None else found(*args)
    return await value if inspect.isawaitable(value) else value
