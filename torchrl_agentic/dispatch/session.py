"""What one trajectory holds open: a live tool per stateful tool, each opened and closed by one owner task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrl_agentic.dispatch.turn import sound
from torchrl_agentic.messages import ParsedCall, ToolResult, claim_id
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
    from torchrl_agentic.dispatch.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 10.0
"""How long closing one live tool may take before it is cancelled."""


class _Owner:
    """The task that opens what a trajectory has of a tool, or the world of a toolset, and closes it.

    anyio lets no other task leave a cancel scope.

    Args:
        opener: The tool or toolset.
        session: The trajectory.
        source: What another trajectory has of it, from which this one goes on.
        after: The owner in whose place this one comes; it closes first.
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
                # A world that no call has seen, since it opened too late, is not the trajectory's doing.
                if self.is_used if isinstance(self.opener, Toolset) else has_final_reward(live):
                    await self._finish(live)
        except BaseException as error:
            if self.ready.done():
                logger.exception("closing tool %s failed (trajectory %s)", self.name, self.trajectory)
            else:
                self.ready.set_exception(error)
                self.ready.exception()  # looked at, so that asyncio does not complain if nobody else does
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _finish(self, live: Any) -> None:
        try:
            finishing = (
                self.opener.final_reward(live) if isinstance(self.opener, Toolset) else live.final_reward()
            )
            worth = await finishing
            if worth is not None:
                self.session.worth[self.name] = float(worth)
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


class Session:
    """One trajectory's side of a dispatcher, from its reset to its end. Made by `Dispatcher.session`.

    turn, n_calls: how many it has had. row: its place in the batch. data: what the data set says of it.
    allowed: the tools that it may use in this turn; None: all.
    worth: tool → what the trajectory was worth to it, filled in by `close`. An async context manager;
    `close` may be called any number of times, and calls that come after it open everything anew.
    """

    def __init__(self, dispatcher: Dispatcher, trajectory: str, row: int = 0) -> None:
        self.dispatcher = dispatcher
        self.trajectory = trajectory
        self.row = row
        self.turn = 0
        self.n_calls = 0
        self.data: RowData = NO_DATA
        self.allowed: frozenset[str] | None = None
        self.worth: dict[str, float] = {}
        self.lingering: set[asyncio.Task[None]] = set()  # cancelled calls that have not ended yet
        self._owners: dict[str | Toolset, _Owner] = {}  # of tools by their names
        self._ids: dict[str, int] = {}

    @property
    def threads(self) -> Threads:
        """The threads for what blocks."""
        return self.dispatcher.threads

    @property
    def is_busy(self) -> bool:
        """Whether anything is open or still ending."""
        return bool(self._owners or self.lingering)

    async def run(self, calls: Sequence[ParsedCall], *, state: Any = None) -> list[ToolResult]:
        """Answer the calls of one turn: one result per call, in their order."""
        return (await self.dispatcher.run([(self, calls, state)]))[0]

    async def open(self, tools: Sequence[Tool]) -> list[tuple[Tool, ToolResult]]:
        """Open tools before anybody calls them; give what they say at the start, with who says it.

        One that cannot be opened says nothing; its calls will try again, and tell what is wrong.
        """
        said = await asyncio.gather(*(self._greeting(tool) for tool in tools))
        return [(tool, result) for tool, result in zip(tools, said, strict=True) if result is not None]

    async def _greeting(self, tool: Tool) -> ToolResult | None:
        try:
            async with asyncio.timeout(self.dispatcher.per_call_timeout):
                value = await (await self.live(tool)).initial_message()
            return None if value is None else sound(ToolResult.from_value(value))
        except asyncio.CancelledError:
            raise
        except BaseException:  # SystemExit too: it would end the loop that all share
            logger.exception("opening tool %s failed (trajectory %s)", tool.name, self.trajectory)
            return None

    async def live(self, opener: Tool | Toolset) -> Any:
        """Return what this trajectory has of a tool with sessions, or of a toolset with a world.

        It is opened at the first call.
        """
        key = opener if isinstance(opener, Toolset) else opener.name
        owner = self._owners.get(key)
        if owner is None or (owner.task.done() and owner.ready.exception() is not None):
            owner = self._owners[key] = _Owner(opener, self)
        elif owner.opener is not opener:  # another one has taken its place
            owner = self._owners[key] = _Owner(opener, self, after=owner)
        live = await asyncio.shield(owner.ready)
        owner.is_used = True
        return live

    async def branch(self, into: Sequence[Session]) -> None:
        """Let other trajectories, in which nothing was called yet, go on from where this one is.

        Raises:
            TypeError: a tool that is open here cannot be branched.
            InfrastructureError: what a tool holds cannot be copied.
        """
        try:
            for session in into:
                session.turn, session.n_calls, session.data = self.turn, self.n_calls, self.data
                session._ids = dict(self._ids)
                for key, owner in self._owners.items():
                    live = await asyncio.shield(owner.ready)
                    copy = session._owners[key] = _Owner(owner.opener, session, live)
                    copy.is_used = owner.is_used
                    await asyncio.shield(copy.ready)
        except BaseException:
            await asyncio.gather(*(session.close() for session in into))
            raise

    def begin_turn(self) -> None:
        """Work out which tools the trajectory may use in this turn: what the callback says, or else its row.

        A callback that raises is logged, and the row decides; so is a name of a tool that is not there.
        """
        self.allowed = self.data.selection_at(self.turn)
        choose = self.dispatcher.tool_selection
        if choose is None:
            return
        try:
            names = choose(self.trajectory, self.turn, self.data)
            if names is not None:
                self.allowed = frozenset(names)
                check_names("tool_selection", self.allowed, self.dispatcher.bound)
        except Exception as error:
            where = f"(trajectory {self.trajectory}, turn {self.turn})"
            logger.error("tool_selection: %s %s", error, where, exc_info=not isinstance(error, ValueError))

    def take_worth(self) -> float:
        """Give what the trajectory was worth to its tools, in sum, and forget it: it is to be told once."""
        worth, self.worth = self.worth, {}
        return sum(worth.values())

    def unique(self, calls: Sequence[ParsedCall]) -> tuple[ParsedCall, ...]:
        """Give the calls ids that are unique in this trajectory; of equal ids the later ones get a suffix."""
        unique: list[ParsedCall] = []
        for call in calls:
            call_id = claim_id(call.call_id, self._ids)
            if call_id != call.call_id:
                call = replace(call, call_id=call_id, notes=(*call.notes, "duplicate_id"))
            unique.append(call)
        return tuple(unique)

    async def close(self) -> None:
        """Close what is open, after what was cancelled has had a moment to end."""
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
