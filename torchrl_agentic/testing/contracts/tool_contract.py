"""The contract of every tool."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.messages import JSON, ParsedCall, Status, ToolResult
from torchrl_agentic.tools.base import Tool, ToolContext, current_row
from torchrl_agentic.tools.row_data import RowData
from torchrl_agentic.tools.schema import Validator
from torchrl_agentic.tools.tool_adapter import ensure_tool

ENDLESS_S = (3.0, 9.0, 27.0)
"""Seconds that an endless call gets: a busy machine may need more than the first to begin."""


def watch_sessions(owner: Any) -> list[tuple[str, asyncio.Task[Any] | None]]:
    """Watch the sessions of a tool or an interaction.

    Args:
        owner: The tool or interaction, whose `session` is replaced.

    Returns:
        A list that gets "open" and "close" for each session, with the task that does it.
    """
    seen: list[tuple[str, asyncio.Task[Any] | None]] = []
    original = owner.session

    @contextlib.asynccontextmanager
    async def watched(trajectory: str, **kwargs: Any) -> AsyncGenerator[Any]:
        seen.append(("open", asyncio.current_task()))
        async with original(trajectory, **kwargs) as live:
            try:
                yield live
            finally:
                seen.append(("close", asyncio.current_task()))

    object.__setattr__(owner, "session", watched)
    return seen


class ToolContract:
    """Tests of a `Tool`, with sessions or without.

    Attributes:
        good: Arguments of a call that succeeds.
        bad: Arguments that its schema rejects.
        endless: Arguments of calls that write the text "begun" and then never end, for tools that
            run processes.
        row: Columns of the data set's row that trajectories begin with, for tools that need one.
    """

    good: ClassVar[Mapping[str, JSON]] = {}
    bad: ClassVar[Sequence[Mapping[str, JSON]]] = ()
    endless: ClassVar[Sequence[Mapping[str, JSON]]] = ()
    row: ClassVar[Mapping[str, Any]] = {}

    def make(self) -> Any:
        """Return a fresh tool: a Tool, a look-alike or a typed function."""
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def dispatcher(self) -> AsyncGenerator[Dispatcher]:
        """Yield a dispatcher that holds the tool."""
        dispatcher = Dispatcher([self.make()])
        yield dispatcher
        await dispatcher.close()

    async def call(self, dispatcher: Dispatcher, args: Mapping[str, JSON], row: int = 0) -> ToolResult:
        """Call the tool once, in a trajectory of its own.

        Args:
            dispatcher: The dispatcher that holds the tool.
            args: Arguments of the call.
            row: Row of the batch.
        """
        async with dispatcher.session(f"{row}.0", row=row) as session:
            session.data = RowData.of(self.row)
            return (await session.run([ParsedCall(dispatcher.tools[0].name, args, "c1")]))[0]

    def test_it_describes_itself(self) -> None:
        tool = ensure_tool(self.make())
        assert tool.name
        assert tool.description
        Validator(tool.input_schema)
        json.dumps(tool.spec())

    @pytest.mark.asyncio
    async def test_good_arguments_give_a_result(self, dispatcher: Dispatcher) -> None:
        result = await self.call(dispatcher, self.good)
        assert result.status is Status.OK, result.text

    @pytest.mark.asyncio
    async def test_bad_arguments_do_not_reach_it(self, dispatcher: Dispatcher) -> None:
        for args in self.bad:
            assert (await self.call(dispatcher, args)).status is Status.INVALID_ARGS

    @pytest.mark.asyncio
    async def test_a_stopped_process_shows_what_it_wrote(self) -> None:
        """The tool stops it before the call, or the turn, would be stopped and return nothing."""
        for bound in ("per_call_timeout", "per_turn_timeout") if self.endless else ():
            wrong: list[str] = []
            for seconds in ENDLESS_S:
                limits: dict[str, Any] = {"per_call_timeout": None, bound: seconds}
                dispatcher = Dispatcher([self.make()], **limits)
                results = await asyncio.gather(
                    *(self.call(dispatcher, args, row) for row, args in enumerate(self.endless))
                )
                await dispatcher.close()
                shown = ("begun" in result.text and result.status is Status.TIMEOUT for result in results)
                wrong = [result.text for result, is_right in zip(results, shown, strict=True) if not is_right]
                if not wrong:
                    break
            assert not wrong, bound

    @pytest.mark.asyncio
    async def test_trajectories_run_side_by_side(self, dispatcher: Dispatcher) -> None:
        results = await asyncio.gather(*(self.call(dispatcher, self.good, row) for row in range(3)))
        assert [result.status for result in results] == [Status.OK] * 3

    @pytest.mark.asyncio
    async def test_it_works_by_hand(self) -> None:
        """`setup`, `run` with an id and the row, `teardown`; a tool with sessions runs inside of one."""
        tool: Tool = ensure_tool(self.make())
        row = RowData.of(self.row)
        current_row.set(row)
        await tool.setup()
        async with tool.session("t") as live:
            result = ToolResult.from_value(await live.run(self.good, ToolContext(call_id="c1", row=row)))
        await tool.teardown()
        assert not result.is_error

    @pytest.mark.asyncio
    async def test_a_session_closes_in_the_task_that_opened_it(self) -> None:
        """Anyio requires it, and MCP uses anyio; each session is closed exactly once."""
        tool = ensure_tool(self.make())
        seen = watch_sessions(tool)
        dispatcher = Dispatcher([tool])
        session = dispatcher.session("t")
        session.data = RowData.of(self.row)
        await session.run([ParsedCall(tool.name, self.good, "c1")])
        await session.close()
        await session.close()
        await dispatcher.close()
        if seen:
            assert [event for event, _ in seen] == ["open", "close"]
            assert seen[0][1] is seen[1][1]
