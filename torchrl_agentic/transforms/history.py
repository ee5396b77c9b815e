"""The border to TorchRL's `History`: the one module that knows how conversations lie in a TensorDict.

If messages were TensorDicts, each copy that TorchRL makes of a batch would cost O(messages). A conversation
is a `Conversation`, one immutable value: a `ValueStack` of messages, of which one becomes a TensorDict only
when something reads it. A batch of them is a lazy stack, of unequal length ("ragged"), nested once more for
each further batch dimension.
"""

# TensorDict and TorchRL have no types to check against. This module replaces private methods of tensordict,
# and calls some, because the public ones would check each message again.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import tensordict
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from tensordict.base import NO_DEFAULT
from tensordict.utils import _parse_to
from torchrl.data.llm import History

from torchrl_agentic.messages import COMPLETE, Message, StoredMessage, copied
from torchrl_agentic.trajectory.calls import without_eos
from torchrl_agentic.transforms.value_stack import ValueStack, flattened, is_flat_stack, nested, unwrapped

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


class AgentHistory(History):
    """A `History` whose messages know which call they answer, and whose rows may differ in length.

    Everything that reads a `History` works: indexing, fields, chat templates, masks, `to_dict`. Messages are
    immutable: `append` and `extend` make longer conversations, and `history.content = [...]` replaces a field
    of all messages, but a message that was read (`history[0, -1]`) is locked.

    tool_call_id: the id of the call that a tool's message answers; None for all others.
    name: the name of the tool that was called; None for all others.
    """

    tool_call_id: str | None = None
    name: str | None = None

    @classmethod
    def of(cls, rows: Sequence[TensorDictBase], shape: Sequence[int] | None = None) -> AgentHistory:
        """Return the history of a batch of conversations.

        Args:
            rows: Conversations of the flattened batch.
            shape: Batch size, or None for [len(rows)].
        """
        return cls.around(nested(rows, shape or [len(rows)], _stacked))

    @classmethod
    def around(cls, td: TensorDictBase) -> AgentHistory:
        """Return a history around a stack of messages, without reading them.

        Args:
            td: Conversation, [L], or a stack of conversations, [*B, L].
        """
        history = cls.__new__(cls)
        absent = dict.fromkeys(("tool_calls", "tool_responses", "tool_call_id", "name"))
        history.__dict__.update(_tensordict=td, _non_tensordict=absent, _is_initialized=True)
        return history

    def where(self, condition: torch.Tensor, other: Any, **options: Any) -> Any:
        """Return a history with the rows of this one where a condition is true, of another elsewhere.

        Args:
            condition: bool, [*B].
            other: The other history, [*B, L]; its rows may be of any length.
            **options: As `TensorDictBase.where` takes them.
        """
        out = options.pop("out", None)
        found = type(self).around(inner(self).where(condition, unwrapped(other), **options))
        return found if out is None else out._replaced(found)

    def append(self, history: History, *, inplace: bool = True, dim: int = -1) -> History:
        """Append a message to a conversation, or one message to each conversation of a batch.

        Args:
            history: The message, [], or the messages, [*B].
            inplace: Whether this history changes; else a new one is returned.
            dim: Dimension along which it is appended.
        """
        if not self.batch_dims or dim not in (-1, self.ndim - 1):
            return super().append(history, inplace=inplace, dim=dim)
        if self.batch_dims != history.batch_dims + 1:
            raise RuntimeError(
                f"append takes one message per conversation, a history of {self.batch_dims - 1} dimensions; "
                f"got one of {history.batch_dims}"
            )
        new = [[message_of(item)] for item in flattened(inner(history), history.batch_dims)]
        return self._extended(new, inplace=inplace)

    def extend(self, history: History, *, inplace: bool = True, dim: int = 0) -> History:
        """Append another history; along the messages of a batch row by row, whatever the lengths.

        Args:
            history: History to append.
            inplace: Whether this history changes; else a new one is returned.
            dim: Dimension along which it is appended.
        """
        if dim not in (-1, self.ndim - 1) or history.batch_dims != self.batch_dims or not self.batch_dims:
            return super().extend(history, inplace=inplace, dim=dim)
        new = [row.messages for row in conversations(history, history.ndim - 1)]
        return self._extended(new, inplace=inplace)

    def _extended(self, new: Sequence[Sequence[Mapping[str, Any]]], *, inplace: bool) -> AgentHistory:
        rows = conversations(self, self.ndim - 1)
        longer = [row.extended(more) for row, more in zip(rows, new, strict=True)]
        td = longer[0] if self.ndim == 1 else inner(AgentHistory.of(longer, self.batch_size[:-1]))
        return self._replaced(AgentHistory.around(td)) if inplace else AgentHistory.around(td)

    def _replaced(self, history: AgentHistory) -> AgentHistory:
        if self.is_locked:
            raise RuntimeError("Cannot modify locked TensorDict.")
        self.__dict__["_tensordict"] = inner(history)
        return self

    def _check_dim_name(self, name: str | None) -> bool:
        """Return True if a dimension has this name; tensordict would look into each field of each message."""
        td = inner(self)
        return name is not None and td._has_names() and name in td.names

    def _clone(self, recurse: bool = True) -> AgentHistory:
        return type(self).around(inner(self)._clone(recurse))


def require_list_to_stack() -> None:
    """Set TensorDict's `list_to_stack`, which `History` requires."""
    if not tensordict.list_to_stack():
        tensordict.set_list_to_stack(True).set()


def inner(history: Any) -> TensorDictBase:
    """Return the TensorDict behind a history, because a TensorClass costs many times more to index."""
    try:
        return history._tensordict
    except AttributeError:
        raise TypeError(
            f"a History is needed; got {type(history).__name__}. Write torchrl_agentic.transforms.history."
            "as_history(chats), with a list of message dicts for each row of the batch"
        ) from None


def conversations(history: History, batch_dims: int = 1) -> list[Conversation]:
    """Return the conversations of a flattened batch.

    Args:
        history: Batch of conversations.
        batch_dims: Number of batch dimensions.
    """
    return [Conversation.from_tensordict(td) for td in flattened(inner(history), batch_dims)]


def prompts(td: TensorDictBase, part: str = "prompt") -> list[Conversation]:
    """Return the conversations under ("history", part) of a flattened batch.

    Args:
        td: The batch, [*B].
        part: "prompt", "response" or "full".
    """
    if is_flat_stack(td):
        rows = cast("LazyStackedTensorDict", td).tensordicts
        return [Conversation.from_tensordict(inner(inner(row.get("history")).get(part))) for row in rows]
    chat = inner(td.get("history"))
    if is_flat_stack(chat):
        rows = cast("LazyStackedTensorDict", chat).tensordicts
        return [Conversation.from_tensordict(inner(row.get(part))) for row in rows]
    return conversations(chat.get(part), td.batch_dims)


def set_prompts(td: TensorDictBase, rows: Sequence[Conversation]) -> None:
    """Write conversations under ("history", "prompt"); they may differ in length.

    Args:
        td: The batch, [*B].
        rows: One conversation per row of the flattened batch.
    """
    if is_flat_stack(td):
        for row, conversation in zip(cast("LazyStackedTensorDict", td).tensordicts, rows, strict=True):
            inner(row.get("history")).set("prompt", AgentHistory.around(conversation))
        return
    history = td.get("history")
    inner(history).set("prompt", AgentHistory.of(rows, td.batch_size))
    td.set("history", history)


def read_turn(
    conversation: Conversation, known: int, written: int, eos_strings: Sequence[str]
) -> tuple[Conversation, Message]:
    """Read the last message, and repair the messages that the policy wrote.

    Turns of other roles that the model invented after its own are removed, and end-of-sequence strings are
    cut off, because the chat template writes its own. Messages that other transforms appended stay.

    Args:
        conversation: The conversation after the policy, [L].
        known: Number of messages in the prompt of the policy.
        written: Number of messages after the policy, before other transforms.
        eos_strings: Strings to cut off.

    Returns:
        The repaired conversation, and its last message.
    """
    messages = conversation.messages
    if written > known + 1 and messages[known].read().role == "assistant":
        messages = [*messages[: known + 1], *messages[written:]]
        conversation = Conversation.of(messages)
    message = messages[-1].read()
    if isinstance(message.content, str):
        plain = without_eos(message.content, eos_strings)
        if plain is not message.content:
            message = replace(message, content=plain)
            conversation = conversation.replaced(-1, {**messages[-1], "content": plain})
    return conversation, message


def as_history(chats: Sequence[Sequence[Mapping[str, Any]]]) -> AgentHistory:
    """Return a batch of conversations made of lists of message dicts, for a reset.

    Args:
        chats: Messages of each conversation, with "role" and "content".
    """
    require_list_to_stack()
    return AgentHistory.of([Conversation.of(chat) for chat in chats])


def dense(td: TensorDictBase) -> TensorDictBase:
    """Return a batch as a TensorDict rather than a lazy stack of its rows, if its entries can be stacked.

    `ChatEnv` returns a stack from a reset, and each later step would handle row by row what it kept of it.

    Args:
        td: The batch, [*B].
    """
    if not is_flat_stack(td):
        return td
    rows = cast("LazyStackedTensorDict", td)
    if any(set(row.keys()) != set(rows.tensordicts[0].keys()) for row in rows.tensordicts):
        return td
    try:
        entries = {key: rows.get(key) for key in rows.keys()}
    except RuntimeError:  # a column of the data set whose tensors differ in shape
        return td
    return TensorDict(entries, batch_size=td.batch_size, device=td.device)


def leaves(td: TensorDictBase) -> tuple[LazyStackedTensorDict, list[TensorDictBase]]:
    """Return a batch as a lazy stack, and its rows, flat.

    Entries that are set in a row are set in the stack.

    Args:
        td: The batch, [*B].
    """
    stack = td if isinstance(td, LazyStackedTensorDict) and td.stack_dim == 0 else td.to_lazystack(0)
    if stack.batch_dims == 1:
        return stack, stack.tensordicts
    parts = [leaves(part) for part in stack.tensordicts]
    nested = LazyStackedTensorDict(*(part for part, _ in parts), stack_dim=0)
    return nested, [row for _, rows in parts for row in rows]


def _stacked(rows: Sequence[TensorDictBase]) -> TensorDictBase:
    return LazyStackedTensorDict(*rows, stack_dim=0)
