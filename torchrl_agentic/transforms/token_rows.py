"""Ragged tensors of a batch: the tokens, masks and log-probabilities of its rows.

Rows differ in length, so no tensor can hold a batch of them. `TokenRows` holds one value per row, and the
rest of the batch stays a dense TensorDict: TorchRL copies it once instead of once per row.
"""

# TensorDict and TorchRL have no types to check against. This module replaces private methods of tensordict.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensorclass
from tensordict.base import NO_DEFAULT
from torchrl.data import Composite, TensorSpec, Unbounded

from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.value_stack import (
    ValueStack,
    flattened,
    is_flat_stack,
    nested,
    unwrapped,
)

_SCALAR = torch.Size(())


TOKENS_LEFT = ("agentic", "tokens_left")
"""Tokens that the prompt leaves of `max_trajectory_tokens`; int64, [*B, 1].

`TurnTokenizer` writes it for the next turn; `agent_policy` reads it.
"""
ROOM = ("agentic", "room")
"""Tokens that the prompt left for the answer; int64, [*B, 1]; 0 or less: no room.

`agent_policy` writes it into the root of a step; `EndTrajectory` and `TurnTokenizer` read it.
"""


class TokenRow:
    """The tensors of one row under one key, such as "tokens": immutable, each [T].

    Args:
        tensors: Tensors by name, such as "prompt".
        ids: Lists of ids by name, for readers that need lists; they are made from the tensors if absent.
    """

    __slots__ = ("_ids", "_shown", "tensors")

    def __init__(self, tensors: Mapping[str, Any], ids: Mapping[str, list[int]] | None = None) -> None:
        self.tensors: Mapping[str, Any] = dict(tensors)
        self._ids: dict[str, list[int]] = dict(ids or {})
        self._shown: TensorDictBase | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenRow, (self.tensors,)

    def ids(self, name: str) -> list[int]:
        """Return a tensor as a list, which must not be changed. It is made once.

        Args:
            name: Name of the tensor.
        """
        if name not in self._ids:
            self._ids[name] = self.tensors[name].tolist()
        return self._ids[name]

    def knows_ids(self, name: str) -> bool:
        """Return True if a tensor is at hand as a list.

        Args:
            name: Name of the tensor.
        """
        return name in self._ids

    def merged(self, other: TokenRow) -> TokenRow:
        """Return a row with the tensors of this one and of another, which takes precedence.

        Args:
            other: The other row.
        """
        return TokenRow({**self.tensors, **other.tensors}, {**self._ids, **other._ids})

    def keep(self, names: Callable[[str], bool]) -> TokenRow:
        """Return a row with some of the tensors.

        Args:
            names: Called with a name; returns whether it stays.
        """
        kept = {name: value for name, value in self.tensors.items() if names(name)}
        return TokenRow(kept, {name: ids for name, ids in self._ids.items() if names(name)})

    def as_tensordict(self, device: torch.device | None = None, *, lock: bool = True) -> TensorDictBase:
        """Return the row as a TensorDict of batch size [].

        Args:
            device: Device of the TensorDict.
            lock: Whether it is locked.
        """
        if lock and device is None and self._shown is not None:
            return self._shown
        made = TensorDict._new_unsafe(dict(self.tensors), batch_size=_SCALAR, device=device, nested=False)
        if lock:
            made._is_locked = True
            if device is None:
                self._shown = made
        return made


class TokenRows(ValueStack[TokenRow]):
    """The ragged tensors of a batch under one key, [B], as one immutable value."""

    @staticmethod
    def _read_item(item: Any) -> TokenRow:
        return row_of(item)

    @staticmethod
    def _keys_of(value: TokenRow) -> frozenset[str]:
        return frozenset(value.tensors)

    @staticmethod
    def _shown(value: TokenRow, device: torch.device | None, *, lock: bool = True) -> TensorDictBase:
        return value.as_tensordict(device, lock=lock)

    def _get_str(self, key: Any, default: Any = NO_DEFAULT, **options: Any) -> Any:
        """Return a tensor of all rows: stacked if they are equally long, else as the options say."""
        if key not in self._known_keys()[0]:
            return super()._get_str(key, default, **options)
        tensors = [row.tensors[key] for row in self._values]
        if not all(type(tensor) is torch.Tensor for tensor in tensors):
            return super()._get_str(key, default, **options)
        return LazyStackedTensorDict.lazy_stack(cast("Any", tensors), 0, **options)

    def __getitem__(self, index: Any) -> Any:
        """Return a row as a TensorDict of its own, or several rows."""
        if type(index) is int:
            return self._values[index].as_tensordict(self._device, lock=False)
        if isinstance(index, slice):
            return self.around(self._values[index], self._device)
        return super().__getitem__(index)

    def _unbind(self, dim: int) -> tuple[Any, ...]:
        return tuple(row.as_tensordict(self._device, lock=False) for row in self._values)

    def where(
        self, condition: Any, other: Any, *, out: Any = None, pad: Any = None, update_batch_size: bool = False
    ) -> Any:
        """Return the rows of this stack where a condition holds, those of the other elsewhere.

        Args:
            condition: bool, [B].
            other: The other rows, [B], of any length.
            out: Stack that takes the result, or None.
            pad: As in `TensorDictBase.where`.
            update_batch_size: As in `TensorDictBase.where`.
        """
        held = unwrapped(other)
        if not is_flat_stack(held):
            return super().where(condition, other, out=out, pad=pad, update_batch_size=update_batch_size)
        holds = condition.reshape(len(self), -1).all(-1).tolist()
        rows = zip(self._values, self.from_tensordict(held).values_held, holds, strict=True)
        chosen = self.around([mine if is_mine else theirs for mine, theirs, is_mine in rows], self._device)
        return chosen if out is None else out.update(chosen)

    def _updated(self, values: tuple[TokenRow, ...]) -> tuple[TokenRow, ...]:
        """Return the rows with the tensors of others; tensors that those do not have stay."""
        return tuple(mine.merged(theirs) for mine, theirs in zip(self._values, values, strict=True))


def row_of(item: Any) -> TokenRow:
    """Read a row of TorchRL.

    Args:
        item: TensorDict or TensorClass of a row, such as `Tokens`, of batch size [].
    """
    return TokenRow(dict(unwrapped(item).items()))


def read_rows(td: TensorDictBase, key: str) -> list[TokenRow] | None:
    """Return what the rows of a flattened batch have under a key; None if no row has the key.

    Args:
        td: The batch, [*B].
        key: Such as "tokens" or "ledger".
    """
    if is_flat_stack(td):
        found = [row.get(key, None) for row in cast("LazyStackedTensorDict", td).tensordicts]
        if all(one is None for one in found):
            return None
        return [TokenRow({}) if one is None else row_of(one) for one in found]
    held = td.get(key, None)
    if held is None:
        return None
    if td.batch_dims == 0:
        return [row_of(held)]
    stacks = flattened(unwrapped(held), td.batch_dims - 1)
    return [row for stack in stacks for row in TokenRows.from_tensordict(stack).values_held]


def write_rows(td: TensorDictBase, key: str, rows: Sequence[TokenRow], kind: Any = None) -> None:
    """Write a row under a key in each row of a flattened batch.

    Args:
        td: The batch, [*B].
        key: Such as "tokens" or "ledger".
        rows: One per row.
        kind: TensorClass that TorchRL expects under the key, such as `Tokens`, or None.
    """

    def wrapped(held: TensorDictBase) -> Any:
        return held if kind is None else kind._from_tensordict(held)

    if is_flat_stack(td):
        for row, new in zip(cast("LazyStackedTensorDict", td).tensordicts, rows, strict=True):
            row.set(key, wrapped(new.as_tensordict(row.device, lock=False)))
    elif td.batch_dims == 0:
        td.set(key, wrapped(rows[0].as_tensordict(td.device, lock=False)))
    else:
        stack = nested(rows, td.batch_size, lambda some: TokenRows.around(some, td.device))
        td._set_str(key, wrapped(stack), validated=True, inplace=False)


def as_token_rows(td: TensorDictBase, key: str) -> None:
    """Hold the ragged tensors under a key of a dense batch as `TokenRows`, in the TensorClass that they have.

    Args:
        td: The batch, [*B].
        key: Such as "tokens".
    """
    held = td.get(key, None)
    if held is None or isinstance(td, LazyStackedTensorDict) or not td.batch_dims:
        return
    if type(unwrapped(held)) is not TokenRows:
        write_rows(td, key, read_rows(td, key) or [], type(held) if is_tensorclass(held) else None)


def ragged_spec(
    names: Mapping[str, torch.dtype], shape: torch.Size, device: torch.device | None
) -> Composite:
    """Return the spec of ragged tensors, which TorchRL's `step_mdp` copies as one entry.

    Args:
        names: Types by name.
        shape: Batch size.
        device: Device of the tensors.
    """
    ragged = torch.Size((*shape, -1))
    entries: dict[str, TensorSpec] = {
        name: Unbounded(shape=ragged, dtype=dtype, device=device) for name, dtype in names.items()
    }
    return Composite(entries, shape=shape, device=device, step_mdp_static=True)


def out_of_room(tensordict: TensorDictBase) -> list[bool]:
    """Return for each row of a step whether its answer is incomplete because the prompt left no room.

    Args:
        tensordict: The root of the step, [*B].
    """
    rooms = [room for key in (ROOM, TOKENS_LEFT) if (room := tensordict.get(key, None)) is not None]
    tokens = read_rows(tensordict, "tokens")
    if not rooms or tokens is None:
        return [False] * tensordict.batch_size.numel()
    left = torch.stack([room.reshape(-1) for room in rooms]).amin(0).tolist()
    rows = zip(tokens, left, border.prompts(tensordict, "full"), strict=True)
    return [
        len(row.tensors["full"]) - len(row.tensors["prompt"]) >= room
        and not conversation.messages[-1].read().is_complete
        for row, room, conversation in rows
    ]
