"""`Dispatcher`: the tools of an environment, ready to be called, and the turns that run on them.

`SessionRows`: the sessions of an environment's rows, and the dispatcher behind them, in one process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from torchrl_agentic.dispatch.event_loop import WorkerThreads, run, start
from torchrl_agentic.dispatch.row_numbers import RowNumbers
from torchrl_agentic.dispatch.session import Session, ToolSelection
from torchrl_agentic.dispatch.turn import BoundTool, TurnRunner
from torchrl_agentic.errors import check_count, check_seconds
from torchrl_agentic.tools.base import Effects, Tool, Toolset, effects_of, has_sessions, world_name
from torchrl_agentic.tools.row_data import trajectory_name
from torchrl_agentic.tools.tool_adapter import ensure_tool

if TYPE_CHECKING:
    from torchrl_agentic.limits import Limiter

T = TypeVar("T")
logger = logging.getLogger(__name__)
_environments = itertools.count()
"""Numbers for the names of trajectories: one for each `SessionRows` of this process."""


class Dispatcher(TurnRunner):
    """Runs the calls of any number of trajectories, concurrently where their effects allow it.

    Args:
        tools: Tools, look-alikes or typed functions; see `ensure_tool`.
        rate_limits: Limiters by the names of tools. Share a limiter between dispatchers that use the same
            service.
        per_call_timeout: Seconds that one run of any tool may take, from its start and with its retries, or
            None for no limit. Waiting for a slot of a limiter, or in a queue of the tool, does not count.
        per_turn_timeout: Seconds that all calls of a turn may take, queueing included, or None for no limit.
        validate_inputs: Whether arguments are checked against the tool's schema before it runs.
        max_threads: Number of blocking tools that run at once.
        max_calls_per_turn: Number of calls that a message may contain, or None for no limit; further calls
            get SKIPPED results.
        tool_selection: Called with the name of a trajectory, its turn and its `RowData` before the calls of a
            turn run; returns the names of the tools that it may use, or None to follow the data set.
        compose: Object that tools find as `ToolContext.compose`.

    Raises:
        TypeError: If an item is not a tool, or an option has the wrong type.
        ValueError: If two tools have one name, a limit names an unknown tool, a schema is invalid, or a limit
            is not above 0.
    """

    def __init__(
        self,
        tools: Iterable[Any] = (),
        *,
        rate_limits: Mapping[str, Limiter] | None = None,
        per_call_timeout: float | None = 30.0,
        per_turn_timeout: float | None = None,
        validate_inputs: bool = True,
        max_threads: int = 64,
        max_calls_per_turn: int | None = None,
        tool_selection: ToolSelection | None = None,
        compose: Any = None,
    ) -> None:
        check_seconds("per_call_timeout", per_call_timeout)
        check_seconds("per_turn_timeout", per_turn_timeout)
        check_count("max_calls_per_turn", max_calls_per_turn)
        super().__init__(
            WorkerThreads(max_threads),
            per_call_timeout=per_call_timeout,
            per_turn_timeout=per_turn_timeout,
            validate_inputs=validate_inputs,
            max_calls_per_turn=max_calls_per_turn,
            compose=compose,
        )
        self.tool_selection = tool_selection
        self._limits = limits_by_tool(rate_limits)
        self.row_numbers = RowNumbers()  # of all forks, which share the tools
        self._setting_up: list[asyncio.Task[None]] = []  # one at most; shared with forks
        for item in tools:
            self.add(item)
        for name, limiter in self._limits.items():
            from torchrl_agentic.limits import Limiter

            if not isinstance(cast("object", limiter), Limiter):
                raise TypeError(
                    f"rate_limits[{name!r}] is not a limiter: write RateLimiter(max_concurrent={limiter!r})"
                )
        if unknown := [name for name in self._limits if name not in self.bound]:
            known = ", ".join(self.bound) or "none"
            raise ValueError(f"rate_limits names {unknown[0]!r}, but there is no such tool; tools: {known}")

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools, in order."""
        return tuple(bound.tool for bound in self.bound.values())

    def worlds(self, allows: Callable[[str], bool]) -> tuple[Toolset, ...]:
        """Return the toolsets that have a world and a tool that may be used, each once.

        Args:
            allows: Returns whether the tool of a name may be used.
        """
        found = ((name, bound.world) for name, bound in self.bound.items())
        return tuple(dict.fromkeys(world for name, world in found if world is not None and allows(name)))

    def add(
        self,
        item: Any,
        *,
        index: int | None = None,
        limiter: Limiter | None = None,
        toolset: Toolset | None = None,
    ) -> Tool:
        """Add a tool.

        Args:
            item: A tool, a look-alike or a typed function.
            index: Position before which it is inserted, or None for the end.
            limiter: Limiter of its calls, or None for the one in `rate_limits`.
            toolset: Toolset that it comes from, or None.

        Returns:
            The tool that was added.

        Raises:
            TypeError: If `item` is not a tool.
            ValueError: If it has no name, or the name of another tool, or an invalid schema.
        """
        tool = ensure_tool(item)
        if not tool.name:
            raise ValueError(f"{tool!r} has no name that a model could call")
        if tool.name in self.bound:
            origins = filter(None, (self.bound[tool.name].tool.origin, tool.origin))
            told = f": one comes from {', one from '.join(origins)}" if tool.origin else ""
            raise ValueError(f"two tools are named {tool.name!r}; give one another name{told}")
        world = None if toolset is None else toolset.world
        entry = self._bind(tool, limiter or self._limits.get(tool.name), world)
        if limiter is not None:
            self._limits[tool.name] = limiter
        entries = list(self.bound.values())
        entries.insert(len(entries) if index is None else index, entry)
        self.bound = {entry.tool.name: entry for entry in entries}
        self._schemas = None
        if _owns_nothing(tool):
            self._set_up[id(tool)] = tool
        return tool

    def _bind(self, tool: Tool, limiter: Limiter | None, world: Toolset | None) -> BoundTool:
        from torchrl_agentic.tools.schema import (
            Validator,  # the compiler of schemas is loaded with the first tool
            secret_args,
        )

        try:
            validator = Validator(tool.input_schema)
        except ValueError as error:
            raise ValueError(f"tool {tool.name!r}: {error}") from None
        effects = effects_of(tool)
        if world is not None and tool.effects is None:
            effects = Effects(writes=[world_name(world)])
        secret = secret_args(tool.input_schema)
        return BoundTool(tool, effects, has_sessions(tool), validator, limiter, world, secret)

    def rebind(self, tool: Tool) -> None:
        """Read the schema and the effects of a tool again, because they have changed.

        Raises:
            ValueError: If its schema is invalid; the tool stays as it was.
        """
        world = self.bound[tool.name].world
        self.bound = {**self.bound, tool.name: self._bind(tool, self._limits.get(tool.name), world)}
        self._schemas = None

    def remove(self, name: str) -> Tool:
        """Remove and return a tool; trajectories that have it open close it when they end."""
        self._limits.pop(name, None)
        self._schemas = None
        return self.bound.pop(name).tool

    def fork(self, compose: Any = None) -> Dispatcher:
        """Return a dispatcher with the same tools, limiters and threads, set up once for both.

        Tools that are added to one or removed from it do not change the other. Each has its own sessions.
        """
        twin = copy.copy(self)
        twin.bound, twin._limits = dict(self.bound), dict(self._limits)
        twin.compose = compose
        return twin

    def session(self, trajectory: str, *, row: int | None = None) -> Session:
        """Return the session of a new trajectory; nothing is opened before its first call.

        Args:
            trajectory: Name of the trajectory, unique in the process.
            row: Index in the flattened batch; None: a number that no other open trajectory has.
        """
        session = Session(self, trajectory, self.row_numbers.take() if row is None else row)
        session.owns_row = row is None
        self._sessions.add(session)
        return session

    def forget(self, session: Session) -> None:
        """Remove a session that is closed."""
        self._sessions.discard(session)
        if session.owns_row:
            session.owns_row = False
            self.row_numbers.give_back(session.row)

    async def setup(self) -> None:
        """Set up each tool that is not set up yet, one after the other.

        Raises:
            Exception: Any error of a tool's `setup`; the tools before it are torn down again.
        """
        while not self.is_ready:
            if not self._setting_up:
                task = asyncio.create_task(self._setup())
                self._setting_up.append(task)
                task.add_done_callback(self._setting_up.remove)
            await asyncio.shield(self._setting_up[0])

    async def _setup(self) -> None:
        for name, bound in list(self.bound.items()):
            if id(bound.tool) in self._set_up:
                continue
            try:
                await bound.tool.setup()
            except BaseException as error:
                await self._teardown()
                if isinstance(error, Exception | asyncio.CancelledError):
                    raise
                raise RuntimeError(f"setting up tool {name!r} raised {error!r}") from error
            self._set_up[id(bound.tool)] = bound.tool

    async def close(self) -> None:
        """Close all sessions, tear the tools down and end the threads.

        A later use sets everything up again.
        """
        await self.close_sessions()
        await self._teardown()
        self.threads.close()

    async def close_sessions(self) -> None:
        """Close the sessions of all trajectories; the tools stay set up."""
        ours = [session for session in self._sessions if session.dispatcher is self]
        await asyncio.gather(*(session.close() for session in ours))

    async def close_all(self) -> None:
        """Close all sessions, those of forks included, and tear the tools down."""
        await asyncio.gather(*(session.close() for session in list(self._sessions)))
        await self.close()

    async def _teardown(self) -> None:
        tools = list(self._set_up.values())
        self._teardowns[0] += 1
        self._set_up.clear()
        self._set_up.update((id(tool), tool) for tool in tools if _owns_nothing(tool))
        for tool in reversed(tools):
            try:
                await tool.teardown()
            except asyncio.CancelledError:
                raise
            except BaseException:  # SystemExit too: it would end the loop that all share
                logger.exception("tearing down tool %s failed", tool.name)


def limits_by_tool(rate_limits: Mapping[str, Limiter] | None) -> dict[str, Limiter]:
    """Return a copy of `rate_limits`.

    Raises:
        TypeError: If it is not a mapping.
    """
    if not isinstance(cast("object", rate_limits), Mapping | None):
        raise TypeError(
            "rate_limits maps names of tools to limiters: {'search': RateLimiter(max_concurrent=4)}; got"
            f" {rate_limits!r} ({type(rate_limits).__name__})"
        )
    return dict(rate_limits or {})


def _owns_nothing(tool: Tool) -> bool:
    """Return True if a tool has nothing to set up or tear down, so that it is always ready."""
    return type(tool).setup is Tool.setup and type(tool).teardown is Tool.teardown


class SessionRows(Generic[T]):
    """The sessions of an environment's rows, and the dispatcher that runs their calls.

    Everything but the tools and the options belongs to one process. After a fork, and in a process that an
    environment was pickled to, the first use creates a new dispatcher without sessions, and what the parent
    opened stays the parent's. Clones share tools, limiters and threads, and no sessions.

    Args:
        tools: The tools.
        options: Keyword arguments of `Dispatcher`.
        new_state: Creates `state`, what the owner keeps per row; it must travel by pickle.
        owner: Object that tools find as `ToolContext.compose`, or None.

    Attributes:
        tools: The tools; the owner adds and removes tools here and in `dispatcher`.
        options: Keyword arguments of `Dispatcher`.
    """

    def __init__(
        self, tools: Iterable[Tool], options: Mapping[str, Any], new_state: Callable[[], T], owner: Any = None
    ) -> None:
        self.tools = list(tools)
        self.options = dict(options)
        self._new_state = new_state
        self._owner = _reference(owner)
        self._process: _Process | None = None
        self._dispatcher: Dispatcher | None = None
        self._owns_process = False
        self._forget()
        if not self.dispatcher.is_ready:
            run(self.dispatcher.setup())

    def _forget(self) -> None:
        """Start without trajectories."""
        self._sessions: dict[int, Session] = {}
        self._numbers: dict[int, int] = {}
        self._ids: dict[int, int] = {}
        self._environment = next(_environments)
        self._state = self._new_state()

    @property
    def is_open(self) -> bool:
        """True if this process has a dispatcher."""
        return self._process is not None and self._process.pid == os.getpid()

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher of this process, created at the first use."""
        if not self.is_open:
            owner = self._owner()
            compose = None if owner is None else weakref.proxy(owner)
            self._dispatcher = Dispatcher(self.tools, compose=compose, **self.options)
            self._process = _Process(self._dispatcher)
            self._owns_process = True
            self._forget()
            self._close_with_me()
        assert self._dispatcher is not None
        return self._dispatcher

    @property
    def are_toolsets_open(self) -> bool:
        """True if the toolsets of the owner and its clones are set up in this process."""
        assert self.dispatcher
        assert self._process is not None
        return self._process.are_toolsets_open

    @are_toolsets_open.setter
    def are_toolsets_open(self, value: bool) -> None:
        assert self.dispatcher
        assert self._process is not None
        self._process.are_toolsets_open = value

    @property
    def state(self) -> T:
        """State that the owner keeps per row; created again with the dispatcher."""
        assert self.dispatcher
        return self._state

    @property
    def sessions(self) -> Mapping[int, Session]:
        """The open trajectories of this process by row."""
        assert self.dispatcher
        return self._sessions

    @property
    def ids(self) -> Mapping[int, int]:
        """A random number above 0 for each open trajectory, by row."""
        return self._ids

    def session(self, row: int, trajectory: str | None = None) -> Session:
        """Return the session of a row; begin a trajectory if none is open.

        Args:
            row: Index in the flattened batch.
            trajectory: Name of the trajectory if it begins now, or None for `"row.number@environment"`.
        """
        session = self.sessions.get(row)
        if session is None:
            name = trajectory or trajectory_name(row, self._numbers.get(row, 0), self._environment)
            session = self._sessions[row] = self.dispatcher.session(name, row=row)
            self._ids[row] = 1 + int.from_bytes(os.urandom(7))
        return session

    def branch(self, row: int, into: Sequence[int]) -> None:
        """Continue the trajectory of one row in other rows; the trajectories there must have ended.

        Args:
            row: Row of the trajectory, in the flattened batch.
            into: Rows that continue it.

        Raises:
            TypeError: If a tool that is open defines no `branch`.
            InfrastructureError: If the state of a tool cannot be copied.
        """
        run(self.session(row).branch([self.session(target) for target in into]))

    def finish_rows(self, rows: Iterable[int]) -> None:
        """Finish the sessions of rows that are done, as `Session.finish` does; they stay known."""
        sessions = [session for row in rows if (session := self.sessions.get(row)) is not None]
        busy = [session for session in sessions if session.must_finish]

        async def finish() -> None:
            await asyncio.gather(*(session.finish() for session in busy))

        if busy:
            run(finish())
        for session in sessions:
            session.is_finished = True

    def end(self, rows: Iterable[int]) -> dict[int, Session]:
        """End the trajectories of some rows and close them; the next trajectories there get new names.

        Returns:
            The sessions that ended, by row.
        """
        ended = {row: self._sessions.pop(row) for row in list(rows) if row in self.sessions}
        for row, session in ended.items():
            self._numbers[row] = self._numbers.get(row, 0) + 1
            session.dispatcher.forget(session)
        _close(ended.values())
        return ended

    def close(self) -> bool:
        """End all trajectories, and tear the tools down unless another clone owns them.

        Returns:
            True if the tools were torn down. A later use sets them up again.
        """
        if not self.is_open:
            return False
        self.end(list(self._sessions))
        if self._owns_process:
            run(self.dispatcher.close())
        return self._owns_process

    def clone(self, owner: Any = None) -> Self:
        """Return rows with the same tools, limiters and threads, and without trajectories.

        Args:
            owner: Object that tools find as `ToolContext.compose`, or None.
        """
        dispatcher = self.dispatcher
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        clone.tools, clone.options = list(self.tools), {**self.options}
        clone.options["rate_limits"] = dict(self.options.get("rate_limits") or {})
        clone._owner = _reference(owner)
        clone._owns_process = False
        clone._dispatcher = dispatcher.fork(None if owner is None else weakref.proxy(owner))
        clone._forget()
        clone._close_with_me()
        return clone

    def bind(self, owner: Any) -> None:
        """Set the object that tools find as `ToolContext.compose`, after a copy or unpickling."""
        self._owner = _reference(owner)

    def _close_with_me(self) -> None:
        """Close the sessions when this object is garbage."""
        assert self._process is not None
        assert self._dispatcher is not None
        _when_garbage(self, self._process.pid, self._dispatcher.close_sessions)

    def __getstate__(self) -> dict[str, Any]:
        return {"tools": self.tools, "options": self.options, "_new_state": self._new_state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._owner = _reference(None)
        self._process = self._dispatcher = None
        self._owns_process = False
        self._forget()


class _Process:
    """State that rows and their clones share in one process.

    The tools are torn down when the last of them is gone.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.pid = os.getpid()
        self.dispatcher = dispatcher
        self.are_toolsets_open = False
        _when_garbage(self, self.pid, dispatcher.close_all)
        _processes.add(self)


_processes: weakref.WeakSet[_Process] = weakref.WeakSet()


def _reference(owner: Any) -> Callable[[], Any]:
    return (lambda: None) if owner is None else weakref.ref(owner)


def _close(sessions: Iterable[Session]) -> None:
    """Close sessions concurrently, and wait for that."""
    busy = [session for session in sessions if session.is_busy]
    if busy:

        async def close() -> None:
            await asyncio.gather(*(session.close() for session in busy))

        run(close())


def _when_garbage(item: object, pid: int, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Start `close` when `item` is garbage; do not wait, since the collector may run on the loop's thread."""
    weakref.finalize(item, _start_in, pid, close).atexit = False


def _start_in(pid: int, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    if pid == os.getpid():
        start(close())


@atexit.register
def _close_at_exit() -> None:
    for process in list(_processes):
        if process.pid == os.getpid():
            with contextlib.suppress(Exception):
                run(process.dispatcher.close_all())
