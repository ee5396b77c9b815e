"""How trajectories begin: what the data set says to tools, and what tools say in the first prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from typing import Any

from tensordict import TensorDictBase

from torchrl_agentic.dispatch import Session
from torchrl_agentic.dispatch.loop import run
from torchrl_agentic.messages import Message, ParsedCall, ParseResult
from torchrl_agentic.row import EXTRA, KEYS, SELECTION, RowData, read_selections, said_of
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
    wanted = any(tool.wants_row or tool.opens_at_reset for tool in tools)
    return wanted or has_row_keys(tensordict.keys())


def has_row_keys(columns: Container[object]) -> bool:
    """Return whether columns of these names say something to tools."""
    return any(key in columns for key in (*KEYS, EXTRA))


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


def completed(
    known: RowData, tools: Sequence[Tool], tensordict: TensorDictBase, row: int, *, has_worlds: bool
) -> RowData:
    """Return the row with what was given to `env.reset` by hand, which transforms see at the first step only.

    Args:
        known: The row as it was read at the reset.
        tools: The tools.
        tensordict: The root of the first step, [*B].
        row: The row, through the flattened batch.
        has_worlds: Whether any column may be for a world; tools alone take `tools_kwargs` and its like.

    Raises:
        ValueError: If it is wrong, or comes too late: a tool that opens at the reset has arguments for that,
            or a selection was to be shown in a prompt of tokens.
    """
    keys = tensordict.keys()
    is_new = has_row_keys(keys) and not has_row_keys(known.columns)
    if not is_new and not (has_worlds and any(key not in known.columns for key in keys if key not in _OURS)):
        return known
    data = row_data(tools, tensordict, row)
    if not is_new:
        return data
    late = [f"create_kwargs of {tool.name!r}" for tool in tools
            if tool.opens_at_reset and data.kwargs(tool.name, "create_kwargs")]  # fmt: skip
    if data.selections and ("tokens", "prompt") in tensordict.keys(True):
        late.append("tool_selection")
    if late:
        raise ValueError(
            f"row {row}: {', '.join(late)} came with env.reset(tensordict), which transforms see only after "
            "the first prompt is written; load such columns with DatasetChatEnv.from_dataloader(loader), and "
            "collate_fn=collate_rows in the loader"
        )
    return data


def tool_selection(tensordict: TensorDictBase) -> frozenset[str] | None:
    """Read which tools a row of the data set may use from its first turn on; None: all."""
    keys = [key for key in (SELECTION, EXTRA) if key in tensordict.keys()]
    if not keys:
        return None
    found: Any = columns(tensordict, 0, keys)
    return RowData(selections=read_selections(said_of(found)[SELECTION])).selection_at(0)


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
