"""What a model can call: Tool, its effects and context, and `ensure_tool`, which adapts what people bring."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar, overload

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import JSON
from torchrl_agentic.schema import FunctionSchema, Schema, SchemaValidationError, schema_of, tidy

current_session: ContextVar[object] = ContextVar("current_session", default=None)
"""While a tool's `session` opens: what stands for its trajectory; two environments may use one name."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effects:
    """What a call reads and writes, by the names of resources.

    A call waits for an earlier one of its trajectory iff one of them writes what the other reads or writes,
    or one of them is exclusive.
    """

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    exclusive: bool = False

    PURE: ClassVar[Effects]
    """Conflicts with nothing but exclusive calls."""
    EXCLUSIVE: ClassVar[Effects]
    """Runs alone in its trajectory."""

    def __init__(
        self, reads: Iterable[str] = (), writes: Iterable[str] = (), exclusive: bool = False
    ) -> None:
        for name, value in (
            ("reads", frozenset(reads)),
            ("writes", frozenset(writes)),
            ("exclusive", exclusive),
        ):
            object.__setattr__(self, name, value)


Effects.PURE = Effects()
Effects.EXCLUSIVE = Effects(exclusive=True)


class Threads(Protocol):
    """Something that runs blocking functions off the event loop."""

    async def run(self, function: Callable[[], T]) -> T:
        """Run it on a thread of its own."""
        ...


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a call knows besides its arguments. `ToolContext(call_id="c1")` is enough to run a tool by hand.

    state: a read-only view of the environment's row, for tools with `wants_state`. sandbox, repl: what the
    tool holds, if anything. compose: the ToolCompose that dispatches. batch_index: the row. turn: counts from
    0.
    deadline: the time of the event loop's clock at which the call is stopped.
    """

    call_id: str
    tag: str | None = None
    state: Any = None
    sandbox: Any = None
    repl: Any = None
    compose: Any = None
    batch_index: int = 0
    trajectory: str = ""
    turn: int = 0
    deadline: float | None = None
    threads: Threads | None = None

    async def in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function off the event loop, on the dispatcher's own threads where there is one."""
        if self.threads is None:
            return await asyncio.to_thread(function, *args, **kwargs)
        return await self.threads.run(lambda: function(*args, **kwargs))


class Tool(ABC):
    """Something a model can call by name.

    name: what the model writes; unique in a ToolCompose. description, input_schema: what the model is told.
    output_schema: for readers. wants_state: whether `ToolContext.state` is filled. effects: see `Effects`;
    None means PURE for a tool without sessions and `Effects(writes=[name])` for a tool with them.
    has_deadline: whether it waits in a line of its own, and ends by itself: no `per_call_timeout` then, and
    the waiting that `ToolResult.timing` tells of counts as such.
    """

    name: str = ""
    description: str = ""
    input_schema: Schema = MappingProxyType({"type": "object", "properties": {}})
    output_schema: Schema | None = None
    wants_state: bool = False
    effects: Effects | None = None
    has_deadline: bool = False

    @abstractmethod
    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Answer one call. `ToolResult.from_value` says what may be returned.

        Raises:
            ToolError: the model can put it right.
            StopSignal: the trajectory ends here.
            InfrastructureError: nobody who reads the result is to blame.
        """

    async def setup(self) -> None:  # noqa: B027  most tools own nothing
        """Make ready what the process owns; called once before the first use. An error stops the program."""

    async def teardown(self) -> None:  # noqa: B027  most tools own nothing
        """Give back what `setup` made."""

    def session(self, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Open what this trajectory talks to.

        The tool itself if it is stateless, a fresh one if it has state; what is kept on the tool itself is
        shared by all trajectories. Opened lazily at the first call of a trajectory, closed exactly once, both
        in the same task. With state it looks like this::

            @contextlib.asynccontextmanager
            async def session(self, trajectory):
                yield Counter()  # a tool for this trajectory alone; clean up behind the yield
        """
        del trajectory
        return _itself(self)

    def branch(self, live: Tool, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Open what a new trajectory talks to that goes on from where another one is.

        live: what `session` or `branch` gave that one; it goes on too, and neither sees what the other does
        from now on. To be defined beside `session`, as its counterpart.

        Raises:
            TypeError: the tool has state and does not say how to copy it.
        """
        if has_sessions(self):
            raise TypeError(f"{self.name!r} cannot be branched: {type(self).__name__} defines no branch()")
        del live, trajectory
        return _itself(self)

    def spec(self) -> dict[str, JSON]:
        """Describe the tool in the shape that chat templates and API servers expect."""
        function = {"name": self.name, "description": self.description, "parameters": tidy(self.input_schema)}
        return {"type": "function", "function": function}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


@asynccontextmanager
async def _itself(tool: Tool) -> AsyncGenerator[Tool]:
    yield tool


def has_sessions(tool: Tool) -> bool:
    """Whether each trajectory gets something of its own from this tool."""
    return type(tool).session is not Tool.session


def effects_of(tool: Tool) -> Effects:
    """The effects that a tool declares, or those that follow from its having sessions."""
    if tool.effects is not None:
        return tool.effects
    return Effects(writes=[tool.name]) if has_sessions(tool) else Effects.PURE


class Toolset(ABC):
    """Tools that share one resource, such as a connection to a server; for `ToolCompose.add_toolset`."""

    @abstractmethod
    async def setup(self) -> Sequence[Tool]:
        """Open the resource and give its tools."""

    @abstractmethod
    async def teardown(self) -> None:
        """Close the resource; called once, after the last call of any of its tools."""


class FunctionTool(Tool):
    """A typed function as a tool: name, description and schema are read off its signature and docstring.

    A blocking function runs on a thread. A parameter annotated `ToolContext` is filled in, hidden from the
    model. schema: used in place of the signature's; arguments are then passed as they come.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        effects: Effects = Effects.PURE,
        schema: Schema | None = None,
    ) -> None:
        self.function = function
        self._signature: FunctionSchema | None = None
        if schema is None:
            self._signature = schema_of(function, hide=(ToolContext,))
        self._context = next(iter(self._signature.hidden), None) if self._signature else None
        fallback = getattr(function, "__name__", type(function).__name__)
        self.name = name or (self._signature.name if self._signature else fallback)
        if not name and self.name == "<lambda>":
            raise TypeError("a lambda has no name that a model could call; pass name=")
        told = self._signature.description if self._signature else inspect.getdoc(function)
        self.description = description if description is not None else told or ""
        self.input_schema = self._signature.input_schema if self._signature else schema or {"type": "object"}
        self.effects = effects
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  its being a coroutine function is the question
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as if it had not been decorated."""
        return self.function(*args, **kwargs)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Call the function with the arguments by name."""
        try:
            kwargs = self._signature.arguments(args) if self._signature else dict(args)
        except SchemaValidationError as error:
            raise ToolError(str(error)) from None
        if self._context is not None:
            kwargs[self._context] = ctx
        if self._is_async:
            return await self.function(**kwargs)
        value = await ctx.in_thread(self.function, **kwargs)
        return await value if inspect.isawaitable(value) else value

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle by reference where a decorator has put the tool in the place of its function."""
        module, name = getattr(self.function, "__module__", None), getattr(self.function, "__qualname__", "")
        if module is not None and _found(module, name) is self:
            return (_found, (module, name))
        schema = None if self._signature else self.input_schema
        return (_rebuild, (self.function, self.name, self.description, self.effects, schema))


def _found(module: str, qualname: str) -> Any:
    import importlib

    found: Any = importlib.import_module(module)
    for step in qualname.split("."):
        found = getattr(found, step, None)
    return found


def _rebuild(
    function: Callable[..., Any], name: str, description: str, effects: Effects, schema: Schema | None
) -> FunctionTool:
    return FunctionTool(function, name=name, description=description, effects=effects, schema=schema)


@overload
def tool(function: Callable[..., Any], /, **options: Any) -> FunctionTool: ...
@overload
def tool(function: None = None, /, **options: Any) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **options: Any
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool of a typed, documented function: `@tool`, `@tool(name="add")` or `tool(add, name="plus")`.

    The options are those of `FunctionTool`: name, description, effects, schema.
    """
    if function is not None:
        return FunctionTool(function, **options)

    def decorate(function: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(function, **options)

    return decorate


class DuckTool(Tool):
    """An object that has name, description, input_schema and run, but is no `Tool`."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.name = target.name
        self.description = getattr(target, "description", "") or ""
        self.input_schema = getattr(target, "input_schema", None) or {"type": "object"}
        self.output_schema = getattr(target, "output_schema", None)
        self.wants_state = bool(getattr(target, "wants_state", False))
        self.effects = getattr(target, "effects", None)
        self._is_async = inspect.iscoroutinefunction(target.run)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Hand the call on."""
        if self._is_async:
            return await self.target.run(args, ctx)
        value = await ctx.in_thread(self.target.run, args, ctx)
        return await value if inspect.isawaitable(value) else value

    async def setup(self) -> None:
        """Set the object up, if it can be."""
        await self._maybe("setup")

    async def teardown(self) -> None:
        """Tear the object down, if it can be."""
        await self._maybe("teardown")

    async def _maybe(self, method: str) -> None:
        value = getattr(self.target, method, lambda: None)()
        if inspect.isawaitable(value):
            await value


class DuckSessionTool(DuckTool):
    """A look-alike that opens something per trajectory: its `session` is an async context manager."""

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Open what the object opens; that need not be a `Tool` either."""
        async with self.target.session(trajectory) as live:
            yield ensure_tool(live)

    def branch(self, live: Tool, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Let the object open a branch, if it can."""
        if not callable(getattr(self.target, "branch", None)):
            return super().branch(live, trajectory)
        return self._branch(live.target if isinstance(live, DuckTool) else live, trajectory)

    @asynccontextmanager
    async def _branch(self, live: Any, trajectory: str) -> AsyncGenerator[Tool]:
        async with self.target.branch(live, trajectory) as copy:
            yield ensure_tool(copy)


def ensure_tool(item: Any) -> Tool:
    """Make a `Tool` of whatever people bring: a Tool, a look-alike, a typed function.

    Raises:
        TypeError: it is none of these; the message says what to write instead.
    """
    kind = type(item).__name__
    if isinstance(item, Tool):
        if not inspect.iscoroutinefunction(item.run):
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
    if isinstance(getattr(item, "name", None), str) and callable(getattr(item, "run", None)):
        return DuckSessionTool(item) if callable(getattr(item, "session", None)) else DuckTool(item)
    if callable(item):
        return FunctionTool(item)
    raise TypeError(f"a tool is a Tool, a typed function, or an object with name and run; got {kind}")
