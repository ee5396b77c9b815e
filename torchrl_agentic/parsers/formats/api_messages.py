"""Parsers of messages of API servers: OpenAI's `message.tool_calls` and Anthropic's `tool_use` blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import ClassVar, cast

from torchrl_agentic.messages import (
    JSON,
    Content,
    ParsedCall,
    ParseResult,
    ToolResult,
    content_text,
    fields_of,
)
from torchrl_agentic.parsers.base import ToolCallParser, Tools, require_name
from torchrl_agentic.parsers.engine.decoded_calls import (
    OPENAI_SHAPE,
    find_id,
    find_message,
    find_name,
    read_message_calls,
)
from torchrl_agentic.parsers.engine.json_text import check_data, dumps, read_arguments, read_name
from torchrl_agentic.parsers.engine.partial_call import (
    CallParseError,
    PartialCall,
    assign_ids,
    call_error,
    over_limit_error,
)

logger = logging.getLogger(__name__)


@cache
def warn_of_harmony() -> None:
    """Log once that the text is GPT-OSS's own, which vLLM's parser "openai" reads but ours does not."""
    logger.warning(
        "parser 'openai' reads messages of an API, whose calls are apart from the text; this is text of "
        "GPT-OSS, which parser 'harmony' reads. vLLM calls that one 'openai'"
    )


class OpenAIToolCallParser(ToolCallParser):
    r"""Messages of OpenAI's chat completions and compatible servers.

        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}

    A message, a choice or a whole response is read; arguments may be JSON strings or objects, and calls flat
    `{"name", "arguments"}` as Qwen writes them. Text has no calls unless it is the JSON of a message or of
    calls. The parser that vLLM calls "openai" is `harmony` here; its text gets the note "harmony_text" and a
    warning in the log. Source: OpenAI's API reference of chat completions.
    """

    name = "openai"
    models = "messages of an API"
    example = "message.tool_calls"
    tool_names = "[a-zA-Z0-9_-]{1,64}"
    shape: ClassVar[str] = OPENAI_SHAPE

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message."""
        del tools
        message = find_message(response)
        text = content_text(cast("Content", message.get("content")))
        calls = assign_ids(read_message_calls(message, self.limits), turn)
        if not calls and "<|channel|>" in text:
            warn_of_harmony()
            return ParseResult(text, calls, response, notes=("harmony_text",))
        return ParseResult(text, calls, response)

    def render_call(self, call: ParsedCall) -> str:
        """Write a call as the JSON of an item of `tool_calls`.

        Raises:
            ValueError: If the name of the tool does not read back.
        """
        require_name(call)
        function = {"name": call.tool, "arguments": dumps(call.args)}
        return dumps({"id": call.call_id, "type": "function", "function": function})

    def render_calls(self, calls: Sequence[ParsedCall]) -> str:
        """Write calls as the JSON list `tool_calls`."""
        return f"[{', '.join(map(self.render_call, calls))}]"


class AnthropicToolUseParser(ToolCallParser):
    """Messages of Anthropic's API, whose calls are content blocks; one user message holds all results.

        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]}

    Source: Anthropic's API reference of messages.
    """

    name = "anthropic"
    models = "messages of an API"
    example = '{"type": "tool_use", "name", "input"}'
    tool_names = "[a-zA-Z0-9_-]{1,128}"
    shape: ClassVar[str] = '{"type": "tool_use", "id": "…", "name": "tool name", "input": {…}}'

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message: its blocks, or the JSON of a block or of a message."""
        del tools
        message = find_message(response)
        blocks = message.get("tool_calls") if isinstance(response, str) else None
        content = blocks or message.get("content")
        if fields_of(content) is not None:
            content = [content]
        if not isinstance(content, list):
            return ParseResult(content_text(cast("Content", content)), (), response)
        attempts: list[PartialCall] = []
        others: list[JSON] = []
        for block in cast("list[JSON]", content):
            fields = fields_of(block)
            if fields is not None and fields.get("type") == "tool_use":
                attempts.append(self._attempt(fields, len(attempts)))
            else:
                others.append(block)
        return ParseResult(content_text(others), assign_ids(attempts, turn), response)

    def _attempt(self, block: Mapping[str, JSON], index: int) -> PartialCall:
        if index >= self.limits.calls:
            return PartialCall(error=over_limit_error(index, self.limits.calls), call_id=find_id(block))
        try:
            name = read_name(block)
            args, notes = read_arguments(block.get("input"), self.limits)
            check_data(args, self.limits)
        except CallParseError as error:
            return PartialCall(
                find_name(block), error=call_error(index, error, "", self.shape), call_id=find_id(block)
            )
        return PartialCall(name, args, call_id=find_id(block), notes=notes)

    def render_call(self, call: ParsedCall) -> str:
        """Write a call as the JSON of a content block.

        Raises:
            ValueError: If the name of the tool does not read back.
        """
        require_name(call)
        return dumps({"type": "tool_use", "id": call.call_id, "name": call.tool, "input": call.args})

    def render_calls(self, calls: Sequence[ParsedCall]) -> str:
        """Write calls as the JSON list of their content blocks."""
        return f"[{', '.join(map(self.render_call, calls))}]"

    def render_result(self, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        """Write one result as a user message with one block."""
        block = {"type": "tool_result", "tool_use_id": call_id, "content": result.text}
        return {"role": "user", "content": [{**block, "is_error": True} if result.is_error else block]}

    def render(self, calls: Sequence[ParsedCall], results: Sequence[ToolResult]) -> list[Mapping[str, JSON]]:
        """Write all results of a turn as one user message; servers reject several."""
        blocks: list[JSON] = []
        for message in super().render(calls, results):
            blocks += message["content"]
        return [{"role": "user", "content": blocks}] if blocks else []
