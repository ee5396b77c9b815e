"""How trajectories begin: what the data set says to tools, and what tools say in the first prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase

from torchrl_agentic.dispatch import Session
from torchrl_agentic.dispatch.loop import run
from torchrl_agentic.messages import Message, ParsedCall, ParseResult
from torchrl_agentic.row import EXTRA, KEYS, SELECTION, RowData
from torchrl_agentic.tool import Tool
from torchrl_agentic.transforms.columns import columns
from torchrl_agentic.transforms.turn import RowTurn

_OURS = frozenset((
    "history", "text", "tokens", "masks", "log_probs", "ledger", "next", "agentic", "done", "terminated",
    "truncated",
))  # fmt: skip
"""What stands beside the columns of a data set."""


def has_something_to_say(tools: Sequence[Tool], tensordict: TensorDictBase) -> bool:
    """Whether tools want to know, or rows of the data set restrict them."""
    if any(tool.wants_row or tool.opens_at_reset for tool in tools):
        return True
    return any(key in tensordict.keys() for key in (*KEYS, EXTRA))


def row_data(tools: Sequence[Tool], tensordict: TensorDictBase, row: int) -> RowData:
    """Read what the data set says of a row that begins.

    Raises:
        ValueError: it names a tool that is not there, or lacks what a tool needs.
    """
    found: Any = columns(tensordict, row, [key for key in tensordict.keys() if key not in _OURS])
    try:
        data = RowData.of(found)
        data.check([tool.name for tool in tools])
        for tool in tools:
            if data.allows(tool.name):
                tool.check_row(data)
    except ValueError as error:
        raise ValueError(f"row {row} of the data set: {error}") from None
    return data


def tool_selection(tensordict: TensorDictBase) -> frozenset[str] | None:
    """Read which tools a row of the data set may use; None: all."""
    keys = [key for key in (SELECTION, EXTRA) if key in tensordict.keys()]
    if not keys:
        return None
    found = columns(tensordict, 0, [SELECTION, (EXTRA, SELECTION)])
    names = found.get(SELECTION, found.get((EXTRA, SELECTION)))
    return None if names is None else frozenset(names)


def open_at_reset(tools: Sequence[Tool], sessions: Sequence[Session]) -> list[RowTurn]:
    """Open what is open from the start on; give what is said, as turns in which nobody has called."""
    eager = [tool for tool in tools if tool.opens_at_reset]
    if not eager or not sessions:
        return []

    async def opened() -> list[RowTurn]:
        said = await asyncio.gather(
            *(
                session.open([tool for tool in eager if session.data.allows(tool.name)])
                for session in sessions
            )
        )
        return [
            RowTurn(
                session.row,
                session,
                Message("assistant", ""),
                ParseResult(""),
                tuple(ParsedCall(tool.name, {}, f"open_{tool.name}") for tool, _ in greetings),
                [result for _, result in greetings],
            )
            for session, greetings in zip(sessions, said, strict=True)
            if greetings
        ]

    return run(opened())
