"""Calls that come as data: the messages of API servers, and chat histories that keep calls apart from the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, cast

from torchrl_agentic.messages import JSON, Content, ParsedCall, ParseResult, ToolResult, content_text
from torchrl_agentic.parsers.base import (
    MAX_CALLS,
    Attempt,
    ToolCallParser,
    Unreadable,
    explain,
    number,
    over_limit,
)
from torchrl_agentic.parsers.jsontext import decode, dumps, read_arguments, read_call, skip_whitespace


def attempts_of(items: Sequence[JSON], shape: str, notes: tuple[str, ...] = ()) -> list[Attempt]:
    """Read a list of calls, each `{"name", "arguments"}` or OpenAI's; an unreadable one becomes an error entry."""
    attempts: list[Attempt] = []
    for index, item in enumerate(items):
        if index >= MAX_CALLS:
            attempts.append(Attempt(error=over_limit(index), call_id=_own_id(item)))
            continue
        try:
            attempt = read_call(item)
            notes_of = tuple(note for note in attempt.notes if note not in ("openai_shape", "string_args"))
            attempts.append(replace(attempt, notes=(*notes_of, *notes)))
        except Unreadable as error:
            attempts.append(
                Attempt(
                    _own_name(item),
                    error=explain(index, error, "", shape),
                    call_id=_own_id(item),
                    notes=notes,
                )
            )
    return attempts


def _own_id(item: JSON) -> str | None:
    """The id of an unreadable call: servers refuse a history in which a call with an id has no answer."""
    value = cast("Mapping[str, JSON]", item).get("id") if isinstance(item, Mapping) else None
    return value if isinstance(value, str) and value else None


def _own_name(item: JSON) -> str:
    if not isinstance(item, Mapping):
        return ""
    fields = cast("Mapping[str, JSON]", item)
    inner = fields.get("function")
    name = (cast("Mapping[str, JSON]", inner) if isinstance(inner, Mapping) else fields).get("name")
    return name if isinstance(name, str) else ""


def structured_attempts(message: Mapping[str, JSON]) -> list[Attempt]:
    """Read the calls that a message keeps apart from its text: "tool_calls", or the older "function_call"."""
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str) and len(calls):
        return attempts_of(cast("Sequence[JSON]", calls), OpenAIToolCallParser.shape)
    single = message.get("function_call")
    return attempts_of([single], OpenAIToolCallParser.shape) if single else []


def _message(response: str | Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Find the message in a server's response; text that is the JSON of a message or of calls counts as such."""
    if isinstance(response, str):
        start = skip_whitespace(response, 0)
        if response[start : start + 1] not in ("{", "["):
            return {"content": response}
        try:
            value, end = decode(response, start)
        except Unreadable:
            return {"content": response}
        if skip_whitespace(response, end) != len(response):
            return {"content": response}
        if isinstance(value, list):
            return {"content": None, "tool_calls": value} if _are_calls(value) else {"content": response}
        fields = cast("Mapping[str, JSON]", value)
        if _are_calls([fields]):
            return {"content": None, "tool_calls": [fields]}
        if not fields.keys() & {"content", "tool_calls", "choices"}:
            return {"content": response}
        response = fields
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        response = cast("Mapping[str, JSON]", choices[0])
    inner = response.get("message")
    return cast("Mapping[str, JSON]", inner) if isinstance(inner, Mapping) else response


def _are_calls(items: Sequence[JSON]) -> bool:
    """Whether JSON that stands alone is meant as calls: all objects, each with a function or a tool's name."""
    return bool(items) and all(
        isinstance(item, Mapping)
        and ("function" in item or item.get("type") == "tool_use" or {"name", "arguments"} <= item.keys())
        for item in items
    )


class OpenAIToolCallParser(ToolCallParser):
    """`message.tool_calls` as OpenAI's chat completions and the servers after them have it.

    Takes the message, the choice or the whole response, arguments as JSON strings or objects, and Qwen's flat
    `{"name", "arguments"}`. Text alone has no calls, unless it is the JSON of a message or of calls.
    """

    name: ClassVar[str] = "openai"
    shape: ClassVar[str] = '{"type": "function", "function": {"name": "tool name", "arguments": "{…}"}}'

    def parse(self, response: str | Mapping[str, JSON], *, turn: int = 0) -> ParseResult:
        """Read one assistant message."""
        message = _message(response)
        text = content_text(cast("Content", message.get("content")))
        return ParseResult(text, number(structured_attempts(message), turn), response)

    def render_call(self, call: ParsedCall) -> str:
        """Write a call as an item of `tool_calls`, in JSON."""
        function = {"name": call.tool, "arguments": dumps(call.args)}
        return dumps({"id": call.call_id, "type": "function", "function": function})


class AnthropicToolUseParser(ToolCallParser):
    """`tool_use` content blocks as Anthropic's messages have them; all results go into one user message."""

    name: ClassVar[str] = "anthropic"
    shape: ClassVar[str] = '{"type": "tool_use", "id": "…", "name": "tool name", "input": {…}}'

    def parse(self, response: str | Mapping[str, JSON], *, turn: int = 0) -> ParseResult:
        """Read one assistant message: its blocks, or the JSON of a block or of a message."""
        message = _message(response)
        blocks = message.get("tool_calls") if isinstance(response, str) else None
        content = blocks or message.get("content")
        if not isinstance(content, list):
            return ParseResult(content_text(cast("Content", content)), (), response)
        attempts: list[Attempt] = []
        others: list[JSON] = []
        for block in cast("list[JSON]", content):
            if isinstance(block, Mapping) and cast("Mapping[str, JSON]", block).get("type") == "tool_use":
                attempts.append(self._attempt(cast("Mapping[str, JSON]", block), len(attempts)))
            else:
                others.append(block)
        return ParseResult(content_text(others), number(attempts, turn), response)

    def _attempt(self, block: Mapping[str, JSON], index: int) -> Attempt:
        if index >= MAX_CALLS:
            return Attempt(error=over_limit(index), call_id=_own_id(block))
        try:
            name = block.get("name")
            if not isinstance(name, str) or not name.strip():
                raise Unreadable("missing_name", 'the call has no "name"')
            args, notes = read_arguments(block.get("input"))
        except Unreadable as error:
            return Attempt(
                _own_name(block), error=explain(index, error, "", self.shape), call_id=_own_id(block)
            )
        return Attempt(name.strip(), args, call_id=_own_id(block), notes=notes)

    def render_call(self, call: ParsedCall) -> str:
        """Write a call as a content block, in JSON."""
        return dumps({"type": "tool_use", "id": call.call_id, "name": call.tool, "input": call.args})

    def render_result(self, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        """Write one result as a user message of one block."""
        block = {"type": "tool_result", "tool_use_id": call_id, "content": result.text}
        return {"role": "user", "content": [{**block, "is_error": True} if result.is_error else block]}

    def render(self, calls: Sequence[ParsedCall], results: Sequence[ToolResult]) -> list[Mapping[str, JSON]]:
        """Write all results of a turn as one user message; servers refuse them in several."""
        blocks: list[JSON] = []
        for message in super().render(calls, results):
            blocks += message["content"]
        return [{"role": "user", "content": blocks}] if blocks else []
