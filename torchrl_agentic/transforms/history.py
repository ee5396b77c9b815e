"""The border to TorchRL's `History`: the one module that knows how conversations lie in a TensorDict.

A message is a TensorDict of NonTensorData; a conversation is a lazy stack of messages; a batch is a lazy
stack of conversations, of unequal length ("ragged"), nested once more for each further batch dimension.
"""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# The public methods of TensorDict would check each message again.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import tensordict
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torchrl.data.llm import History

from torchrl_agentic.messages import Content, Message

Conversation = TensorDictBase
"""A stack of messages, [L]."""

_ABSENT = object()


class AgentHistory(History):
    """A `History` whose messages know which call they answer, and whose rows may differ in length.

    tool_call_id: the id of the call that a tool's message answers; None for all others.
    """

    tool_call_id: str | None = None

    @classmethod
    def of(cls, rows: Sequence[Any], shape: Sequence[int] | None = None) -> AgentHistory:
        """Return the history of a batch of conversations.

        Args:
            rows: Conversations of the flattened batch.
            shape: Batch size, or None for [len(rows)].
        """
        return cls.around(_nest(list(rows), list(shape) if shape else [len(rows)]))

    @classmethod
    def around(cls, td: TensorDictBase) -> AgentHistory:
        """Return a history around a stack of messages, without reading them.

        `_from_tensordict` would ask every message of the batch for its keys: 1.9 ms for 64 × 43 of them.
        """
        history = cls.__new__(cls)
        absent = dict.fromkeys(("tool_calls", "tool_responses", "tool_call_id"))
        history.__dict__.update(_tensordict=td, _non_tensordict=absent, _is_initialized=True)
        return history

    def extend(self, history: History, *, inplace: bool = True, dim: int = 0) -> History:
        """Append another history; along the messages of a batch row by row, whatever the lengths.

        Args:
            history: History to append.
            inplace: Whether this history changes; else a new one is returned.
            dim: Dimension along which it is appended.
        """
        if self.ndim < 2 or dim not in (-1, self.ndim - 1):
            return super().extend(history, inplace=inplace, dim=dim)
        shape = self.batch_size[:-1]
        more = conversations(history, self.ndim - 1)
        rows = zip(conversations(self, self.ndim - 1), more, strict=True)
        joined = AgentHistory.of([extended(row, messages(new)) for row, new in rows], shape)
        if not inplace:
            return joined
        self.__dict__["_tensordict"] = inner(joined)
        return self


def require_list_to_stack() -> None:
    """Set TensorDict's `list_to_stack`, which `History` requires."""
    if not tensordict.list_to_stack():
        tensordict.set_list_to_stack(True).set()


def inner(history: Any) -> TensorDictBase:
    """Return the TensorDict behind a history, because a TensorClass costs many times more to index."""
    return history._tensordict


def conversations(history: History, batch_dims: int = 1) -> list[Conversation]:
    """Return the conversations of a flattened batch.

    Args:
        history: Batch of conversations.
        batch_dims: Number of batch dimensions.
    """
    level = [inner(history)]
    for _ in range(batch_dims):
        level = [below for item in level for below in _items(item)]
    return level


def prompts(td: TensorDictBase, part: str = "prompt") -> list[Conversation]:
    """Return the conversations under ("history", part) of a flattened batch, without reading messages.

    Attributes are avoided, because they ask every message for its keys.

    Args:
        td: The batch, [*B].
        part: "prompt", "response" or "full".
    """
    if _is_flat_stack(td):
        return [inner(inner(row.get("history")).get(part)) for row in td.tensordicts]
    chat = inner(td.get("history"))
    if _is_flat_stack(chat):
        return [inner(row.get(part)) for row in chat.tensordicts]
    return conversations(chat.get(part), td.batch_dims)


def set_prompts(td: TensorDictBase, rows: Sequence[Conversation]) -> None:
    """Write conversations under ("history", "prompt"); they may differ in length.

    Args:
        td: The batch, [*B].
        rows: One conversation per row of the flattened batch.
    """
    if _is_flat_stack(td):
        for row, conversation in zip(td.tensordicts, rows, strict=True):
            inner(row.get("history")).set("prompt", AgentHistory.around(conversation))
        return
    history = td.get("history")
    # Checked, each message of the batch would be asked for its device.
    inner(history)._set_str(
        "prompt", AgentHistory.of(rows, td.batch_size), validated=True, inplace=False, non_blocking=False
    )
    td.set("history", history)


def messages(conversation: Conversation) -> list[TensorDictBase]:
    """Return the messages of a conversation."""
    return list(_items(conversation))


def length(conversation: Conversation) -> int:
    """Count the messages of a conversation."""
    return conversation.batch_size[0]


def conversation(of: Sequence[TensorDictBase]) -> Conversation:
    """Return a conversation made of messages."""
    return LazyStackedTensorDict(*of, stack_dim=0)


def extended(conversation: Conversation, new: Sequence[TensorDictBase]) -> Conversation:
    """Return a conversation with messages appended, on its device; the old one stays as it is.

    Args:
        conversation: The conversation, [L].
        new: Messages to append.
    """
    known = _items(conversation)
    device = known[0].device if known else None
    added = new if device is None else [message.to(device) for message in new]
    if not (known and _is_flat_stack(conversation)):
        return LazyStackedTensorDict(*known, *added, stack_dim=0)
    return _stacked([*known, *added])


def read_message(td: TensorDictBase) -> Message:
    """Read a message, in whichever of the forms that TorchRL gives its fields."""
    calls = _field(td, "tool_calls")
    call_id = _field(td, "tool_call_id")
    return Message(
        str(_field(td, "role")),
        _field(td, "content"),
        tuple(calls) if isinstance(calls, list) else (),
        call_id if isinstance(call_id, str) else None,
        _field(td, "is_complete") is not False,
    )


def message_dict(td: TensorDictBase) -> dict[str, Any]:
    """Return a message in the form that chat templates take."""
    made: dict[str, Any] = {"role": str(_field(td, "role")), "content": _field(td, "content")}
    for name in ("name", "tool_call_id", "tool_calls"):
        value = _field(td, name)
        if isinstance(value, str | list) and value:
            made[name] = value
    return made


def write_message(message: Mapping[str, Any]) -> TensorDictBase:
    """Return a message made of a mapping with role, content, and other keys that the model family needs."""
    fields: dict[str, Any] = {"is_complete": _constant(True)}
    for key, value in message.items():
        fields[key] = _constant(value) if key == "role" else _plain(value)
    return TensorDict._new_unsafe(source=fields, batch_size=_SCALAR)


def with_content(td: TensorDictBase, content: Content) -> TensorDictBase:
    """Return a copy of a message with another content.

    Args:
        td: The message.
        content: The new content.
    """
    changed = td.copy()
    changed.set("content", _plain(content))
    return changed


def as_history(chats: Sequence[Sequence[Mapping[str, Any]]]) -> AgentHistory:
    """Return a batch of conversations made of lists of message dicts, for a reset."""
    require_list_to_stack()
    return AgentHistory.of([conversation([write_message(message) for message in chat]) for chat in chats])


def _plain(value: Any) -> NonTensorData:
    """Return NonTensorData in 0.4 µs instead of 7; messages consist of it."""
    made = NonTensorData.__new__(NonTensorData)
    fields = {"data": value, "_is_non_tensor": True, "_metadata": None}
    made.__dict__.update(_tensordict=_EMPTY, _non_tensordict=fields, _is_initialized=True)
    return made


_SCALAR = torch.Size(())
_EMPTY = TensorDict({})


@functools.cache
def _constant(value: Any) -> NonTensorData:
    """Return NonTensorData that all messages share: roles and flags are half the cost of a message."""
    return NonTensorData(value)


def leaves(td: TensorDictBase) -> tuple[LazyStackedTensorDict, list[TensorDictBase]]:
    """Return a batch as a lazy stack, and its rows, flat.

    Entries that are set in a row are set in the stack.
    """
    stack = td if isinstance(td, LazyStackedTensorDict) and td.stack_dim == 0 else td.to_lazystack(0)
    if stack.batch_dims == 1:
        return stack, stack.tensordicts
    parts = [leaves(part) for part in stack.tensordicts]
    nested = LazyStackedTensorDict(*(part for part, _ in parts), stack_dim=0)
    return nested, [row for _, rows in parts for row in rows]


def _is_flat_stack(td: Any) -> TypeGuard[LazyStackedTensorDict]:
    return isinstance(td, LazyStackedTensorDict) and td.batch_dims == 1


def _items(td: TensorDictBase) -> Sequence[TensorDictBase]:
    if isinstance(td, LazyStackedTensorDict) and td.stack_dim == 0:
        return td.tensordicts
    try:
        return td.unbind(0)
    except AttributeError as error:
        raise RuntimeError(
            "this history is not a stack of messages any more: torchrl.envs.utils.step_mdp splits ragged "
            "histories. Use env.step_mdp(td), or let a rollout or a collector do it"
        ) from error


def _stacked(items: Sequence[TensorDictBase]) -> TensorDictBase:
    """Stack items that are known to fit: all messages, or all stacks of messages, on one device.

    `LazyStackedTensorDict` would ask each item, and those all their messages, for batch size and device.
    """
    made = LazyStackedTensorDict(items[0], stack_dim=0)
    made.tensordicts = list(items)
    inside = items[0].batch_size
    if inside and any(item.batch_size != inside for item in items):
        inside = torch.Size((-1,))
    made._batch_size = torch.Size((len(items), *inside))
    return made


def _nest(rows: list[Any], shape: list[int]) -> TensorDictBase:
    if len(shape) == 1:
        alike = all(map(_is_flat_stack, rows))
        return _stacked(rows) if alike and rows else LazyStackedTensorDict(*rows, stack_dim=0)
    size = len(rows) // shape[0]
    parts = [_nest(rows[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]
    return LazyStackedTensorDict(*parts, stack_dim=0)


def _field(td: TensorDictBase, name: str) -> Any:
    value = td._get_str(name, _ABSENT) if type(td) is TensorDict else td.get(name, _ABSENT)
    if value is _ABSENT or value is None:
        return None
    if type(value) is NonTensorData:
        held, data = inner(value), value.__dict__["_non_tensordict"].get("data", _ABSENT)
        # The attribute costs ten times as much, and is needed only where the value lies in shared memory.
        return value.data if data is _ABSENT or held.is_shared() or held.is_memmap() else data
    # A list given to `History` becomes a stack, an empty one an empty tensor.
    return value.tolist() if isinstance(value, torch.Tensor) or hasattr(value, "tolist") else value
