"""Begin a trajectory: read its row of the data set, and open the tools and worlds that open at the reset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_agentic.dispatch.session import Session
from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.tools.base import Tool, Toolset
from torchrl_agentic.tools.row_data import RowData


def read_row(columns: Mapping[str, Any], tools: Sequence[Tool]) -> RowData:
    """Read a row of a data set, and check it against the tools.

    Args:
        columns: Values by column name.
        tools: The tools.

    Raises:
        ValueError: If it names an unknown tool, or lacks what a tool needs.
    """
    data = RowData.of(columns)
    data.check([tool.name for tool in tools])
    for tool in tools:
        if data.allows(tool.name):
            tool.check_row(data)
    return data


async def open_tools(
    session: Session, tools: Sequence[Tool]
) -> tuple[tuple[ParsedCall, ...], list[ToolResult]]:
    """Open the worlds and tools that open at the reset, and return their initial messages.

    Args:
        session: Session of a trajectory that begins; it has a `begin_error` if one cannot be opened.
        tools: All tools.

    Returns:
        A call and a result for each that has an initial message, so that they can be rendered as a turn.
    """
    eager: list[Tool | Toolset] = [
        world for world in session.dispatcher.worlds(session.data.allows) if world.open_at_reset
    ]
    eager += [tool for tool in tools if tool.open_at_reset and session.data.allows(tool.name)]
    opened = await session.open(eager)
    calls = tuple(ParsedCall(name, {}, f"open_{name}") for name, _ in opened)
    return calls, [result for _, result in opened]
