"""`SessionRows`: the sessions of an environment's rows, and the dispatcher behind them, in one process."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from torchrl_agentic.dispatch.dispatcher import Dispatcher
from torchrl_agentic.dispatch.event_loop import run, start
from torchrl_agentic.dispatch.session import Session
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.row_data import trajectory_name

T = TypeVar("T")

_environments = itertools.count()
"""Numbers for the names of trajectories: one for each `SessionRows` of this process."""


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
        if not self.dispatcher.ready:
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
