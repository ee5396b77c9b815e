"""Parser of TorchRL's own JSON messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

from torchrl_agentic.messages import JSON, ParsedCall, ParseResult, ToolResult, fields_of
from torchrl_agentic.parsers.base import ToolCallParser, Tools, message_text, require_name
from torchrl_agentic.parsers.engine.json_text import (
    check_data,
    dumps,
    read_arguments,
    read_name,
    skip_whitespace,
    text_of,
)
from torchrl_agentic.parsers.engine.partial_call import (
    CallParseError,
    PartialCall,
    assign_ids,
    call_error,
    over_limit_error,
)
from torchrl_agentic.parsers.engine.reader import Reader, finish

_FENCES = ("```json", "```")


class JSONToolCallParser(ToolCallParser):
    """TorchRL's own JSON: the whole message is one object, bare or in a code fence.

        {"message": "text", "tools": [{"tool": "f", "args": {"a": 1}, "id": "c1"}]}

    Any other text has no calls; malformed JSON that begins with "{" and contains "tools" is one error entry.
    Source: `JSONToolCallParser` of TorchRL.
    """

    name = "json"
    aliases = ("json_block",)
    models = "TorchRL's own"
    example = '{"message", "tools": […]}'
    shape: ClassVar[str] = (
        '{"message": "text", "tools": [{"tool": "tool name", "args": {"argument": "value"}}]}'
    )

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message."""
        del tools
        text = message_text(response)
        if not isinstance(response, str) and "tools" in response:
            return self._result(response, response, "", turn)
        start = skip_whitespace(text, 0)
        fence = next((fence for fence in _FENCES if text.startswith(fence, start)), "")
        start = skip_whitespace(text, start + len(fence))
        if not text.startswith("{", start):
            return ParseResult(text, (), response)
        try:
            value, end = finish(Reader(text, limits=self.limits).json(start))
        except CallParseError as error:
            if '"tools"' not in text:
                return ParseResult(text, (), response)
            attempt = PartialCall(error=call_error(0, error, text, self.shape), span=(0, len(text)))
            return ParseResult("", assign_ids([attempt], turn), response)
        fields = cast("Mapping[str, JSON]", value)
        if "tools" not in fields:
            return ParseResult(text, (), response)
        rest = text[end:].strip()
        return self._result(fields, response, rest.removesuffix("```").rstrip() if fence else rest, turn)

    def _result(
        self, fields: Mapping[str, JSON], raw: str | Mapping[str, JSON], rest: str, turn: int
    ) -> ParseResult:
        message = fields.get("message")
        text = message if isinstance(message, str) else "" if message is None else dumps(message)
        tools = fields.get("tools")
        items = cast("list[JSON]", tools) if isinstance(tools, list) else [tools] if tools else []
        attempts = [self._attempt(item, index) for index, item in enumerate(items)]
        if rest.startswith("{") and '"tools"' in rest:
            error = CallParseError("extra_data", "a second JSON object follows; put all calls into one")
            attempts.append(PartialCall(error=call_error(len(attempts), error, "", self.shape)))
        return ParseResult(f"{text}\n{rest}" if rest else text, assign_ids(attempts, turn), raw)

    def _attempt(self, item: JSON, index: int) -> PartialCall:
        if index >= self.limits.calls:
            return PartialCall(error=over_limit_error(index, self.limits.calls))
        fields = fields_of(item) or {}
        tag = text_of(fields.get("tag"))
        call_id = text_of(fields.get("id")) or tag
        try:
            name = read_name(fields, "tool")
            args, notes = read_arguments(fields.get("args"), self.limits)
            check_data(args, self.limits)
        except CallParseError as error:
            return PartialCall(error=call_error(index, error, "", self.shape), call_id=call_id, tag=tag)
        return PartialCall(name, args, call_id=call_id, tag=tag, notes=notes)

    def render_call(self, call: ParsedCall) -> str:
        """Write a whole message with one call.

        Raises:
            ValueError: If the name of the tool does not read back.
        """
        return self.render_calls([call])

    def render_calls(self, calls: Sequence[ParsedCall]) -> str:
        """Write a whole message with these calls.

        Raises:
            ValueError: If the name of a tool does not read back.
        """
        for call in calls:
            require_name(call)
        return dumps({"message": "", "tools": list(map(_written, calls))})

    def render_result(self, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        """Write one result as a JSON object."""
        content = dumps({"id": call_id, "is_error": result.is_error, "output": result.text})
        return {"role": "tool", "content": content, "tool_call_id": call_id}


def _written(call: ParsedCall) -> Mapping[str, JSON]:
    tag = {"tag": call.tag} if call.tag else {}
    return {"tool": call.tool, "args": call.args, "id": call.call_id, **tag}
