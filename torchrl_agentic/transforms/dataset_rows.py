"""Rows of a data set: read their columns from a TensorDict, and begin trajectories with them."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

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

from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.dispatch.opening import read_row
from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.row_data import (
    EXTRA,
    HIDDEN_STATE,
    KEYS,
    SELECTION,
    RowData,
    read_selections,
    tool_columns,
    without_answers,
)
from torchrl_agentic.trajectory.calls import CallsStage
from torchrl_agentic.trajectory.episode import Episode

_stack: Any = NonTensorStack  # declared abstract, which it is not
MOST_NUMBERS = 4096
"""Largest tensor that becomes a list, in elements.

A larger tensor stays as it is, being an image or the like.
"""


def columns(tensordict: TensorDictBase, row: int, names: Iterable[NestedKey]) -> dict[NestedKey, Any]:
    """Return the columns of one row by name, as plain Python; missing columns are left out.

    A TensorDict becomes a dict, a tensor or array a number or list, up to `MOST_NUMBERS` elements. Texts and
    other objects stay as they are. The caller may change what it gets.

    Args:
        tensordict: The batch, [*B].
        row: Index in the flattened batch.
        names: Keys of the columns; a tuple leads into nested TensorDicts and dicts.
    """
    wanted = [(name, _path(name)) for name in names]
    held = _row(tensordict, row, sorted({path[0] for _, path in wanted}))
    found = ((name, _at(held, path)) for name, path in wanted)
    return {name: plain(value) for name, value in found if value is not _ABSENT}


def row_columns(
    steps: Sequence[TensorDictBase], row: int, names: Iterable[NestedKey]
) -> dict[NestedKey, Any]:
    """Return the columns of one row as `columns` does, of several TensorDicts, of which the later ones count.

    Args:
        steps: Such as the root of a step and its "next", [*B].
        row: Index in the flattened batch.
        names: Keys of the columns.
    """
    names = list(names)
    found: dict[NestedKey, Any] = {}
    for step in steps:
        found.update(columns(step, row, names))
    return found


def collate_rows(rows: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Stack rows of a data set: the `collate_fn` of a `DataLoader` for TorchRL's chat environments.

    Lists and dicts stay whole, which TensorDict would take apart; a column that a row does not have is None.
    If a row has no `query`, and its `prompt` is a list of messages, as in data sets for verl, then these
    messages become its `query`, and the environment begins with them.

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
    """Convert a value of a TensorDict to plain Python; dicts and lists are copied."""
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
    """Return one row; a batch may be a stack whose rows have different keys."""
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
"""Keys of a TensorDict that are not columns of a data set."""


def concerns_tools(tools: Sequence[Tool], tensordict: TensorDictBase) -> bool:
    """Return True if a tool needs the rows of the data set, or a row says something to tools.

    Args:
        tools: The tools.
        tensordict: Result of the reset, [*B].
    """
    wanted = any(tool.needs_row or tool.open_at_reset or tool.has_final_reward for tool in tools)
    return wanted or has_row_keys(tensordict.keys())


def has_row_keys(columns: Container[object]) -> bool:
    """Return True if one of these columns is for tools."""
    return any(key in columns for key in (*KEYS, EXTRA))


def row_data(tools: Sequence[Tool], tensordict: TensorDictBase, row: int) -> RowData:
    """Read the row of the data set for a trajectory that begins.

    Args:
        tools: The tools.
        tensordict: Result of the reset, [*B].
        row: Index in the flattened batch.

    Raises:
        ValueError: If it names an unknown tool, or lacks what a tool needs.
    """
    found: Any = columns(tensordict, row, [key for key in tensordict.keys() if key not in _OURS])
    try:
        return read_row(found, tools)
    except ValueError as error:
        raise ValueError(f"row {row} of the data set: {error}") from None


def completed(
    known: RowData, tools: Sequence[Tool], tensordict: TensorDictBase, row: int, *, has_worlds: bool
) -> RowData:
    """Return the row completed by columns passed to `env.reset`, which transforms see only at the first step.

    Args:
        known: Row as it was read at the reset.
        tools: The tools.
        tensordict: The root of the first step, [*B].
        row: Index in the flattened batch.
        has_worlds: Whether a toolset has a world, which may need any column.

    Raises:
        ValueError: If the row is invalid, or comes too late for a tool that opens at the reset, or for a
            prompt of tokens that had to show a selection of tools.
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


def tool_selection(tensordict: TensorDictBase, row: int) -> frozenset[str] | None:
    """Return the names of the tools that a row may use from its first turn on, or None for all.

    Args:
        tensordict: The batch, [*B].
        row: Index in the flattened batch.
    """
    keys = [key for key in (SELECTION, EXTRA) if key in tensordict.keys()]
    if not keys:
        return None
    found: Any = columns(tensordict, row, keys)
    return RowData(selections=read_selections(tool_columns(found)[SELECTION])).selection_at(0)


def begin_rows(
    tools: Sequence[Tool],
    stage: CallsStage,
    episodes: Sequence[Episode],
    tensordict_reset: TensorDictBase,
    *,
    has_worlds: bool,
) -> list[Sequence[Mapping[str, JSON]]]:
    """Begin trajectories: read their rows of the data set, and open the tools that open at the reset.

    Args:
        tools: The tools.
        stage: Opens them.
        episodes: The trajectories that begin.
        tensordict_reset: Result of the reset, [*B].
        has_worlds: Whether a toolset has a world, which may need any column.

    Returns:
        For each trajectory the initial messages of its tools.

    Raises:
        ValueError: If a row names an unknown tool, or lacks what a tool needs.
    """
    nothing: list[Sequence[Mapping[str, JSON]]] = [() for _ in episodes]
    if not episodes or not (has_worlds or concerns_tools(tools, tensordict_reset)):
        return nothing
    for episode in episodes:
        episode.session.data = row_data(tools, tensordict_reset, episode.row)
    worlds = episodes[0].session.dispatcher.worlds(lambda _: True)
    if not any(one.open_at_reset for one in (*tools, *worlds)):
        return nothing
    return run(stage.open(episodes))


def visible_state(tensordict: TensorDictBase, row: int) -> TensorDictBase:
    """Return a row of a step as tools with `wants_state` see it: locked, without conversation and answers.

    Args:
        tensordict: The root of the step, [*B].
        row: Index in the flattened batch.
    """
    flat: Any = tensordict if tensordict.batch_dims == 1 else tensordict.reshape(-1)
    item = flat[row]
    hidden = [key for key in item.keys(True) if not HIDDEN_STATE.isdisjoint(_path(key))]
    shown = item.exclude(*hidden).clone()
    for key in shown.keys():
        value = shown.get(key)
        if is_non_tensor(value) and (found := without_answers(_data(value))) is not _data(value):
            shown.set_non_tensor(key, found)
    return shown.lock_()
