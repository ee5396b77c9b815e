"""Read calls that are already decoded: those of API servers, and of histories with separate calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torchrl_agentic.messages import JSON, Fields, fields_of
from torchrl_agentic.parsers.base import LIMITS, Limits
from torchrl_agentic.parsers.engine.json_text import check_data, decode, read_call, skip_whitespace, text_of
from torchrl_agentic.parsers.engine.partial_call import (
    CallParseError,
    PartialCall,
    call_error,
    over_limit_error,
)

OPENAI_SHAPE = '{"type": "function", "function": {"name": "tool name", "arguments": "{…}"}}'
_USUAL = ("openai_shape", "string_args")
"""Notes that are no deviations in a list of calls."""


def read_calls(
    items: Sequence[JSON],
    shape: str,
    notes: tuple[str, ...] = (),
    limits: Limits = LIMITS,
    first: int = 0,
    *,
    is_checked: bool = True,
) -> list[PartialCall]:
    """Read decoded calls, each `{"name", "arguments"}` or in OpenAI's shape; report malformed ones.

    Args:
        items: The decoded calls.
        shape: A correct call, for error messages.
        notes: Notes for each call.
        limits: Bounds on the message.
        first: Index of the first item among the calls of the message.
        is_checked: Whether each call is known to be within the limits, as calls read from text are.
    """
    attempts: list[PartialCall] = []
    for index, item in enumerate(items, first):
        if index >= limits.calls:
            attempts.append(PartialCall(error=over_limit_error(index, limits.calls), call_id=find_id(item)))
            continue
        try:
            attempt = read_call(item, limits=limits)
            if not is_checked:
                check_data(attempt.args, limits)
            if attempt.notes:
                attempt.notes = tuple(note for note in attempt.notes if note not in _USUAL)
            attempt.notes += notes
            attempts.append(attempt)
        except CallParseError as error:
            attempts.append(
                PartialCall(
                    find_name(item),
                    error=call_error(index, error, "", shape),
                    call_id=find_id(item),
                    notes=notes,
                )
            )
    return attempts


def find_id(item: JSON) -> str | None:
    """Return the id of a malformed call, or None; servers refuse histories with calls that have no answer."""
    fields = fields_of(item)
    return text_of(fields.get("id")) if fields is not None else None


def find_name(item: JSON) -> str:
    """Return the tool's name of a malformed call, or ""."""
    fields = fields_of(item)
    if fields is None:
        return ""
    name = (fields_of(fields.get("function")) or fields).get("name")
    return name if isinstance(name, str) else ""


def read_message_calls(message: Mapping[str, JSON], limits: Limits = LIMITS) -> list[PartialCall]:
    """Read the calls of a message mapping: "tool_calls", or the older "function_call".

    Args:
        message: The message.
        limits: Bounds on the message.
    """
    calls = message.get("tool_calls") or message.get("function_call")
    if not calls:
        return []
    items = cast("Sequence[JSON]", calls) if isinstance(calls, list | tuple) else [calls]
    return read_calls(items, OPENAI_SHAPE, limits=limits, is_checked=False)


def find_message(response: str | Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return the message of a server's response, a mapping or the JSON of a message or of calls."""
    if isinstance(response, str):
        start = skip_whitespace(response, 0)
        if response[start : start + 1] not in ("{", "["):
            return {"content": response}
        try:
            value, end = decode(response, start)
        except CallParseError:
            return {"content": response}
        if skip_whitespace(response, end) != len(response):
            return {"content": response}
        items = cast("list[JSON]", value) if isinstance(value, list) else [value]
        if _are_calls(items):
            return {"content": None, "tool_calls": items}
        fields = fields_of(value)
        if fields is None or not fields.keys() & {"content", "tool_calls", "choices"}:
            return {"content": response}
        response = fields
    choices = response.get("choices")
    if isinstance(choices, list) and choices:
        response = fields_of(next(iter(cast("list[JSON]", choices)))) or response
    return fields_of(response.get("message")) or response


def _are_calls(items: Sequence[JSON]) -> bool:
    """Return whether all items are calls: objects with a function or a name."""
    found = [fields_of(item) for item in items]
    return bool(found) and all(fields is not None and _is_call(fields) for fields in found)


def _is_call(fields: Fields) -> bool:
    return fields.get("type") == "tool_use" or "function" in fields or fields.keys() >= {"name", "arguments"}
