"""What a model can call: Tool, what its calls conflict with, and what a call knows besides its arguments."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar

from torchrl_agentic.errors import Interface
from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.row_data import NO_DATA, RowData
from torchrl_agentic.tools.schema_simplify import Schema, simplify_schema

current_session: ContextVar[object] = ContextVar("current_session", default=None)
"""While a tool's `session` opens: what stands for its trajectory; two environments may use one name."""
current_row: ContextVar[RowData] = ContextVar("current_row", default=NO_DATA)
"""While a tool's `session` opens: what the data set says of its trajectory, for tools with `needs_row`."""

P = ParamSpec("P")
T = TypeVar("T")


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

    def __str__(self) -> str:
        """Return "exclusive", "pure", or the names with the verbs "reads" and "writes"."""
        if self.exclusive:
            return "exclusive"
        both = (("reads", self.reads), ("writes", self.writes))
        return "; ".join(f"{verb} {', '.join(sorted(names))}" for verb, names in both if names) or "pure"


Effects.PURE = Effects()
Effects.EXCLUSIVE = Effects(exclusive=True)


class Clock(Protocol):
    """The time of one call, which its dispatcher bounds by `per_call_timeout`."""

    def stop(self) -> None:
        """Stop it: what follows is queueing."""
        ...

    def go_on(self) -> float | None:
        """Let it run again, and return the new deadline on the event loop's clock; None if there is none."""
        ...

    @property
    def deadline(self) -> float | None:
        """The deadline as it is now, on the event loop's clock; None if there is none."""
        ...


class Threads(Protocol):
    """Something that runs blocking functions off the event loop."""

    async def run(self, function: Callable[[], T]) -> T:
        """Run it on a thread of its own."""
        ...


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a call knows besides its arguments. `ToolContext(call_id="c1")` is enough to run a tool by hand.

    state: a read-only view of the environment's row, for tools with `wants_state`. sandbox, repl: what the
    tool holds, if anything. compose: the ToolCompose that dispatches. batch_index: the row. trajectory: its
    name, unique in a process. turn: counts from 0. deadline: the time of the event loop's clock at which the
    call is stopped; None if it is not. row: what the data set says of the trajectory, for tools with
    `needs_row`. clock: what `queue` stops. world: what the tools of this tool's toolset share in this
    trajectory; see `Toolset.session`.
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

    async def queue(self, waiting: Awaitable[T]) -> tuple[T, ToolContext]:
        """Await something that counts as queueing, and not as the run that `per_call_timeout` bounds.

        For tools that wait in a line of their own: for a slot of the service that they call, for a human
        being. The tool has to bound this wait itself.

        Args:
            waiting: What to wait for.

        Returns:
            Its result, and the context to go on with, whose `deadline` is later by the time that was waited.
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
        """Run a blocking function off the event loop, on the dispatcher's own threads where there is one."""
        if self.threads is None:
            return await asyncio.to_thread(function, *args, **kwargs)
        return await self.threads.run(lambda: function(*args, **kwargs))


class Tool(metaclass=Interface, members=("name", "description", "input_schema", "run")):
    """Something a model can call by name.

    `isinstance(item, Tool)` is true of look-alikes too: objects of any class with a `name`, a `description`,
    an `input_schema` and a `run(args, ctx)`. They are accepted wherever a tool is; see `ensure_tool`.

    name: what the model writes; unique in a ToolCompose. description, input_schema: what the model is told.
    output_schema: for readers. wants_state: whether `ToolContext.state` is filled. effects: see `Effects`;
    None means PURE for a tool without sessions and `Effects(writes=[name])` for a tool with them.
    stateful: whether each trajectory gets something of its own; None means that it does if the class
    defines `session`. open_at_reset: whether that opens when a trajectory begins, and not at the first call.
    needs_row: whether `ToolContext.row` and `current_row` are filled. origin: where it comes from and how to
    give it another name, for the message about two tools of one name. is_strict: the key `strict` of its
    spec; None: left out.
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
        """Where it comes from, in words."""
        return ""

    @property
    def default_effects(self) -> Effects:
        """The effects of a tool that declares none, outside of a toolset with a world."""
        return Effects(writes=[self.name]) if has_sessions(self) else Effects.PURE

    @abstractmethod
    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Answer one call. `ToolResult.from_value` says what may be returned.

        Raises:
            ToolError: the model can put it right.
            StopSignal: the trajectory ends here.
            InfrastructureError: nobody who reads the result is to blame.
        """

    async def setup(self) -> None:
        """Make ready what the process owns; called once before the first use. An error stops the program."""

    async def teardown(self) -> None:
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

    async def initial_message(self) -> Any:
        """Say something in the first prompt, or None; asked of what `session` gives, once it is open.

        Only where the tool `open_at_reset`. What `run` may return may be returned.
        """
        return None

    async def final_reward(self) -> float | None:
        """Say what the whole trajectory was worth, or None; asked of what `session` gives, before it closes.

        Asked once, whoever ends the trajectory. An error is logged, and the session closes all the same.
        """
        return None

    def check_row(self, row: RowData) -> None:
        """See that the data set has what this tool needs; called at the start of each trajectory.

        Raises:
            ValueError: it has not.
        """

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
    """Whether each trajectory gets something of its own from this tool."""
    if tool.stateful is not None:
        return tool.stateful
    return type(tool).session is not Tool.session


def has_final_reward(tool: Tool) -> bool:
    """Whether this tool has something to say of whole trajectories."""
    return type(tool).final_reward is not Tool.final_reward


def effects_of(tool: Tool) -> Effects:
    """The effects that a tool declares, or those that follow from its having sessions."""
    return tool.default_effects if tool.effects is None else tool.effects


class Toolset(ABC):
    """Tools that share something, for `ToolCompose.add_toolset`: a resource of the process, or a world.

    A world is what all tools of the toolset share within one trajectory: a file system, a shop, a game. A
    toolset has one if its class defines `session`. Its tools find it as `ToolContext.world`, and typed
    functions in a parameter `world: Injected[...]`. Tools that declare no effects then write the toolset's
    name, so that the calls of a trajectory happen in the order in which the model wrote them.

    Attributes:
        name: What its tools write by default; the name of the class if it is empty.
        revision: Goes up when the tools may be others than before; `refresh` is called then.
    """

    name: str = ""
    revision: int = 0

    @property
    def world(self) -> Toolset | None:
        """The toolset whose `session` opens the worlds of these tools; None if they have none."""
        return self if type(self).session is not Toolset.session else None

    @abstractmethod
    async def setup(self) -> Sequence[Tool]:
        """Open the resource and give its tools."""

    @abstractmethod
    async def teardown(self) -> None:
        """Close the resource; called once, after the last call of any of its tools."""

    async def refresh(self) -> Sequence[Tool]:
        """Give the tools as they are now; one that has changed may be the same object as before.

        Called only where `revision` goes up.
        """
        raise NotImplementedError(f"{type(self).__name__} has a revision that goes up, and no refresh()")

    def session(self, trajectory: str) -> AbstractAsyncContextManager[Any]:
        """Open the world of a trajectory; to be defined by toolsets that have one.

        It is opened at the first call of any tool of the toolset, and closed once, at the end of the
        trajectory, both in one task::

            @contextlib.asynccontextmanager
            async def session(self, trajectory, row):
                yield FileSystem(row.columns["files"])

        Args:
            trajectory: Name of the trajectory, unique in a process.
            row: What the data set says of the trajectory, a `RowData`; passed if the method has a parameter
                of this name.
        """
        raise NotImplementedError(f"{type(self).__name__} has no world: it defines no session()")

    def branch(self, world: Any, trajectory: str) -> AbstractAsyncContextManager[Any]:
        """Open the world of a new trajectory that goes on from where another one is, as `Tool.branch` does.

        Args:
            world: The world of the other trajectory, which goes on too.
            trajectory: Name of the new trajectory.

        Raises:
            TypeError: If the toolset does not define how to copy a world.
        """
        raise TypeError(f"{world_name(self)!r} cannot be branched: {type(self).__name__} defines no branch()")

    async def final_reward(self, world: Any) -> float | None:
        """Return the reward of a whole trajectory, or None; called once, before its world closes.

        Args:
            world: The world as the trajectory leaves it.
        """
        del world
        return None


def open_world(toolset: Any, trajectory: str, row: RowData) -> AbstractAsyncContextManager[Any]:
    """Call `session` of a toolset or of a look-alike, with the row if it takes one."""
    takes_row = "row" in inspect.signature(toolset.session).parameters
    return toolset.session(trajectory, **({"row": row} if takes_row else {}))


def world_name(toolset: Toolset) -> str:
    """Return the name of the resource that the tools of a toolset write by default."""
    return toolset.name or type(toolset).__name__
