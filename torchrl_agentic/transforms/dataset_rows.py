"""Columns of a data set, as plain Python: what a row of a reset TensorDict knows besides its conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    unravel_key,
)
from tensordict.utils import NestedKey

from torchrl_agentic.dispatch import Session
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.messages import Message, ParsedCall, ParseResult
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.row_data import EXTRA, KEYS, SELECTION, RowData, read_selections, tool_columns
from torchrl_agentic.transforms.row_turn import RowTurn

_stack: Any = NonTensorStack  # declared abstract, which it is not
MOST_NUMBERS = 4096
"""A tensor of more numbers than this stays a tensor: it is an image rather than a list."""


def columns(tensordict: TensorDictBase, row: int, names: Iterable[NestedKey]) -> dict[NestedKey, Any]:
    """Give the columns of one row, by name; those that the row does not have are left out.

    row: through the flattened batch. names: a tuple leads into nested TensorDicts and dicts alike. What is
    given is the caller's own: a TensorDict is a dict, text and objects are themselves, tensors and arrays are
    numbers and lists, up to `MOST_NUMBERS`; larger ones stay as they are.
    """
    wanted = [(name, _path(name)) for name in names]
    held = _row(tensordict, row, sorted({path[0] for _, path in wanted}))
    found = ((name, _at(held, path)) for name, path in wanted)
    return {name: plain(value) for name, value in found if value is not _ABSENT}


def collate_rows(rows: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Put rows of a data set together: the `collate_fn` of a `DataLoader` for TorchRL's chat environments.

    Each row keeps what it has, lists and dicts included, which TensorDict would take apart; a column that
    only other rows have is None. Where a row has no `query`, and its `prompt` is a list of messages, as in
    data sets for verl, the environment begins with these messages: they become its `query` too.

    Args:
        rows: One mapping of columns per row.

    Returns:
        A TensorDict of batch size [len(rows)].
    """
    rows = [_with_query(row) for row in rows]
    names = dict.fromkeys(name for row in rows for name in row)
    stacked: Any = {name: _stack(*(NonTensorData(row.get(name)) for row in rows)) for name in names}
    return TensorDict(stacked, batch_size=[len(rows)])


def _with_query(row: Mapping[str, Any]) -> Mapping[str, Any]:
    prompt = plain(row.get("prompt"))
    if row.get("query") is not None or not isinstance(prompt, list):
        return row
    messages = cast("list[Any]", prompt)
    are_messages = bool(messages) and all(isinstance(item, dict) and "role" in item for item in messages)
    return {**row, "query": messages} if are_messages else row


def plain(value: Any) -> Any:
    """Make plain Python of what a TensorDict holds; dicts and lists are copied, so that each has its own."""
    if is_non_tensor(value):
        return plain(_data(value))
    if isinstance(value, TensorDictBase):
        if value.batch_dims and isinstance(value, LazyStackedTensorDict):
            return [plain(item) for item in value.unbind(0)]
        return {key: plain(value.get(key)) for key in value.keys()}
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() <= MOST_NUMBERS else value
    if isinstance(value, np.ndarray):
        return plain(value.tolist()) if value.size <= MOST_NUMBERS else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


_ABSENT = object()


def _row(td: TensorDictBase, row: int, keys: list[str]) -> TensorDictBase:
    """Give one row. A batch may be a stack whose rows do not have the same keys."""
    for index in _unravelled(row, td.batch_size):
        if isinstance(td, LazyStackedTensorDict) and td.stack_dim == 0:
            td = td.tensordicts[index]
        else:
            td = cast("TensorDictBase", td.select(*keys, strict=False)[index])
    return td


def _path(name: NestedKey) -> tuple[str, ...]:
    return (name,) if isinstance(name, str) else cast("tuple[str, ...]", unravel_key(name))


def _data(value: Any) -> Any:
    return value.data if isinstance(value, NonTensorData) else value.tolist()


def _unravelled(row: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(index) for index in np.unravel_index(row, tuple(shape)))


def _at(held: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        held = _data(held) if is_non_tensor(held) else held
        if isinstance(held, TensorDictBase | Mapping):
            held = held.get(step, _ABSENT)
        else:
            return _ABSENT
    return held


_OURS = frozenset((
    "history", "text", "tokens", "masks", "log_probs", "ledger", "next", "agentic", "done", "terminated",
    "truncated",
))  # fmt: skip
"""What stands beside the columns of a data set."""


def has_something_to_say(tools: Sequence[Tool], tensordict: TensorDictBase) -> bool:
    """Whether tools want to know, or rows of the data set restrict them."""
    wanted = any(tool.needs_row or tool.open_at_reset for tool in tools)
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
            if tool.open_at_reset and data.kwargs(tool.name, "create_kwargs")]  # fmt: skip
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
    return RowData(selections=read_selections(tool_columns(found)[SELECTION])).selection_at(0)


def open_at_reset(tools: Sequence[Tool], sessions: Sequence[Session]) -> list[RowTurn]:
    """Open what is open from the start on; give what is said, as turns in which nobody has called."""
    eager = [tool for tool in tools if tool.open_at_reset]
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
