"""`Tool`, the base class of everything a model can call, with its `Effects`, `ToolContext` and `Toolset`."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Protocol, TypeVar, cast

from torchrl_agentic.errors import Interface
from torchrl_agentic.messages import JSON, JSON_TYPES, MAX_YIELDED, listed
from torchrl_agentic.tools.row_data import NO_DATA, RowData
from torchrl_agentic.tools.signatures import is_async

if TYPE_CHECKING:
    from torchrl_agentic.limits import Limiter, Slot
    from torchrl_agentic.tools.schema_simplify import Schema

current_session: ContextVar[object] = ContextVar("current_session", default=None)
"""Session of the trajectory whose tool is being opened; two environments may use one trajectory name."""
current_row: ContextVar[RowData] = ContextVar("current_row", default=NO_DATA)
"""Data set row of the trajectory whose tool is being opened, for tools with `needs_row`."""

P = ParamSpec("P")
T = TypeVar("T")

STOP_MARGIN_S, STOP_SHARE = 1.5, 0.5
"""A process is stopped this many seconds, or this share of its time, before the deadline of its call."""


@dataclass(frozen=True, slots=True)
class _EffectsFields:
    """Stored fields of `Effects`; see `messages._ToolResultFields` for why they have a class of their own."""

    reads: frozenset[str]
    writes: frozenset[str]
    exclusive: bool


@dataclass(frozen=True, init=False)
class Effects(_EffectsFields):
    """Resources that a tool call reads and writes, by name.

    A call waits for an earlier call of its trajectory if one of the two writes a resource that the other one
    reads or writes, or if one of them is exclusive.

    Args:
        reads: Names of the resources that the call reads.
        writes: Names of the resources that the call changes.
        exclusive: Whether the call runs alone in its trajectory.

    Attributes:
        PURE: Conflicts only with exclusive calls.
        EXCLUSIVE: Runs alone in its trajectory.
    """

    __slots__ = ()

    PURE: ClassVar[Effects]
    EXCLUSIVE: ClassVar[Effects]

    def __init__(
        self, reads: Iterable[str] = (), writes: Iterable[str] = (), exclusive: bool = False
    ) -> None:
        super().__init__(frozenset(reads), frozenset(writes), exclusive)

    @property
    def may_change(self) -> bool:
        """True if a call may change something: it writes a resource, or is exclusive."""
        return bool(self.writes or self.exclusive)

    def __str__(self) -> str:
        """Return "exclusive", "pure", or the names with the verbs "reads" and "writes"."""
        if self.exclusive:
            return "exclusive"
        both = (("reads", self.reads), ("writes", self.writes))
        return "; ".join(f"{verb} {', '.join(sorted(names))}" for verb, names in both if names) or "pure"


Effects.PURE = Effects()
Effects.EXCLUSIVE = Effects(exclusive=True)


class Clock(Protocol):
    """The running time of one call, which the dispatcher bounds by `per_call_timeout`."""

    def stop(self) -> None:
        """Stop the clock while the call waits in a queue."""
        ...

    def go_on(self) -> float | None:
        """Start the clock again.

        Returns:
            The new deadline in seconds of the event loop's clock, or None if the call has no deadline.
        """
        ...

    @property
    def deadline(self) -> float | None:
        """Current deadline in seconds of the event loop's clock, or None if the call has no deadline."""
        ...


class Threads(Protocol):
    """A pool of threads for blocking functions."""

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function on a thread, and return its result."""
        ...


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The context of a tool call. `ToolContext(call_id="c1")` is enough to run a tool by hand.

    Attributes:
        call_id: Id of the call, unique in its trajectory.
        tag: Tag that the model gave the call, if its format has tags.
        state: Read-only view of the environment's row, for tools with `wants_state`.
        sandbox: Sandbox of the tool, if it has one.
        repl: Interpreter of the tool, if it has one.
        compose: The `ToolCompose` that runs the call.
        batch_index: Index of the row in the flattened batch; in a collector, a number that no other running
            trajectory has.
        trajectory: Name of the trajectory, unique in a process.
        group: Name of its group in a collector, unique in a process; "" elsewhere.
        turn: Number of the turn, from 0.
        deadline: Time at which the call is stopped, in seconds of the event loop's clock; None: never.
        threads: Runs blocking functions; None: threads of asyncio.
        row: Data set row of the trajectory, for tools with `needs_row`.
        clock: Clock of the call, which `queue` stops.
        world: State that the tools of a toolset share in this trajectory; see `Toolset.session`.
        limiter: Limiter of the tool, if it has one. The call has its slot already, and the dispatcher
            records its result; further requests that a tool makes at the same time may take slots of their
            own.
        slot: Slot of the call; a tool that pauses may release it, and acquire it again in `queue`.
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
    row: RowData = NO_DATA
    clock: Clock | None = None
    world: Any = None
    limiter: Limiter | None = None
    slot: Slot | None = None
    group: str = ""

    def run_seconds(self, limit: float | None = None) -> float | None:
        """Return how long a tool should let a process run, a little less than the time to `deadline`.

        A call that reaches its deadline returns nothing. A process that is stopped before leaves time to read
        what it wrote.

        Args:
            limit: Seconds that the process may take at most; None: as long as the call may take.

        Returns:
            Seconds from now, or None if nothing bounds the process.
        """
        if self.deadline is None:
            return limit
        left = self.deadline - asyncio.get_running_loop().time()
        seconds = left - min(STOP_MARGIN_S, STOP_SHARE * left)
        return seconds if limit is None else min(limit, seconds)

    async def queue(self, waiting: Awaitable[T]) -> tuple[T, ToolContext]:
        """Await something, and count the time as queueing, which `per_call_timeout` does not bound.

        For tools that have a queue of their own, for example for a slot of a service or for a human being.
        The tool has to bound this wait itself.

        Args:
            waiting: The awaitable.

        Returns:
            Its result, and a context to continue with, whose `deadline` is later by the waiting time.
        """
        if self.clock is None:
            return await waiting, self
        self.clock.stop()
        try:
            result = await waiting
        finally:
            deadline = self.clock.go_on()
        return result, replace(self, deadline=deadline)

    async def in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function on a thread, of the dispatcher if there is one.

        Args:
            function: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The result of the function.
        """
        if self.threads is None:
            return await asyncio.to_thread(function, *args, **kwargs)
        return await self.threads.run(lambda: function(*args, **kwargs))


class AsyncCallable:
    """An async function around any function: a coroutine function is awaited, any other runs on a thread.

    An awaitable that a function returns is awaited too. What a generator, or an async generator, yields
    becomes a list, on the thread or the event loop on which the generator runs.

    Args:
        function: The function.

    Attributes:
        function: The function.
        is_async: Whether it is a coroutine function.
    """

    __slots__ = ("function", "is_async")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.is_async = is_async(function)

    async def __call__(self, in_thread: Callable[..., Awaitable[Any]], /, *args: Any, **kwargs: Any) -> Any:
        """Call the function; `in_thread(function, *args, **kwargs)` runs it on a thread if it may block."""
        if self.is_async:
            value = await self.function(*args, **kwargs)
        else:
            value = await in_thread(_on_thread, self.function, *args, **kwargs)
        return value if type(value) in JSON_TYPES else await _settled(value)


def _on_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    value = function(*args, **kwargs)
    return listed(cast("Iterator[Any]", value)) if isinstance(value, Iterator) else value


async def _settled(value: Any) -> Any:
    """Await an awaitable, and collect what an async generator yields."""
    while isinstance(value, Awaitable):
        value = await cast("Awaitable[Any]", value)
    if not isinstance(value, AsyncGenerator):
        return value
    found: list[Any] = []
    async with aclosing(cast("AsyncGenerator[Any]", value)) as items:
        async for item in items:
            found.append(item)
            if len(found) > MAX_YIELDED:
                break
    return listed(iter(found))


class Tool(metaclass=Interface, members=("name", "description", "input_schema", "run")):
    """Something a model can call by name.

    `isinstance(item, Tool)` is true of look-alikes too: objects of any class with a `name`, a `description`,
    an `input_schema` and a `run(args, ctx)`. They are accepted wherever a tool is; see `ensure_tool`.

    Attributes:
        name: The name that the model calls; unique in a `ToolCompose`.
        description: Description of the tool for the model.
        input_schema: JSON Schema of the arguments, for the model and for validation.
        output_schema: JSON Schema of the result, or None; for readers only.
        wants_state: Whether the dispatcher sets `ToolContext.state`.
        effects: Resources that a call reads and writes. None: `Effects.PURE` if the tool is stateless, else
            `Effects(writes=[name])`.
        stateful: Whether each trajectory gets its own session. None: it does if the class overrides
            `session`.
        open_at_reset: Whether the session opens when a trajectory begins, instead of at the first call.
        needs_row: Whether the dispatcher sets `ToolContext.row` and `current_row`.
        is_strict: The key `strict` of the spec; None: the spec has no such key.
    """

    name: str = ""
    description: str = ""
    input_schema: Schema = MappingProxyType({"type": "object", "properties": {}})
    output_schema: Schema | None = None
    wants_state: bool = False
    effects: Effects | None = None
    stateful: bool | None = None
    open_at_reset: bool = False
    needs_row: bool = False
    is_strict: bool | None = None

    @property
    def origin(self) -> str:
        """Where the tool comes from and how to rename it, for the message about two tools of one name."""
        return ""

    @property
    def default_effects(self) -> Effects:
        """Effects of a tool whose `effects` are None and whose toolset has no world."""
        return Effects(writes=[self.name]) if has_sessions(self) else Effects.PURE

    @abstractmethod
    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Run one call.

        Args:
            args: Arguments of the call, which fit `input_schema` if the dispatcher validates them.
            ctx: Context of the call.

        Returns:
            Anything that `ToolResult.from_value` takes: a text, a number, a JSON value, a `ToolResult`.

        Raises:
            ToolError: If the model can correct the call; it reads the message.
            StopSignal: To end the trajectory after this turn.
            InfrastructureError: If the model is not to blame; rewards can leave such calls out.
        """

    async def setup(self) -> None:
        """Open what the process owns; called once before the first use. An error stops the program."""

    async def teardown(self) -> None:
        """Close what `setup` opened; called once."""

    def session(self, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Open the session of a trajectory: the live tool that runs its calls.

        The default returns the tool itself, whose attributes all trajectories share. A tool with state
        yields a new tool for each trajectory::

            @contextlib.asynccontextmanager
            async def session(self, trajectory):
                yield Counter()  # a tool for this trajectory alone; clean up behind the yield

        The session opens at the first call of a trajectory, at its beginning if `open_at_reset` is true, or
        before its final reward. It closes exactly once, in the task that opened it.

        Args:
            trajectory: Name of the trajectory, unique in a process.

        Returns:
            An async context manager that yields the live tool.
        """
        del trajectory
        return _itself(self)

    async def initial_message(self) -> Any:
        """Return a message for the first prompt, or None; called on the live tool after its session opens.

        Used only if `open_at_reset` is true. The value may be anything that `run` may return. If it raises,
        the trajectory could not begin: its row ends "not_begun" in an environment, and a collector replaces
        it.
        """
        return None

    async def final_reward(self) -> float | None:
        """Return the reward of the whole trajectory, or None; called on the live tool before it closes.

        Called once per trajectory that ends, also if no call has opened the session: it opens for this.

        If the method raises, takes longer than `per_call_timeout`, or returns no finite number, the
        trajectory has no verdict: its reward is NaN in an environment, and the failure "reward" in a
        collector.

        Raises:
            InvalidTask: If the task cannot be used; a collector drops its group.
        """
        return None

    @property
    def has_final_reward(self) -> bool:
        """True if `final_reward` is defined, so that the session opens for it if no call has opened it.

        Override it in a tool whose `session` yields another class, which alone defines `final_reward`.
        """
        return type(self).final_reward is not Tool.final_reward

    def check_row(self, row: RowData) -> None:
        """Check that a data set row has what this tool needs; called at the start of each trajectory.

        Args:
            row: The row.

        Raises:
            ValueError: If a value is missing or wrong.
        """

    def branch(self, live: Tool, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Open the session of a new trajectory with a copy of the state of another one.

        Override it together with `session`. Both trajectories continue, and neither sees later changes of
        the other.

        Args:
            live: Live tool of the trajectory to copy, from `session` or `branch`.
            trajectory: Name of the new trajectory.

        Returns:
            An async context manager that yields the live tool of the new trajectory.

        Raises:
            TypeError: If the tool has state and does not override `branch`.
        """
        if has_sessions(self):
            raise TypeError(f"{self.name!r} cannot be branched: {type(self).__name__} defines no branch()")
        del live, trajectory
        return _itself(self)

    @property
    def unwrapped(self) -> Tool:
        """The tool inside all wrappers; the tool itself if it is no wrapper."""
        return self

    def spec(self) -> dict[str, JSON]:
        """Return the tool as `{"type": "function", "function": {…}}`, for chat templates and API servers."""
        from torchrl_agentic.tools.schema_simplify import simplify_schema

        function: dict[str, JSON] = {
            "name": self.name,
            "description": self.description,
            "parameters": simplify_schema(self.input_schema),
        }
        if self.is_strict is not None:
            function["strict"] = self.is_strict
        return {"type": "function", "function": function}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


@asynccontextmanager
async def _itself(tool: Tool) -> AsyncGenerator[Tool]:
    yield tool


def has_sessions(tool: Tool) -> bool:
    """Return whether each trajectory gets its own session of this tool."""
    if tool.stateful is not None:
        return tool.stateful
    return type(tool).session is not Tool.session


def effects_of(tool: Tool) -> Effects:
    """Return the effects that a tool declares, or its default ones."""
    return tool.default_effects if tool.effects is None else tool.effects


class Toolset(ABC):
    """Tools that share a resource of the process, or a world, for `ToolCompose.add_toolset`.

    A world is the state that all tools of the toolset share within one trajectory: a file system, a shop, a
    game. A toolset has one if its class overrides `session`. Its tools read it from `ToolContext.world`, and
    typed functions from a parameter `world: Injected[...]`. Tools that declare no effects then write the
    toolset's name, so that the calls of a trajectory run in the order in which the model wrote them.

    Attributes:
        name: Resource that its tools write by default; "" means the name of the class.
        revision: Counter that increases when the tools may have changed; `refresh` is called then.
        open_at_reset: Whether the world opens when a trajectory begins, instead of at the first call.
    """

    name: str = ""
    revision: int = 0
    open_at_reset: bool = False

    @property
    def world(self) -> Toolset | None:
        """The toolset whose `session` opens the worlds of these tools; None if they have none."""
        return self if type(self).session is not Toolset.session else None

    @abstractmethod
    async def setup(self) -> Sequence[Tool]:
        """Open the resource, and return its tools."""

    @abstractmethod
    async def teardown(self) -> None:
        """Close the resource; called once, after the last call of any of its tools."""

    async def refresh(self) -> Sequence[Tool]:
        """Return the current tools; a tool that has changed may be the same object as before.

        Called only after `revision` has increased.
        """
        raise NotImplementedError(f"{type(self).__name__} increases revision, so it must override refresh()")

    def session(self, trajectory: str) -> AbstractAsyncContextManager[Any]:
        """Open the world of a trajectory; override it in a toolset that has one.

        The world opens at the first call of any tool of the toolset, when the trajectory begins if
        `open_at_reset` is true, or before the final reward. It closes once, at the end of the trajectory, in
        the task that opened it::

            @contextlib.asynccontextmanager
            async def session(self, trajectory, row):
                yield FileSystem(row.columns["files"])

        Args:
            trajectory: Name of the trajectory, unique in a process.
            row: Data set row of the trajectory, a `RowData`; passed if the method has a parameter of this
                name.

        Returns:
            An async context manager that yields the world.
        """
        raise NotImplementedError(f"{type(self).__name__} has no world: it does not override session()")

    def branch(self, world: Any, trajectory: str) -> AbstractAsyncContextManager[Any]:
        """Open the world of a new trajectory with a copy of the state of another one, as `Tool.branch` does.

        Args:
            world: The world of the other trajectory, which continues too.
            trajectory: Name of the new trajectory.

        Returns:
            An async context manager that yields the world of the new trajectory.

        Raises:
            TypeError: If the toolset does not override `branch`.
        """
        raise TypeError(f"{world_name(self)!r} cannot be branched: {type(self).__name__} defines no branch()")

    async def initial_message(self, world: Any) -> Any:
        """Return a message for the first prompt, or None; called after the world of a trajectory has opened.

        Used only if `open_at_reset` is true; see `Tool.initial_message`.

        Args:
            world: The world at the beginning of the trajectory.
        """
        del world
        return None

    async def final_reward(self, world: Any) -> float | None:
        """Return the reward of a whole trajectory, or None; called once, before its world closes.

        The world opens for this if no call has opened it. See `Tool.final_reward` for failures.

        Args:
            world: The world at the end of the trajectory.
        """
        del world
        return None

    @property
    def has_final_reward(self) -> bool:
        """True if `final_reward` is defined, so that the world opens for it if no call has opened it."""
        return type(self).final_reward is not Toolset.final_reward


def open_world(toolset: Any, trajectory: str, row: RowData) -> AbstractAsyncContextManager[Any]:
    """Open the world of a trajectory.

    Args:
        toolset: A `Toolset`, or a look-alike with a `session`.
        trajectory: Name of the trajectory, unique in a process.
        row: Data set row of the trajectory; passed on if `session` has a parameter of this name.

    Returns:
        An async context manager that yields the world.
    """
    takes_row = "row" in inspect.signature(toolset.session).parameters
    return toolset.session(trajectory, **({"row": row} if takes_row else {}))


def world_name(toolset: Toolset) -> str:
    """Return the name of the resource that the tools of a toolset write by default."""
    return toolset.name or type(toolset).__name__
