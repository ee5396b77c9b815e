"""Columns of a data set, as plain Python: what a row of a reset TensorDict knows besides its conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
