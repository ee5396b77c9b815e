"""One trajectory's open tools: each is opened and closed by a task of its own, the owner."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torchrl_agentic.dispatch.crashes import Crashes
from torchrl_agentic.errors import InvalidTask, UnreadableResult, derives
from torchrl_agentic.messages import ParsedCall, ToolResult, claim_id, finite_number
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.tools.base import (
    Threads,
    Tool,
    Toolset,
    current_row,
    current_session,
    open_world,
    world_name,
)
from torchrl_agentic.tools.row_data import NO_DATA, RowData, check_names

if TYPE_CHECKING:
    from torchrl_agentic.tools.schema_simplify import Schema

logger = logging.getLogger(__name__)

ToolSelection: TypeAlias = Callable[[str, int, RowData], Collection[str] | None]
"""(trajectory, turn, row) → names of the tools for this turn, or None to follow the data set."""
CLOSE_GRACE_S = 10.0
"""Seconds that closing one live tool may take before it is cancelled; its final reward does not count."""


class _Owner:
    """The task that opens a tool, or the world of a toolset, for one trajectory, and closes it.

    One task does both, because anyio forbids leaving a cancel scope in another task.

    Args:
        opener: The tool or toolset.
        session: The trajectory.
        source: Live tool or world of another trajectory that this one continues, or None.
        after: Owner that this one replaces; it closes first.
    """

    def __init__(
        self, opener: Tool | Toolset, session: Session, source: Any = None, after: _Owner | None = None
    ) -> None:
        self.opener = opener
        self.name = _name(opener)
        self.source = source
        self.after = after
        self.session = session
        self.trajectory = session.trajectory
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.closing = asyncio.Event()
        self.judged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._own())

    async def _own(self) -> None:
        current_session.set(self.session)
        needs_row = isinstance(self.opener, Toolset) or self.opener.needs_row
        current_row.set(self.session.data if needs_row else NO_DATA)
        try:
            if self.after is not None:
                await self.after.close()
            async with self._opening() as live:
                self.ready.set_result(live)
                await self.closing.wait()
                if self.session.is_judged and _has_final_reward(self.opener, live):
                    await self._judge(live)
                self.judged.set_result(None)
        except BaseException as error:
            if self.ready.done():
                # `close` tells of its own cancellation; another comes from an event loop that ends.
                if not isinstance(error, asyncio.CancelledError):
                    logger.exception("closing tool %s failed (trajectory %s)", self.name, self.trajectory)
            else:
                self.ready.set_exception(error)
                self.ready.exception()  # retrieved, so that asyncio does not report it as never retrieved
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _judge(self, live: Any) -> None:
        """Store the final reward, or the error that left the trajectory without one."""
        limit = self.session.dispatcher.per_call_timeout
        if not self.session.is_finished:  # the trajectory is given up, and nobody should wait for it
            limit = CLOSE_GRACE_S if limit is None else min(limit, CLOSE_GRACE_S)
        asking = asyncio.create_task(self._final_reward(live))  # it may ignore its cancellation
        try:
            await asyncio.wait((asking,), timeout=limit)
            found = asking.result() if asking.done() else TimeoutError(f"final_reward() took over {limit} s")
        except asyncio.CancelledError as error:
            self.session.lose_verdict(self.name, error)
            raise
        finally:
            asking.cancel()
        if isinstance(found, BaseException):
            self.session.lose_verdict(self.name, found)
        elif found is not None:
            rewards = self.session.rewards
            rewards[self.name] = rewards.get(self.name, 0.0) + found

    async def _final_reward(self, live: Any) -> float | BaseException | None:
        """Return the final reward, or what it raises: SystemExit would end the loop that all share."""
        try:
            asked = (
                self.opener.final_reward(live) if isinstance(self.opener, Toolset) else live.final_reward()
            )
            value = await asked if inspect.isawaitable(asked) else asked
            return None if value is None else finite_number(value, "the final reward")
        except BaseException as error:
            return error

    def _opening(self) -> AbstractAsyncContextManager[Any]:
        if self.source is not None:
            return self.opener.branch(self.source, self.trajectory)
        if isinstance(self.opener, Toolset):
            return open_world(self.opener, self.trajectory, self.session.data)
        return self.opener.session(self.trajectory)

    async def close(self) -> None:
        self.closing.set()
        if self.ready.done() and self.ready.exception() is None:
            await asyncio.wait((self.task, self.judged), return_when=asyncio.FIRST_COMPLETED)
        _, pending = await asyncio.wait((self.task,), timeout=CLOSE_GRACE_S)
        if pending:
            logger.error(
                "closing tool %s took over %s s (trajectory %s)",
                self.name,
                CLOSE_GRACE_S,
                self.trajectory,
            )
            self.task.cancel()
            await asyncio.wait((self.task,), timeout=1.0)


def _has_final_reward(opener: Tool | Toolset, live: Any) -> bool:
    """Return True if a live tool has a final reward; its class may be another one than that of the tool."""
    if isinstance(opener, Toolset):
        return opener.has_final_reward
    is_tool = derives(live, Tool)
    return live.has_final_reward if is_tool else callable(getattr(live, "final_reward", None))


def _name(opener: Tool | Toolset) -> str:
    return world_name(opener) if isinstance(opener, Toolset) else opener.name


class SessionHost(Protocol):
    """The part of a dispatcher that a session uses."""

    @property
    def per_call_timeout(self) -> float | None:
        """Seconds that one run of a tool may take, or None."""
        ...

    @property
    def tool_selection(self) -> ToolSelection | None:
        """Callback that chooses the tools of each turn, or None."""
        ...

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools, in order."""
        ...

    @property
    def schemas(self) -> Mapping[str, Schema]:
        """JSON Schemas of the arguments by the names of the tools."""
        ...

    def secret_args(self, tool: str) -> tuple[str, ...]:
        """Return the names of the arguments that the schema of a tool declares secret."""
        ...

    @property
    def threads(self) -> Threads:
        """Threads for blocking functions."""
        ...

    @property
    def crashes(self) -> Crashes:
        """Counts the crashes of tools, so that each place is logged once."""
        ...

    def worlds(self, allows: Callable[[str], bool]) -> tuple[Toolset, ...]:
        """Return the toolsets that have a world and a tool that may be used."""
        ...

    async def run(self, batch: Sequence[tuple[Session, Sequence[ParsedCall], Any]]) -> list[list[ToolResult]]:
        """Run one turn of several trajectories at once."""
        ...

    def forget(self, session: Session) -> None:
        """Remove a session that is closed."""
        ...


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """The counts of a session, with which another one continues its trajectory.

    Attributes:
        turn: Number of turns so far.
        n_calls: Number of calls so far.
        ids: Number of requests for each call id so far.
        rewards: Final rewards of tools that have closed, not taken yet.
    """

    turn: int = 0
    n_calls: int = 0
    ids: Mapping[str, int] = field(default_factory=dict[str, int])
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])


class Session:
    """One trajectory's side of a dispatcher, from its reset to its end; created by `Dispatcher.session`.

    An async context manager. `close` may be called any number of times; calls after it open everything again.

    Args:
        dispatcher: The dispatcher.
        trajectory: Name of the trajectory, unique in a process.
        row: Index in the flattened batch.

    Attributes:
        turn: Number of turns so far.
        n_calls: Number of calls so far, as the sources of a `TokenLedger` count them.
        data: Row of the data set.
        allowed: Names of the tools that the trajectory may use in this turn, or None for all.
        rewards: Final reward of the trajectory by tool, filled in by `close`.
        verdict_errors: Error that left the trajectory without a final reward, by tool.
        begin_error: Error of a tool that could not open at the beginning, or whose initial message raised; or
            None.
        is_finished: Whether `finish` has been called.
        is_judged: Whether tools are asked for their final rewards when the session closes.
        owns_row: Whether the dispatcher chose `row`, and frees it when the session closes.
        lingering: Tasks of cancelled calls that have not ended yet.
        group: Name of the group of the trajectory in a collector, unique in a process; "" elsewhere.
    """

    def __init__(self, dispatcher: SessionHost, trajectory: str, row: int = 0) -> None:
        self.dispatcher = dispatcher
        self.trajectory = trajectory
        self.row = row
        self.turn = 0
        self.n_calls = 0
        self.data: RowData = NO_DATA
        self.allowed: frozenset[str] | None = None
        self.rewards: dict[str, float] = {}
        self.verdict_errors: dict[str, BaseException] = {}
        self.begin_error: BaseException | None = None
        self.is_finished = False
        self.is_judged = True
        self.owns_row = False
        self.lingering: set[asyncio.Task[None]] = set()  # cancelled calls that have not ended yet
        self.group = ""
        self._owners: dict[str | Toolset, _Owner] = {}  # of tools by their names
        self._ids: dict[str, int] = {}
        self._chosen = -1  # the turn for which tools were chosen

    @property
    def threads(self) -> Threads:
        """Threads for blocking functions."""
        return self.dispatcher.threads

    @property
    def is_busy(self) -> bool:
        """True if anything is open or still ending."""
        return bool(self._owners or self.lingering)

    async def run(self, calls: Sequence[ParsedCall], *, state: Any = None) -> list[ToolResult]:
        """Run the calls of one turn.

        Args:
            calls: Calls with ids that are unique in the trajectory.
            state: View of the environment's row, for tools with `wants_state`.

        Returns:
            One result per call, in the order of the calls.
        """
        self.choose_tools()
        return (await self.dispatcher.run([(self, calls, state)]))[0]

    async def open(self, openers: Sequence[Tool | Toolset]) -> list[tuple[str, ToolResult]]:
        """Open tools and worlds before their first call, and return their initial messages.

        If one cannot be opened, or its message raises, the trajectory cannot begin: see `begin_error`.

        Returns:
            (name, result) of each that has an initial message.
        """
        said = await asyncio.gather(*map(self._initial_message, openers))
        return [
            (_name(opener), result)
            for opener, result in zip(openers, said, strict=True)
            if result is not None
        ]

    async def _initial_message(self, opener: Tool | Toolset) -> ToolResult | None:
        try:
            async with asyncio.timeout(self.dispatcher.per_call_timeout):
                live = await self.live(opener)
                is_world = isinstance(opener, Toolset)
                value = await (opener.initial_message(live) if is_world else live.initial_message())
            if value is None:
                return None
            result = ToolResult.from_value(value).checked()
            if result.notes and not isinstance(value, ToolResult):  # no call has run
                raise UnreadableResult(f"an initial message is {result.notes[0]}")
            return result
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit too: it would end the loop that all share
            self._log(f"tool {_name(opener)} could not open", _name(opener), error)
            self.verdict_errors[_name(opener)] = error
            self.begin_error = self.begin_error or error
            return None

    async def live(self, opener: Tool | Toolset) -> Any:
        """Return the live tool of a tool with sessions, or the world of a toolset.

        Open it at the first call.
        """
        key = opener if isinstance(opener, Toolset) else opener.name
        owner = self._owners.get(key)
        if owner is None or (owner.task.done() and owner.ready.exception() is not None):
            owner = self._owners[key] = _Owner(opener, self)
        elif owner.opener is not opener:  # another tool of this name has replaced it
            owner = self._owners[key] = _Owner(opener, self, after=owner)
        return await asyncio.shield(owner.ready)

    @property
    def is_open(self) -> bool:
        """True if a tool with sessions, or a world, is open."""
        return bool(self._owners)

    def counts(self) -> SessionCounts:
        """Return how many turns and calls there were, and the ids that are taken."""
        return SessionCounts(self.turn, self.n_calls, dict(self._ids), dict(self.rewards))

    def resume(self, counts: SessionCounts) -> None:
        """Continue the counts of a session in which nothing is open.

        Args:
            counts: Result of its `counts`.
        """
        self.turn, self.n_calls, self._ids = counts.turn, counts.n_calls, dict(counts.ids)
        self.rewards = dict(counts.rewards)

    async def worlds(self) -> Mapping[str, Any]:
        """Open the worlds that the trajectory may use, and return them by the names of their toolsets.

        Raises:
            RuntimeError: If the trajectory is finished.
            Exception: What opening one raises.
        """
        if self.is_finished:
            raise RuntimeError(f"the worlds of {self.trajectory} have closed")
        worlds = self.dispatcher.worlds(self.data.allows_later)
        opened = await asyncio.gather(*map(self.live, worlds))
        return dict(zip(map(world_name, worlds), opened, strict=True))

    async def branch(self, into: Sequence[Session]) -> None:
        """Continue this trajectory in others, in which nothing has been called yet.

        Args:
            into: Sessions that get copies of everything that is open here.

        Raises:
            TypeError: If a tool that is open here defines no `branch`.
            FilesNotCopied: If code has left more files than fit, or what cannot be copied.
            InfrastructureError: If the state of a tool cannot be copied for another reason.
        """
        try:
            for session in into:
                session.resume(self.counts())
                session.data, session.group = self.data, self.group
                for key, owner in self._owners.items():
                    live = await asyncio.shield(owner.ready)
                    copy = session._owners[key] = _Owner(owner.opener, session, live)
                    await asyncio.shield(copy.ready)
        except BaseException:
            closing = asyncio.gather(*(session.close() for session in into))
            await run_to_completion(closing, always_wait=True)
            raise

    def take_reward(self) -> float:
        """Return the sum of the tools' final rewards, and clear them, so that they count once.

        Returns:
            The sum; NaN if there are `verdict_errors`, which are cleared too.
        """
        rewards, self.rewards = self.rewards, {}
        errors, self.verdict_errors = self.verdict_errors, {}
        return math.nan if errors else sum(rewards.values())

    def lose_verdict(self, name: str, error: BaseException) -> None:
        """Note that a tool has no final reward for the trajectory.

        Args:
            name: Name of the tool.
            error: What it raised.
        """
        self.verdict_errors[name] = error
        if not isinstance(error, InvalidTask):
            self._log(f"tool {name} has no final reward", name, error)

    def _log(self, what: str, name: str, error: BaseException) -> None:
        """Log an error of a tool, the user's line first, once for each place; later only its number."""
        count = self.dispatcher.crashes.count(name, error)
        if count == 1:
            from torchrl_agentic.dispatch.user_code import describe

            logger.error("%s\n%s (trajectory %s)", describe(error), what, self.trajectory, exc_info=error)
        elif set(str(count)[1:]) == {"0"}:
            logger.error("%s, %d times with this %s", what, count, type(error).__name__)

    def begin_turn(self, calls: Sequence[ParsedCall]) -> tuple[ParsedCall, ...]:
        """Choose the tools of this turn, and return its calls with ids that are unique in the trajectory.

        Args:
            calls: Calls of the message; later duplicates of an id get a suffix.
        """
        self.choose_tools()
        return tuple(self.with_unique_id(call, self._ids) for call in calls)

    @staticmethod
    def with_unique_id(call: ParsedCall, taken: dict[str, int]) -> ParsedCall:
        """Return a call with an id that is not taken yet, and mark the id as taken.

        Args:
            call: The call.
            taken: Number of requests for each id so far, as `claim_id` keeps it.
        """
        call_id = claim_id(call.call_id, taken)
        if call_id == call.call_id:
            return call
        return replace(call, call_id=call_id, notes=(*call.notes, "duplicate_id"))

    def copy_ids(self) -> dict[str, int]:
        """Return a copy of the ids that are taken, for calls that begin before their turn is complete."""
        return dict(self._ids)

    def twin(self) -> Session:
        """Return a session that stands for this one in one call of a tool without sessions."""
        twin = Session(self.dispatcher, self.trajectory, self.row)
        twin.turn, twin.data, twin.allowed = self.turn, self.data, self.allowed
        twin.group = self.group
        return twin

    def choose_tools(self) -> None:
        """Set `allowed` for this turn: the tools that the callback returns, or else those of the data set.

        A callback that raises, or that names an unknown tool, is logged; after an exception the data set
        decides. Only the first call in a turn has an effect.
        """
        if self._chosen == self.turn:
            return
        self._chosen = self.turn
        self.allowed = self.data.selection_at(self.turn) if self.data.selections else None
        choose = self.dispatcher.tool_selection
        if choose is None:
            return
        try:
            names = choose(self.trajectory, self.turn, self.data)
            if names is not None:
                self.allowed = frozenset(names)
                check_names("tool_selection", self.allowed, [tool.name for tool in self.dispatcher.tools])
        except Exception as error:
            where = f"(trajectory {self.trajectory}, turn {self.turn})"
            logger.error("tool_selection: %s %s", error, where, exc_info=not isinstance(error, ValueError))

    @property
    def must_finish(self) -> bool:
        """True if `finish` has something to do."""
        return self.is_busy or bool(self.owed)

    @property
    def owed(self) -> list[Tool | Toolset]:
        """The tools and worlds that have a final reward for this trajectory and have not opened."""
        if self.is_finished or self.begin_error is not None:
            return []
        tools = [tool for tool in self.dispatcher.tools if tool.has_final_reward]
        owed: list[Tool | Toolset] = [
            tool for tool in tools if self.data.allows_later(tool.name) and not self._has(tool.name)
        ]
        worlds = self.dispatcher.worlds(self.data.allows_later)
        return owed + [world for world in worlds if world.has_final_reward and not self._has(world)]

    def _has(self, key: str | Toolset) -> bool:
        owner = self._owners.get(key)
        return owner is not None and owner.ready.done() and owner.ready.exception() is None

    async def finish(self) -> None:
        """Close the session of a trajectory that has ended, after the final rewards of its tools.

        Open the tools and worlds that have a final reward and that no call has opened. Later calls only
        close.
        """
        owed, self.is_finished = self.owed, True
        if owed:
            await asyncio.gather(*map(self._open_for_verdict, owed))
        await self.close()

    async def _open_for_verdict(self, opener: Tool | Toolset) -> None:
        try:
            async with asyncio.timeout(self.dispatcher.per_call_timeout):
                await self.live(opener)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit too: it would end the loop that all share
            self.lose_verdict(_name(opener), error)

    async def close(self, *, judge: bool = True) -> None:
        """Close everything that is open, after cancelled calls have had a second to end.

        Args:
            judge: Whether the tools that are open are asked for their final rewards.
        """
        self.is_judged = judge
        if self.lingering:
            await asyncio.wait(set(self.lingering), timeout=1.0)
        owners, self._owners = self._owners, {}
        if owners:
            await asyncio.gather(*(owner.close() for owner in owners.values()))
        self.dispatcher.forget(self)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.close())
