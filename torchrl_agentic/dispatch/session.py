"""One trajectory's open tools: each is opened and closed by a task of its own, the owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torchrl_agentic.dispatch.model_messages import encodable_result
from torchrl_agentic.messages import ParsedCall, ToolResult, claim_id
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.tools.base import (
    Threads,
    Tool,
    Toolset,
    current_row,
    current_session,
    has_final_reward,
    open_world,
    world_name,
)
from torchrl_agentic.tools.row_data import NO_DATA, RowData, check_names

if TYPE_CHECKING:
    from torchrl_agentic.dispatch.call_cache import TrajectoryCache
    from torchrl_agentic.tools.schema_simplify import Schema

logger = logging.getLogger(__name__)

ToolSelection: TypeAlias = Callable[[str, int, RowData], Collection[str] | None]
"""(trajectory, turn, row) → names of the tools for this turn, or None to follow the data set."""
CLOSE_GRACE_S = 10.0
"""Seconds that closing one live tool may take before it is cancelled."""


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
        self.name = world_name(opener) if isinstance(opener, Toolset) else opener.name
        self.source = source
        self.after = after
        self.is_used = False
        self.session = session
        self.trajectory = session.trajectory
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.closing = asyncio.Event()
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
                # A world that opened too late for any call has no reward to give.
                if self.is_used if isinstance(self.opener, Toolset) else has_final_reward(live):
                    await self._finish(live)
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

    async def _finish(self, live: Any) -> None:
        try:
            finishing = (
                self.opener.final_reward(live) if isinstance(self.opener, Toolset) else live.final_reward()
            )
            reward = await finishing
            if reward is not None:
                self.session.rewards[self.name] = float(reward)
        except asyncio.CancelledError:
            raise
        except BaseException:
            logger.exception("tool %s has no reward for trajectory %s", self.name, self.trajectory)

    def _opening(self) -> AbstractAsyncContextManager[Any]:
        if self.source is not None:
            return self.opener.branch(self.source, self.trajectory)
        if isinstance(self.opener, Toolset):
            return open_world(self.opener, self.trajectory, self.session.data)
        return self.opener.session(self.trajectory)

    async def close(self) -> None:
        self.closing.set()
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

    @property
    def threads(self) -> Threads:
        """Threads for blocking functions."""
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
        lingering: Tasks of cancelled calls that have not ended yet.
        cache: Results that other trajectories share with this one, or None.
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
        self.lingering: set[asyncio.Task[None]] = set()  # cancelled calls that have not ended yet
        self.cache: TrajectoryCache | None = None
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

    async def open(self, tools: Sequence[Tool]) -> list[tuple[Tool, ToolResult]]:
        """Open tools before their first call, and return their initial messages.

        A tool that cannot be opened has no message; its calls try again and report the error.

        Returns:
            (tool, result) of each tool that has an initial message.
        """
        said = await asyncio.gather(*(self._initial_message(tool) for tool in tools))
        return [(tool, result) for tool, result in zip(tools, said, strict=True) if result is not None]

    async def _initial_message(self, tool: Tool) -> ToolResult | None:
        try:
            async with asyncio.timeout(self.dispatcher.per_call_timeout):
                value = await (await self.live(tool)).initial_message()
            return None if value is None else encodable_result(ToolResult.from_value(value))
        except asyncio.CancelledError:
            raise
        except BaseException:  # SystemExit too: it would end the loop that all share
            logger.exception("opening tool %s failed (trajectory %s)", tool.name, self.trajectory)
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
        live = await asyncio.shield(owner.ready)
        owner.is_used = True
        return live

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
        if self.cache is not None:
            self.cache.forget()

    async def branch(self, into: Sequence[Session]) -> None:
        """Continue this trajectory in others, in which nothing has been called yet.

        Args:
            into: Sessions that get copies of everything that is open here.

        Raises:
            TypeError: If a tool that is open here defines no `branch`.
            InfrastructureError: If the state of a tool cannot be copied.
        """
        try:
            for session in into:
                session.resume(self.counts())
                session.data = self.data
                for key, owner in self._owners.items():
                    live = await asyncio.shield(owner.ready)
                    copy = session._owners[key] = _Owner(owner.opener, session, live)
                    copy.is_used = owner.is_used
                    await asyncio.shield(copy.ready)
                session.cache = None if self.cache is None else self.cache.branch(session.trajectory)
        except BaseException:
            closing = asyncio.gather(*(session.close() for session in into))
            await run_to_completion(closing, always_wait=True)
            raise

    def take_reward(self) -> float:
        """Return the sum of the tools' final rewards, and clear them, so that they count once."""
        rewards, self.rewards = self.rewards, {}
        return sum(rewards.values())

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
        twin.cache = self.cache
        return twin

    def choose_tools(self) -> None:
        """Set `allowed` for this turn: the tools that the callback returns, or else those of the data set.

        A callback that raises, or that names an unknown tool, is logged; after an exception the data set
        decides. Only the first call in a turn has an effect.
        """
        if self._chosen == self.turn:
            return
        self._chosen = self.turn
        self.allowed = self.data.selection_at(self.turn)
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

    async def close(self) -> None:
        """Close everything that is open, after cancelled calls have had a second to end."""
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
