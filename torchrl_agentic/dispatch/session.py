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
from torchrl_agentic.row import NO_DATA, RowData
from torchrl_agentic.tool import Threads, Tool, current_row, current_session, has_finish

if TYPE_CHECKING:
    from torchrl_agentic.dispatch.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 10.0
"""How long closing one live tool may take before it is cancelled."""


class _Owner:
    """The task that opens a tool's session and closes it; anyio lets no other task leave a cancel scope."""

    def __init__(self, tool: Tool, session: Session, source: Tool | None = None) -> None:
        self.tool = tool
        self.source = source  # another trajectory's, which this one goes on from
        self.session = session
        self.trajectory = session.trajectory
        self.ready: asyncio.Future[Tool] = asyncio.get_running_loop().create_future()
        self.closing = asyncio.Event()
        self.task = asyncio.create_task(self._own())

    async def _own(self) -> None:
        current_session.set(self.session)
        current_row.set(self.session.data if self.tool.wants_row else NO_DATA)
        try:
            async with self._opening() as live:
                self.ready.set_result(live)
                await self.closing.wait()
                if has_finish(live):
                    await self._finish(live)
        except BaseException as error:
            if self.ready.done():
                logger.exception("closing tool %s failed (trajectory %s)", self.tool.name, self.trajectory)
            else:
                self.ready.set_exception(error)
                self.ready.exception()  # looked at, so that asyncio does not complain if nobody else does
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _finish(self, live: Tool) -> None:
        try:
            worth = await live.finish()
            if worth is not None:
                self.session.worth[self.tool.name] = float(worth)
        except asyncio.CancelledError:
            raise
        except BaseException:
            logger.exception("tool %s has no reward for trajectory %s", self.tool.name, self.trajectory)

    def _opening(self) -> AbstractAsyncContextManager[Tool]:
        if self.source is None:
            return self.tool.session(self.trajectory)
        return self.tool.branch(self.source, self.trajectory)

    async def close(self) -> None:
        self.closing.set()
        _, pending = await asyncio.wait((self.task,), timeout=CLOSE_GRACE_S)
        if pending:
            logger.error(
                "closing tool %s took over %s s (trajectory %s)",
                self.tool.name,
                CLOSE_GRACE_S,
                self.trajectory,
            )
            self.task.cancel()
            await asyncio.wait((self.task,), timeout=1.0)


class Session:
    """One trajectory's side of a dispatcher, from its reset to its end. Made by `Dispatcher.session`.

    turn, n_calls: how many it has had. row: its place in the batch. data: what the data set says of it.
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
        self.worth: dict[str, float] = {}
        self.lingering: set[asyncio.Task[None]] = set()  # cancelled calls that have not ended yet
        self._owners: dict[str, _Owner] = {}
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
                value = await (await self.live(tool)).greeting()
            return None if value is None else sound(ToolResult.from_value(value))
        except asyncio.CancelledError:
            raise
        except BaseException:  # SystemExit too: it would end the loop that all share
            logger.exception("opening tool %s failed (trajectory %s)", tool.name, self.trajectory)
            return None

    async def live(self, tool: Tool) -> Tool:
        """Give what this trajectory talks to when it calls a tool with sessions; opened at the first call."""
        owner = self._owners.get(tool.name)
        if owner is not None and owner.tool is not tool:  # another one has taken its place
            await asyncio.shield(owner.close())
            owner = None
        if owner is None or (owner.task.done() and owner.ready.exception() is not None):
            owner = self._owners[tool.name] = _Owner(tool, self)
        return await asyncio.shield(owner.ready)

    async def branch(self, into: Sequence[Session]) -> None:
        """Let other trajectories, in which nothing was called yet, go on from where this one is.

        Raises:
            TypeError: a tool that is open here cannot be branched.
            InfrastructureError: what a tool holds cannot be copied.
        """
        try:
            for session in into:
                session.turn, session._ids = self.turn, dict(self._ids)
                for name, owner in self._owners.items():
                    live = await asyncio.shield(owner.ready)
                    copy = session._owners[name] = _Owner(owner.tool, session, live)
                    await asyncio.shield(copy.ready)
        except BaseException:
            await asyncio.gather(*(session.close() for session in into))
            raise

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
