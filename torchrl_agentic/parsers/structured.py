"""Calls that come as data: messages of API servers, and histories that keep calls apart from the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

from torchrl_agentic.messages import (
    JSON,
    Content,
    Fields,
    ParsedCall,
    ParseResult,
    ToolResult,
    content_text,
    fields_of,
)
from torchrl_agentic.parsers.attempts import Attempt, Unreadable, explain, number, over_limit
from torchrl_agentic.parsers.base import LIMITS, Limits, ToolCallParser, Tools
from torchrl_agentic.parsers.jsontext import (
    check_data,
    decode,
    dumps,
    read_arguments,
    read_call,
    read_name,
    skip_whitespace,
    text_of,
)


def attempts_of(
    items: Sequence[JSON],
    shape: str,
    notes: tuple[str, ...] = (),
    limits: Limits = LIMITS,
    first: int = 0,
    *,
    is_checked: bool = True,
) -> list[Attempt]:
    """Read a list of calls, each `{"name", "arguments"}` or OpenAI's; unreadable ones become error entries.

    first: the index that the first of them has in its message. is_checked: whether each is known to be within
    the limits, as what was read from text is.
    """
    attempts: list[Attempt] = []
    for index, item in enumerate(items, first):
        if index >= limits.calls:
            attempts.append(Attempt(error=over_limit(index, limits.calls), call_id=_own_id(item)))
            continue
        try:
            attempt = read_call(item, limits=limits)
            if not is_checked:
                check_data(attempt.args, limits)
            usual = ("openai_shape", "string_args")  # here they are no liberty
            attempt.notes = (*(note for note in attempt.notes if note not in usual), *notes)
            attempts.append(attempt)
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
    fields = fields_of(item)
    return text_of(fields.get("id")) if fields is not None else None


def _own_name(item: JSON) -> str:
    fields = fields_of(item)
    if fields is None:
        return ""
    name = (fields_of(fields.get("function")) or fields).get("name")
    return name if isinstance(name, str) else ""


def structured_attempts(message: Mapping[str, JSON], limits: Limits = LIMITS) -> list[Attempt]:
    """Read the calls that a message keeps apart from its text: "tool_calls", or the older "function_call"."""
    calls = message.get("tool_calls") or message.get("function_call")
    if not calls:
        return []
    items = cast("Sequence[JSON]", calls) if isinstance(calls, list | tuple) else [calls]
    return attempts_of(items, OpenAIToolCallParser.shape, limits=limits, is_checked=False)


def _message(response: str | Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Find the message in a server's response; text that is the JSON of a message or of calls is one too."""
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
    """Whether JSON that stands alone is meant as calls: objects, each with a function or a tool's name."""
    found = [fields_of(item) for item in items]
    return bool(found) and all(fields is not None and _is_call(fields) for fields in found)


def _is_call(fields: Fields) -> bool:
    return fields.get("type") == "tool_use" or "function" in fields or fields.keys() >= {"name", "arguments"}


class OpenAIToolCallParser(ToolCallParser):
    """`message.tool_calls` as OpenAI's chat completions and the servers after them have it.

    Takes the message, the choice or the whole response, arguments as JSON strings or objects, and Qwen's flat
    `{"name", "arguments"}`. Text alone has no calls, unless it is the JSON of a message or of calls.
    """

    name: ClassVar[str] = "openai"
    shape: ClassVar[str] = '{"type": "function", "function": {"name": "tool name", "arguments": "{…}"}}'

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message."""
        del tools
        message = _message(response)
        text = content_text(cast("Content", message.get("content")))
        return ParseResult(text, number(structured_attempts(message, self.limits), turn), response)

    def render_call(self, call: ParsedCall) -> str:
        """Write a call as an item of `tool_calls`, in JSON."""
        function = {"name": call.tool, "arguments": dumps(call.args)}
        return dumps({"id": call.call_id, "type": "function", "function": function})

    def render_calls(self, calls: Sequence[ParsedCall]) -> str:
        """Write calls as the JSON list `tool_calls`."""
        return f"[{', '.join(map(self.render_call, calls))}]"


class AnthropicToolUseParser(ToolCallParser):
    """`tool_use` content blocks as Anthropic's messages have them; all results go into one user message."""

    name: ClassVar[str] = "anthropic"
    shape: ClassVar[str] = '{"type": "tool_use", "id": "…", "name": "tool name", "input": {…}}'

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message: its blocks, or the JSON of a block or of a message."""
        del tools
        message = _message(response)
        blocks = message.get("tool_calls") if isinstance(response, str) else None
        content = blocks or message.get("content")
        if fields_of(content) is not None:
            content = [content]
        if not isinstance(content, list):
            return ParseResult(content_text(cast("Content", content)), (), response)
        attempts: list[Attempt] = []
        others: list[JSON] = []
        for block in cast("list[JSON]", content):
            fields = fields_of(block)
            if fields is not None and fields.get("type") == "tool_use":
                attempts.append(self._attempt(fields, len(attempts)))
            else:
                others.append(block)
        return ParseResult(content_text(others), number(attempts, turn), response)

    def _attempt(self, block: Mapping[str, JSON], index: int) -> Attempt:
        if index >= self.limits.calls:
            return Attempt(error=over_limit(index, self.limits.calls), call_id=_own_id(block))
        try:
            name = read_name(block)
            args, notes = read_arguments(block.get("input"), self.limits)
            check_data(args, self.limits)
        except Unreadable as error:
            return Attempt(
                _own_name(block), error=explain(index, error, "", self.shape), call_id=_own_id(block)
            )
        return Attempt(name, args, call_id=_own_id(block), notes=notes)

    def render_call(self, call: ParsedCall) -> str:
        """Write a call as a content block, in JSON."""
        return dumps({"type": "tool_use", "id": call.call_id, "name": call.tool, "input": call.args})

    def render_calls(self, calls: Sequence[ParsedCall]) -> str:
        """Write calls as the JSON list of their content blocks."""
        return f"[{', '.join(map(self.render_call, calls))}]"

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
