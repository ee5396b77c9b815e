"""`StoredMessage`: a message of a live conversation, as an immutable mapping of its fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from torchrl_agentic.messages import Message
from torchrl_agentic.text import MAX_DEPTH

COMPLETE = "is_complete"
"""Field of a message that was cut off: False. Absent from all others."""


class StoredMessage(Mapping[str, Any]):
    """A message of a conversation: an immutable mapping of its fields.

    Lists and dicts are copied when the message is made, and again when a field is read, so that nobody
    changes the message through them.

    Args:
        fields: "role", "content", and other fields that the model family needs.

    Attributes:
        shown: Slot in which the TensorDict border keeps the message in its own form, or None.
    """

    __slots__ = ("_fields", "shown")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = {key: copied(value) for key, value in fields.items()}
        self.shown: Any = None

    @classmethod
    def of(cls, message: Message) -> StoredMessage:
        """Return a message of the model, with the fields that its history keeps."""
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            fields["tool_calls"] = list(message.tool_calls)
        if not message.is_complete:
            fields[COMPLETE] = False
        for name, value in (("reasoning_content", message.reasoning), ("refusal", message.refusal)):
            if value:
                fields[name] = value
        return cls(fields)

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

    @property
    def is_shareable(self) -> bool:
        """True if no field is a list or dict, so that readers may share what they make of it."""
        return not any(isinstance(value, list | dict) for value in self._fields.values())

    def field(self, key: str) -> Any:
        """Return a field without copying it; the caller must not change it.

        Args:
            key: Name of the field. "is_complete" is true if the message does not say.
        """
        return self._fields.get(key, True) if key == COMPLETE else self._fields[key]

    def read(self) -> Message:
        """Return the message as a `Message`."""
        fields = self._fields
        calls, call_id = fields.get("tool_calls"), fields.get("tool_call_id")
        return Message(
            str(fields.get("role")),
            copied(fields.get("content")),
            tuple(copied(cast("list[Any]", calls))) if isinstance(calls, list) else (),
            call_id if isinstance(call_id, str) else None,
            fields.get(COMPLETE) is not False,
            reasoning=_text(fields.get("reasoning_content")),
            refusal=_text(fields.get("refusal")),
        )

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates take."""
        fields = self._fields
        made: dict[str, Any] = {"role": str(fields.get("role")), "content": copied(fields.get("content"))}
        for name in ("name", "tool_call_id", "tool_calls", "reasoning_content"):
            value = fields.get(name)
            if isinstance(value, str | list) and value:
                made[name] = copied(cast("Any", value))
        return made

    def keep(self, names: Callable[[str], bool]) -> StoredMessage:
        """Return a message with some of the fields.

        Args:
            names: Called with the name of a field; returns whether it stays.
        """
        return StoredMessage({key: value for key, value in self._fields.items() if names(key)})


def copied(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Copy the lists and dicts of a JSON value; other objects, such as images, are shared.

    Args:
        value: Any value.
        depth: Number of levels that are copied; what is nested deeper is shared.
    """
    if not depth:
        return value
    if isinstance(value, dict):
        return {key: copied(item, depth - 1) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [copied(item, depth - 1) for item in cast("list[Any]", value)]
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
