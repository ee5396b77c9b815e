"""`Conversation`: the messages of a trajectory as one immutable value that a TensorDict carries.

If messages were TensorDicts, each copy that TorchRL makes of a batch would cost O(messages). A `Conversation`
is a `ValueStack` of messages: the TensorDict of a message is made only when something reads it.
"""

# TensorDict and TorchRL have no types to check against. This module replaces private methods of tensordict.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any, Self, cast

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from tensordict.base import NO_DEFAULT
from tensordict.utils import _parse_to

from torchrl_agentic.trajectory.stored_message import COMPLETE, StoredMessage, copied
from torchrl_agentic.transforms.value_stack import ValueStack, unwrapped

_MESSAGE = "_stored_message"
_SCALAR = torch.Size(())


class _Sealed(TensorDict):
    """An empty TensorDict that cannot be unlocked, because all messages share it."""

    is_locked: Any = True

    def _propagate_lock(self, lock_parents_weakrefs: Any = None, *, is_compiling: bool) -> None:
        pass

    def _propagate_unlock(self) -> list[Any]:
        return []

    def _clone(self, recurse: bool = True) -> Any:
        return TensorDict({}, device=self.device)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorDict, ({},)


_EMPTY = _Sealed({})


def as_tensordict(
    message: StoredMessage, device: torch.device | None = None, *, lock: bool = True
) -> TensorDictBase:
    """Return a message as TorchRL reads it, a TensorDict of NonTensorData.

    Args:
        message: The message.
        device: Device of the TensorDict.
        lock: Whether it is locked. A locked one may be shared between conversations.
    """
    shown = message.shown
    if lock and device is None and shown is not None and shown._is_locked:
        return shown  # unless its reader has unlocked it, to write to it
    entries = {key: _entry_of(message, key, lock=lock) for key in _keys_of(message)}
    made = TensorDict._new_unsafe(entries, batch_size=_SCALAR, device=device, nested=False)
    if lock:
        made._is_locked = True
        made.__dict__[_MESSAGE] = message
        if device is None and message.is_shareable:
            message.shown = made  # two threads at once make two equal ones
    return made


def _keys_of(message: StoredMessage) -> frozenset[str]:
    return frozenset((COMPLETE, *message))


def _entry_of(message: StoredMessage, key: str, *, lock: bool = True) -> NonTensorData:
    """Return a field as an entry of a TensorDict; messages share locked ones."""
    value = message.field(key)
    if not lock:
        return NonTensorData(copied(value))
    return _shared_entry(value) if key in (COMPLETE, "role") else _entry(copied(value))


class Conversation(ValueStack[StoredMessage]):
    """The messages of a trajectory, [L], as one immutable value.

    No operation that copies, selects, moves, locks or stacks a conversation touches its messages. Reading one
    as TorchRL does (`conversation[i]`, `history.content`) makes TensorDicts of the messages that are read,
    which are locked. Operations that write replace the tuple of messages of this object, and no copy of it
    changes.
    """

    @staticmethod
    def _read_item(item: Any) -> StoredMessage:
        return message_of(item)

    @staticmethod
    def _keys_of(value: StoredMessage) -> frozenset[str]:
        return _keys_of(value)

    @staticmethod
    def _shown(value: StoredMessage, device: torch.device | None, *, lock: bool = True) -> TensorDictBase:
        return as_tensordict(value, device, lock=lock)

    @classmethod
    def of(cls, messages: Iterable[Mapping[str, Any]], device: torch.device | None = None) -> Conversation:
        """Return a conversation.

        Args:
            messages: Messages, as `StoredMessage` or as plain mappings.
            device: Device of the TensorDicts of the messages.
        """
        return cls.around(map(_stored, messages), device)

    @property
    def messages(self) -> tuple[StoredMessage, ...]:
        """The messages, [L]."""
        return self._values

    def extended(self, new: Iterable[Mapping[str, Any]]) -> Conversation:
        """Return a conversation with messages appended; this one stays as it is.

        Args:
            new: Messages to append.
        """
        added = tuple(map(_stored, new))
        made = self.around(self._values + added, self._device)
        if self._keys is not None:
            every, some = self._keys
            kinds = list(map(_keys_of, added))
            made.__dict__["_keys"] = every.intersection(*kinds), some.union(*kinds)
        return made

    def replaced(self, index: int, message: Mapping[str, Any]) -> Conversation:
        """Return a conversation with another message in the place of one.

        Args:
            index: Place of the message.
            message: The other message.
        """
        messages = list(self._values)
        messages[index] = _stored(message)
        return self.around(messages, self._device)

    def _get_str(self, key: Any, default: Any = NO_DEFAULT, **options: Any) -> Any:
        """Return a field of all messages, without making the messages."""
        if key not in self._known_keys()[0] or self._device is not None:
            return super()._get_str(key, default, **options)
        made = NonTensorStack.__new__(NonTensorStack)
        made.__dict__.update(
            tensordicts=[_entry_of(one, key) for one in self._values],
            stack_dim=0,
            hook_in=None,
            hook_out=None,
            _is_locked=None,
            _batch_size=self._batch_size,
        )
        return made

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and index and index[0] is Ellipsis:
            index = index[1:]
        if isinstance(index, tuple) and len(index) == 1:
            (index,) = index
        if type(index) is int:
            return as_tensordict(self._values[index], self._device)
        if isinstance(index, slice):
            return self.around(self._values[index], self._device)
        return super().__getitem__(index)

    def _clone(self, recurse: bool = True) -> Self:
        return self._copy()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the conversation on another device: its messages hold no tensors, and are shared.

        Args:
            *args: As `TensorDictBase.to` takes them.
            **kwargs: As `TensorDictBase.to` takes them.
        """
        device = _parse_to(*args, **kwargs)[0]
        return self if device is None or device == self._device else self._copy(device)

    def _apply_nest(self, fn: Any, *others: Any, **options: Any) -> Any:
        """Apply a function to the tensors, of which there are none; to messages only if it asks for them."""
        asks_for_messages = (
            options.get("call_on_nested")
            or options.get("batch_size") is not None
            or options.get("out") is not None
            or ((is_leaf := options.get("is_leaf")) is not None and is_leaf(NonTensorData))
        )
        if asks_for_messages:
            held = list(map(unwrapped, others))
            thawed = [one._thawed() if type(one) is Conversation else one for one in held]
            before = [_data_of(one) if type(one) is LazyStackedTensorDict else [] for one in thawed]
            found = super()._apply_nest(fn, *thawed, **options)
            for one, stack, old in zip(held, thawed, before, strict=True):
                if one is not stack and any(map(operator.is_not, _data_of(stack), old)):
                    one.tensordicts = stack.tensordicts  # `update_` writes to the second conversation
            return found
        if options.get("inplace"):
            return self
        device = options.get("device", NO_DEFAULT)
        return self._copy() if device is NO_DEFAULT else self._copy(device)

    def where(
        self,
        condition: Any,
        other: Any,
        *,
        out: Any = None,
        pad: Any = None,
        update_batch_size: bool = False,
    ) -> Any:
        """Return this conversation or the other, by a condition that holds for the whole row.

        Args:
            condition: True where this one is kept.
            other: The other conversation, of any length.
            out: Conversation that takes the result, or None.
            pad: As in `TensorDictBase.where`.
            update_batch_size: As in `TensorDictBase.where`.
        """
        if bool(condition.all()):
            chosen: Any = self
        elif not bool(condition.any()):
            chosen = other
        else:
            return super().where(condition, other, out=out, pad=pad, update_batch_size=update_batch_size)
        return chosen if out is None else out.update(chosen, update_batch_size=update_batch_size)

    def _set_str(self, key: str, value: Any, **kwargs: Any) -> Any:
        if isinstance(value, list) and len(cast("list[Any]", value)) != len(self._values):
            raise RuntimeError(
                "the fields of a conversation cannot be set one by one from a conversation of another "
                "length; torchrl.envs.utils.step_mdp tries that. Use env.step_mdp(td), or let a rollout or a "
                "collector do it"
            )
        return self._write("_set_str", key, value, **kwargs)


def _stored(message: Mapping[str, Any]) -> StoredMessage:
    return message if type(message) is StoredMessage else StoredMessage(message)


def message_of(item: Any) -> StoredMessage:
    """Read a message of TorchRL.

    Args:
        item: TensorDict of a message, or a `History` of batch size [].
    """
    td = unwrapped(item)
    if (message := td.__dict__.get(_MESSAGE)) is not None and td.is_locked:
        return message
    return StoredMessage({str(key): _field(td, str(key)) for key in td.keys()})


def _field(td: TensorDictBase, name: str) -> Any:
    value: Any = td._get_str(name, None) if type(td) is TensorDict else td.get(name, None)
    if isinstance(value, NonTensorData):
        return value.data
    # A list given to `History` becomes a stack, an empty one an empty tensor.
    return value.tolist() if isinstance(value, torch.Tensor) or hasattr(value, "tolist") else value


def _data_of(stack: LazyStackedTensorDict) -> list[Any]:
    return [entry.data for item in stack.tensordicts for entry in item.values()]


def _entry(value: Any) -> NonTensorData:
    """Return locked NonTensorData in 0.4 µs instead of 7; messages consist of it."""
    made = NonTensorData.__new__(NonTensorData)
    fields = {"data": value, "_is_non_tensor": True, "_metadata": None}
    made.__dict__.update(_tensordict=_EMPTY, _non_tensordict=fields, _is_initialized=True)
    return made


@functools.cache
def _shared_entry(value: Any) -> NonTensorData:
    """Return locked NonTensorData that all messages share: roles and flags are half the cost of a message."""
    return _entry(value)
