"""`Conversation`: the messages of a trajectory as one immutable value that a TensorDict carries.

TorchRL copies, selects, stacks and moves the entries of a batch several times per step. If messages were
TensorDicts, each of these would cost O(messages). To TorchRL a `Conversation` is a stack of TensorDicts, but
it holds a tuple of messages: copying it copies a reference, and the TensorDict of a message is made only when
something reads it.

The classes override methods of tensordict, private ones among them. `test/transforms/test_consumers.py`
checks what TorchRL does with them, against the version of tensordict that is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)
from tensordict.base import NO_DEFAULT
from tensordict.utils import _parse_to

from torchrl_agentic.messages import Message

_COMPLETE = "is_complete"
_MESSAGE = "_stored_message"
_KEEP: Any = object()
_EMPTY = TensorDict({})
_SCALAR = torch.Size(())
_NO_TENSORDICT = (
    "this history is not a stack of messages any more: torchrl.envs.utils.step_mdp splits ragged histories. "
    "Use env.step_mdp(td), or let a rollout or a collector do it"
)


class StoredMessage(Mapping[str, Any]):
    """A message of a conversation: an immutable mapping of its fields.

    Lists and dicts are copied when the message is made, and again when a field is read, so that nobody
    changes the message through them.

    Args:
        fields: "role", "content", and other fields that the model family needs.
    """

    __slots__ = ("_fields", "_tensordict")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = {key: copied(value) for key, value in fields.items()}
        self._tensordict: TensorDictBase | None = None

    def __getitem__(self, key: str) -> Any:
        return copied(self._fields[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def __repr__(self) -> str:
        return f"StoredMessage({self._fields!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredMessage, (self._fields,)

    def read(self) -> Message:
        """Return the message as a `Message`."""
        fields = self._fields
        calls, call_id = fields.get("tool_calls"), fields.get("tool_call_id")
        return Message(
            str(fields.get("role")),
            copied(fields.get("content")),
            tuple(copied(cast("list[Any]", calls))) if isinstance(calls, list) else (),
            call_id if isinstance(call_id, str) else None,
            fields.get(_COMPLETE) is not False,
        )

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates take."""
        fields = self._fields
        made: dict[str, Any] = {"role": str(fields.get("role")), "content": copied(fields.get("content"))}
        for name in ("name", "tool_call_id", "tool_calls"):
            value = fields.get(name)
            if isinstance(value, str | list) and value:
                made[name] = copied(cast("Any", value))
        return made

    def as_tensordict(self, device: torch.device | None = None, *, lock: bool = True) -> TensorDictBase:
        """Return the message as TorchRL reads it, a TensorDict of NonTensorData.

        Args:
            device: Device of the TensorDict.
            lock: Whether it is locked. A locked one may be shared between conversations.
        """
        if lock and device is None and self._tensordict is not None:
            return self._tensordict
        entries = {key: self.entry(key) for key in self.keys_shown()}
        made = TensorDict._new_unsafe(entries, batch_size=_SCALAR, device=device, nested=False)
        if lock:
            made._is_locked = True
            made.__dict__[_MESSAGE] = self
            if device is None and not any(isinstance(value, list | dict) for value in self._fields.values()):
                self._tensordict = made  # two threads at once make two equal ones
        return made

    def keys_shown(self) -> frozenset[str]:
        """Return the keys of the TensorDict of this message."""
        return frozenset((_COMPLETE, *self._fields))

    def entry(self, key: str) -> NonTensorData:
        """Return a field as an entry of a TensorDict; "is_complete" is true if the message does not say.

        Args:
            key: Name of the field.
        """
        if key == _COMPLETE:
            return _shared_entry(self._fields.get(key, True))
        value = self._fields[key]
        return _shared_entry(value) if key == "role" else _entry(copied(value))


def _writer(name: str) -> Callable[..., Any]:
    """Return the method of a conversation that writes as the method of a stack does."""

    def write(self: Conversation, *args: Any, **kwargs: Any) -> Any:
        return self._write(name, *args, **kwargs)

    return write


class Conversation(LazyStackedTensorDict):
    """The messages of a trajectory, [L], as one immutable value.

    No operation that copies, selects, moves, locks or stacks a conversation touches its messages. Reading one
    as TorchRL does (`conversation[i]`, `history.content`) makes TensorDicts of the messages that are read,
    which are locked. Operations that write replace the tuple of messages of this object, and no copy of it
    changes.
    """

    _messages: tuple[StoredMessage, ...]
    _made: list[TensorDictBase] | None
    _keys: tuple[frozenset[str], frozenset[str]] | None

    def __new__(cls, *items: TensorDictBase, stack_dim: int = 0, **options: Any) -> Any:
        """Return a conversation if the items are messages; otherwise an ordinary stack of them."""
        if stack_dim not in (0, -1) or any(item.batch_dims for item in items):
            return LazyStackedTensorDict(*items, stack_dim=stack_dim, **options)
        return super().__new__(cls)

    def __init__(self, *items: TensorDictBase, device: Any = None, **_: Any) -> None:
        self._assign(tuple(map(message_of, items)), items[0].device if items else device)

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], device: torch.device | None = None) -> Conversation:
        """Return a conversation.

        Args:
            messages: Messages, as `StoredMessage` or as plain mappings.
            device: Device of the TensorDicts of the messages.
        """
        return cls._new(tuple(map(_stored, messages)), device)

    @classmethod
    def from_tensordict(cls, td: TensorDictBase) -> Conversation:
        """Return a stack of messages as a conversation; nearly always it is one already.

        Args:
            td: Stack of messages, [L].

        Raises:
            RuntimeError: If it is not a stack of messages.
        """
        if type(td) is cls:
            return td
        return cls.of([message_of(item) for item in items_of(td)], td.device)

    @property
    def messages(self) -> tuple[StoredMessage, ...]:
        """The messages, [L]."""
        return self._messages

    def extended(self, new: Iterable[Mapping[str, Any]]) -> Conversation:
        """Return a conversation with messages appended; this one stays as it is.

        Args:
            new: Messages to append.
        """
        added = tuple(map(_stored, new))
        made = self._new(self._messages + added, self._device)
        if self._keys is not None:
            every, some = self._keys
            kinds = [one.keys_shown() for one in added]
            made.__dict__["_keys"] = every.intersection(*kinds), some.union(*kinds)
        return made

    def replaced(self, index: int, message: Mapping[str, Any]) -> Conversation:
        """Return a conversation with another message in the place of one.

        Args:
            index: Place of the message.
            message: The other message.
        """
        messages = list(self._messages)
        messages[index] = _stored(message)
        return self._new(tuple(messages), self._device)

    def __len__(self) -> int:
        return len(self._messages)

    # What makes a conversation.

    @classmethod
    def _new_lazy_unsafe(cls, *items: Any, **options: Any) -> Any:
        return LazyStackedTensorDict._new_lazy_unsafe(*items, **options)

    @classmethod
    def _new(cls, messages: tuple[StoredMessage, ...], device: torch.device | None) -> Conversation:
        made = TensorDictBase.__new__(cls)
        made._assign(messages, device)
        return made

    def _assign(self, messages: tuple[StoredMessage, ...], device: torch.device | None) -> None:
        self.__dict__.update(
            _messages=messages,
            _made=None,
            _keys=None,
            stack_dim=0,
            hook_in=None,
            hook_out=None,
            _is_locked=None,
            _device=device,
            _batch_size=torch.Size((len(messages),)),
        )

    def _copy(self, device: Any = _KEEP) -> Self:
        made = TensorDictBase.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.__dict__.update(_is_locked=None, _cache=None)
        if device is not _KEEP:
            made.__dict__.update(_device=device, _made=None)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"messages": self._messages, "device": self._device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._assign(state["messages"], state["device"])
        self.__dict__.update(_cache=None, _last_op=None)

    # What TorchRL reads.

    @property
    def tensordicts(self) -> list[TensorDictBase]:
        """TensorDicts of the messages, locked; made when they are first read."""
        made = self._made
        if made is None:
            made = self.__dict__["_made"] = [one.as_tensordict(self._device) for one in self._messages]
        return made

    @tensordicts.setter
    def tensordicts(self, items: Sequence[TensorDictBase]) -> None:
        self._assign(tuple(map(message_of, items)), self._device)

    @property
    def _keys_of_all(self) -> frozenset[str]:
        """Fields that all messages have."""
        return self._known_keys()[0]

    @property
    def _keys_of_any(self) -> frozenset[str]:
        """Fields that some message has."""
        return self._known_keys()[1]

    def _known_keys(self) -> tuple[frozenset[str], frozenset[str]]:
        if self._keys is None:
            kinds = {one.keys_shown() for one in self._messages} or {frozenset[str]()}
            self.__dict__["_keys"] = frozenset.intersection(*kinds), frozenset.union(*kinds)
        return cast("Any", self._keys)

    def _key_list(self) -> list[str]:
        return sorted(self._keys_of_all)

    @property
    def _has_exclusive_keys(self) -> bool:
        return self._keys_of_all != self._keys_of_any

    def _get_str(self, key: str, default: Any = NO_DEFAULT, **options: Any) -> Any:
        """Return a field of all messages, without making the messages."""
        if key not in self._keys_of_all or self._device is not None:
            return super()._get_str(key, default, **options)
        made = NonTensorStack.__new__(NonTensorStack)
        made.__dict__.update(
            tensordicts=[one.entry(key) for one in self._messages],
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
            return self._messages[index].as_tensordict(self._device)
        if isinstance(index, slice):
            return self._new(self._messages[index], self._device)
        return super().__getitem__(index)

    @property
    def device(self) -> torch.device | None:
        """Device of the TensorDicts of the messages."""
        return self._device

    @device.setter
    def device(self, value: Any) -> None:
        self.__dict__.update(_device=None if value is None else torch.device(value), _made=None)

    def clear_device_(self) -> Self:
        """Forget the device."""
        self.device = None
        return self

    @property
    def names(self) -> list[str | None]:
        """Name of the dimension."""
        return [self._td_dim_name]

    @names.setter
    def names(self, value: Sequence[str | None] | None) -> None:
        self._set_names(value)

    def _set_names(self, names: Sequence[str | None] | None) -> None:
        self._td_dim_name = names[0] if names else None

    def _erase_names(self) -> None:
        self._td_dim_name = None

    def _has_names(self) -> bool:
        return self._td_dim_name is not None

    def _check_dim_name(self, name: str | None) -> bool:
        return name is not None and name == self._td_dim_name

    @property
    def is_locked(self) -> bool:
        """Whether this object is locked; its messages always are."""
        return bool(self._is_locked)

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        if value:
            self.lock_()
        else:
            self.unlock_()

    _lock_parents_weakrefs: Any = TensorDictBase._lock_parents_weakrefs

    def _propagate_lock(self, lock_parents_weakrefs: Any = None, *, is_compiling: bool) -> None:
        self._is_locked = True
        if lock_parents_weakrefs is not None:
            self._lock_parents_weakrefs = self._lock_parents_weakrefs + lock_parents_weakrefs

    def _propagate_unlock(self) -> list[Any]:
        self._is_locked = None
        return []

    def is_shared(self) -> bool:
        """Return False: a conversation has no tensors that could be in shared memory."""
        return False

    def is_memmap(self) -> bool:
        """Return False: a conversation has no tensors that could be mapped."""
        return False

    _is_shared: Any = False
    _is_memmap: Any = False

    # What copies it.

    def _clone(self, recurse: bool = True) -> Self:
        return self._copy()

    def _select(
        self, *keys: Any, inplace: bool = False, strict: bool = False, set_shared: bool = True
    ) -> Any:
        names = {key if isinstance(key, str) else key[0] for key in keys}
        if strict and not names <= self._keys_of_all:
            raise KeyError(f"not all messages have {sorted(names - self._keys_of_all)}")
        return self._filtered(lambda key: key in names, inplace=inplace)

    def _exclude(self, *keys: Any, inplace: bool = False, set_shared: bool = True) -> Any:
        names = {key if isinstance(key, str) else key[0] for key in keys}
        return self._filtered(lambda key: key not in names, inplace=inplace)

    def _filtered(self, keep: Callable[[str], bool], *, inplace: bool) -> Any:
        if all(map(keep, self._keys_of_any)):
            return self if inplace else self._copy()
        kept = [{key: value for key, value in one.items() if keep(key)} for one in self._messages]
        if not inplace:
            return Conversation.of(kept, self._device)
        self._assign(tuple(map(StoredMessage, kept)), self._device)
        return self

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
            return super()._apply_nest(fn, *others, **options)
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

    # What writes to it: this object gets other messages.

    def _write(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.is_locked:
            raise RuntimeError("Cannot modify locked TensorDict.")
        messages = [one.as_tensordict(self._device, lock=False) for one in self._messages]
        stack = LazyStackedTensorDict(*messages, stack_dim=0)
        found = getattr(stack, name)(*args, **kwargs)
        self.tensordicts = stack.tensordicts
        return self if found is stack or found is None else found

    def _set_str(self, key: str, value: Any, **kwargs: Any) -> Any:
        if isinstance(value, list) and len(cast("list[Any]", value)) != len(self._messages):
            raise RuntimeError(
                "the fields of a conversation cannot be set one by one from a conversation of another "
                "length; torchrl.envs.utils.step_mdp tries that. Use env.step_mdp(td), or let a rollout or a "
                "collector do it"
            )
        return self._write("_set_str", key, value, **kwargs)

    def update(self, other: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Take the messages of another conversation, of any length.

        Args:
            other: Conversation or history, [L], or a dict of fields.
            *args: As `TensorDictBase.update` takes them.
            **kwargs: As `TensorDictBase.update` takes them.
        """
        other = other if isinstance(other, dict) else getattr(other, "_tensordict", other)
        if self.is_locked and not kwargs.get("ignore_lock"):
            raise RuntimeError("Cannot modify locked TensorDict.")
        if is_flat_stack(other) and kwargs.get("keys_to_update") is None:
            self._assign(Conversation.from_tensordict(other).messages, self._device)
            return self
        return self._write("update", other, *args, **kwargs)

    _set_tuple: Any = _writer("_set_tuple")
    _set_at_str: Any = _writer("_set_at_str")
    _set_at_tuple: Any = _writer("_set_at_tuple")
    __setitem__: Any = _writer("__setitem__")
    insert: Any = _writer("insert")
    append: Any = _writer("append")
    del_: Any = _writer("del_")
    pop: Any = _writer("pop")
    update_: Any = _writer("update_")

    def share_memory_(self) -> Self:
        """Return the conversation: there are no tensors to share."""
        return self

    def _memmap_(self, **options: Any) -> Any:
        messages = [one.as_tensordict(self._device, lock=False) for one in self._messages]
        return LazyStackedTensorDict(*messages, stack_dim=0)._memmap_(**options)


def is_flat_stack(td: Any) -> bool:
    """Return True for a lazy stack of one dimension."""
    return isinstance(td, LazyStackedTensorDict) and td.batch_dims == 1


def items_of(td: TensorDictBase) -> Sequence[TensorDictBase]:
    """Return the items of a stack along its first dimension.

    Args:
        td: The stack.

    Raises:
        RuntimeError: If TorchRL's public `step_mdp` has split it.
    """
    if isinstance(td, LazyStackedTensorDict) and td.stack_dim == 0:
        return td.tensordicts
    try:
        return td.unbind(0)
    except AttributeError as error:
        raise RuntimeError(_NO_TENSORDICT) from error


def _stored(message: Mapping[str, Any]) -> StoredMessage:
    return message if type(message) is StoredMessage else StoredMessage(message)


def message_of(item: Any) -> StoredMessage:
    """Read a message of TorchRL.

    Args:
        item: TensorDict of a message, or a `History` of batch size [].
    """
    td = getattr(item, "_tensordict", item) if not isinstance(item, TensorDict) else item
    if (message := td.__dict__.get(_MESSAGE)) is not None and td.is_locked:
        return message
    return StoredMessage({str(key): _field(td, str(key)) for key in td.keys()})


def _field(td: TensorDictBase, name: str) -> Any:
    value: Any = td._get_str(name, None) if type(td) is TensorDict else td.get(name, None)
    if isinstance(value, NonTensorData):
        return value.data
    # A list given to `History` becomes a stack, an empty one an empty tensor.
    return value.tolist() if isinstance(value, torch.Tensor) or hasattr(value, "tolist") else value


def copied(value: Any) -> Any:
    """Copy the lists and dicts of a JSON value; other objects, such as images, are shared.

    Args:
        value: Any value.
    """
    if isinstance(value, dict):
        return {key: copied(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [copied(item) for item in cast("list[Any]", value)]
    return value


def _entry(value: Any) -> NonTensorData:
    """Return NonTensorData in 0.4 µs instead of 7; messages consist of it."""
    made = NonTensorData.__new__(NonTensorData)
    fields = {"data": value, "_is_non_tensor": True, "_metadata": None}
    made.__dict__.update(_tensordict=_EMPTY, _non_tensordict=fields, _is_initialized=True)
    return made


@functools.cache
def _shared_entry(value: Any) -> NonTensorData:
    """Return NonTensorData that all messages share: roles and flags are half the cost of a message."""
    return NonTensorData(value)
