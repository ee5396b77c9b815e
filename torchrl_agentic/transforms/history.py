"""The border to TorchRL's `History`: the one module that knows how conversations lie in a TensorDict.

A conversation is a `Conversation`, an immutable value; a batch of them is a lazy stack, of unequal length
("ragged"), nested once more for each further batch dimension.
"""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# The public methods of TensorDict would check each message again.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import tensordict
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torchrl.data.llm import History

from torchrl_agentic.messages import Message
from torchrl_agentic.trajectory.calls import without_eos
from torchrl_agentic.transforms.conversation import Conversation, message_of
from torchrl_agentic.transforms.value_stack import flattened, is_flat_stack, nested, unwrapped


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
