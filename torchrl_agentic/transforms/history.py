"""The border to TorchRL's `History`: the one module that knows how conversations lie in a TensorDict.

A message is a TensorDict of NonTensorData; a conversation is a lazy stack of messages; a batch is a lazy stack of
conversations, of unequal length ("ragged"), nested once more for each further batch dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import tensordict
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from torchrl_agentic.messages import Message

Conversation = TensorDictBase
"""A stack of messages, [L]."""

_ABSENT = object()


class AgentHistory(History):
    """A `History` whose messages know which call they answer, and that can be extended where rows differ in length.

    tool_call_id: the id of the call that a tool's message answers; None for all others.
    """

    tool_call_id: str | None = None

    @classmethod
    def of(cls, rows: Sequence[Any], shape: Sequence[int] | None = None) -> AgentHistory:
        """Make the history of a batch of conversations, flat; `shape` is the batch's, None for a flat one."""
        return cls._from_tensordict(_nest(list(rows), list(shape) if shape else [len(rows)]))

    def extend(self, history: History, *, inplace: bool = True, dim: int = 0) -> History:
        """Extend along `dim`; along the messages of a batch, row by row, whatever the lengths."""
        if self.ndim < 2 or dim not in (-1, self.ndim - 1):
            return super().extend(history, inplace=inplace, dim=dim)
        shape = self._tensordict.batch_size[:-1]
        more = conversations(history, self.ndim - 1)
        rows = zip(conversations(self, self.ndim - 1), more, strict=True)
        joined = AgentHistory.of([extended(row, messages(new)) for row, new in rows], shape)
        if not inplace:
            return joined
        self.__dict__["_tensordict"] = joined._tensordict
        return self


def require_list_to_stack() -> None:
    """Let lists become stacks, which `History` cannot do without."""
    if not tensordict.list_to_stack():
        tensordict.set_list_to_stack(True).set()


def conversations(history: History, batch_dims: int = 1) -> list[Conversation]:
    """Give the conversations of a batch, flat."""
    level = [history._tensordict]
    for _ in range(batch_dims):
        level = [below for item in level for below in _items(item)]
    return level


def prompts(td: TensorDictBase) -> list[Conversation]:
    """Give the conversations under ("history", "prompt") of a TensorDict, flat, without touching their messages."""
    if isinstance(td, LazyStackedTensorDict) and td.batch_dims == 1:
        return [cast("ChatHistory", row.get("history")).prompt._tensordict for row in td.tensordicts]
    return conversations(td.get("history").prompt, td.batch_dims)


def set_prompts(td: TensorDictBase, rows: Sequence[Conversation]) -> None:
    """Put conversations under ("history", "prompt"), ragged as they are."""
    if isinstance(td, LazyStackedTensorDict) and td.batch_dims == 1:
        for row, conversation in zip(td.tensordicts, rows, strict=True):
            row.get("history").prompt = AgentHistory._from_tensordict(conversation)
        return
    history = td.get("history")
    history.prompt = AgentHistory.of(rows, td.batch_size)
    td.set("history", history)


def messages(conversation: Conversation) -> list[TensorDictBase]:
    """Give the messages of a conversation."""
    return list(_items(conversation))


def length(conversation: Conversation) -> int:
    """Count the messages of a conversation."""
    return conversation.batch_size[0]


def conversation(of: Sequence[TensorDictBase]) -> Conversation:
    """Make a conversation of messages."""
    return LazyStackedTensorDict(*of, stack_dim=0)


def extended(conversation: Conversation, new: Sequence[TensorDictBase]) -> Conversation:
    """Give a conversation with messages added; the old one stays as it is."""
    return LazyStackedTensorDict(*_items(conversation), *new, stack_dim=0)


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


def write_message(message: Mapping[str, Any]) -> TensorDictBase:
    """Make a message of a mapping with role, content and whatever else the family needs."""
    return TensorDict(
        {"is_complete": _constant(True)}
        | {key: _constant(value) if key == "role" else NonTensorData(value) for key, value in message.items()}
    )


def with_content(td: TensorDictBase, content: str) -> TensorDictBase:
    """Give a message with another content; the old one stays as it is."""
    changed = td.copy()
    changed.set("content", NonTensorData(content))
    return changed


def as_history(chats: Sequence[Sequence[Mapping[str, Any]]]) -> AgentHistory:
    """Make a batch of conversations of lists of message dicts, for a reset."""
    require_list_to_stack()
    return AgentHistory.of([conversation([write_message(message) for message in chat]) for chat in chats])


@functools.cache
def _constant(value: Any) -> NonTensorData:
    """Roles and flags are shared by all messages: they are half of what a message costs."""
    return NonTensorData(value)


def _items(td: TensorDictBase) -> Sequence[TensorDictBase]:
    if isinstance(td, LazyStackedTensorDict) and td.stack_dim == 0:
        return td.tensordicts
    return td.unbind(0)


def _nest(rows: list[Any], shape: list[int]) -> TensorDictBase:
    if len(shape) == 1:
        return LazyStackedTensorDict(*rows, stack_dim=0)
    size = len(rows) // shape[0]
    parts = [_nest(rows[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]
    return LazyStackedTensorDict(*parts, stack_dim=0)


def _field(td: TensorDictBase, name: str) -> Any:
    value = td.get(name, _ABSENT)
    if value is _ABSENT or value is None:
        return None
    if isinstance(value, NonTensorData):
        return value.data
    # A list given to `History` becomes a stack, an empty one an empty tensor.
    return value.tolist() if isinstance(value, torch.Tensor) or hasattr(value, "tolist") else value
