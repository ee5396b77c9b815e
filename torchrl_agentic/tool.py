"""What a model can call: Tool, what its calls conflict with, and what a call knows besides its arguments."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar

from torchrl_agentic.messages import JSON
from torchrl_agentic.row import NO_DATA, RowData
from torchrl_agentic.schema import Schema, tidy

current_session: ContextVar[object] = ContextVar("current_session", default=None)
"""While a tool's `session` opens: what stands for its trajectory; two environments may use one name."""
current_row: ContextVar[RowData] = ContextVar("current_row", default=NO_DATA)
"""While a tool's `session` opens: what the data set says of its trajectory, for tools with `wants_row`."""

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

    def __str__(self) -> str:
        """Say it in words."""
        if self.exclusive:
            return "exclusive"
        both = (("reads", self.reads), ("writes", self.writes))
        return "; ".join(f"{verb} {', '.join(sorted(names))}" for verb, names in both if names) or "pure"


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
    row: RowData = NO_DATA

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
    the waiting that `ToolResult.timing` tells of counts as such. opens_sessions: whether each trajectory gets
    something of its own; None means that it does if the class defines `session`. opens_at_reset: whether that
    opens when a trajectory begins, and not at the first call. wants_row: whether `ToolContext.row` and
    `current_row` are filled. origin: where it comes from and how to give it another name, for the message
    about two tools of one name.
    """

    name: str = ""
    description: str = ""
    input_schema: Schema = MappingProxyType({"type": "object", "properties": {}})
    output_schema: Schema | None = None
    wants_state: bool = False
    effects: Effects | None = None
    has_deadline: bool = False
    opens_sessions: bool | None = None
    opens_at_reset: bool = False
    wants_row: bool = False

    @property
    def origin(self) -> str:
        """Where it comes from, in words."""
        return ""

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

    async def greeting(self) -> Any:
        """Say something in the first prompt, or None; asked of what `session` gives, once it is open.

        Only where the tool `opens_at_reset`. What `run` may return may be returned.
        """
        return None

    async def finish(self) -> float | None:
        """Say what the whole trajectory was worth, or None; asked of what `session` gives, before it closes.

        Asked once, whoever ends the trajectory. An error is logged, and the session closes all the same.
        """
        return None

    def check_row(self, row: RowData) -> None:  # noqa: B027  most tools need none
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
        function = {"name": self.name, "description": self.description, "parameters": tidy(self.input_schema)}
        return {"type": "function", "function": function}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


@asynccontextmanager
async def _itself(tool: Tool) -> AsyncGenerator[Tool]:
    yield tool


def has_sessions(tool: Tool) -> bool:
    """Whether each trajectory gets something of its own from this tool."""
    if tool.opens_sessions is not None:
        return tool.opens_sessions
    return type(tool).session is not Tool.session


def has_finish(tool: Tool) -> bool:
    """Whether this tool has something to say of whole trajectories."""
    return type(tool).finish is not Tool.finish


def effects_of(tool: Tool) -> Effects:
    """The effects that a tool declares, or those that follow from its having sessions."""
    if tool.effects is not None:
        return tool.effects
    return Effects(writes=[tool.name]) if has_sessions(tool) else Effects.PURE


class Toolset(ABC):
    """Tools that share one resource, such as a connection to a server; for `ToolCompose.add_toolset`.

    revision: goes up when the tools may be others than before; whoever offers them then asks for `refresh`.
    """

    revision: int = 0

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
