"""Parser of PLaMo 3."""

from __future__ import annotations

import re

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.json_text import dumps
from torchrl_agentic.parsers.engine.named_json import NamedJSONFormat, NamedJSONParser
from torchrl_agentic.parsers.engine.partial_call import CallParseError

_NAME, _NAME_END = "<|plamo:begin_tool_name:plamo|>", "<|plamo:end_tool_name:plamo|>"
_ARGUMENTS, _JSON = "<|plamo:begin_tool_arguments:plamo|>", "<|plamo:constrain|>json"
_HEADER = re.compile(
    rf"\s*+{re.escape(_NAME)}([^<>]*+){re.escape(_NAME_END)}\s*+"
    rf"{re.escape(_ARGUMENTS)}\s*+(?:{re.escape(_JSON)})?+\s*+"
)


class Plamo3Parser(NamedJSONParser):
    """The format of PLaMo 3: the tool's name and JSON arguments, each between tags.

        <|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>
        <|plamo:begin_tool_name:plamo|>f<|plamo:end_tool_name:plamo|>
        <|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{"a": 1}
        <|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>

    (Without the line breaks.) One `tool_request` is one call; all of them are in one `tool_requests`. Source:
    vLLM's parser and its structural tag.
    """

    name = "plamo3"
    aliases = ("plamo",)
    models = "PLaMo 3"
    example = "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>f…"
    format = NamedJSONFormat(
        openers=("<|plamo:begin_tool_request:plamo|>",),
        closer="<|plamo:end_tool_request:plamo|>",
        section=("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
        around=("<|plamo:begin_tool_requests:plamo|>", "", "<|plamo:end_tool_requests:plamo|>"),
        think=("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
        turn_end=("<|plamo:tag|>",),
        separator="<|plamo:msg|>",
        json_end="<|plamo:end_tool_arguments:plamo|>",
    )

    def header(self, text: str) -> tuple[str, str | None]:
        """Read the name of the tool and the tags up to the JSON."""
        match = _HEADER.fullmatch(text)
        if match is None or not match[1].strip():
            raise CallParseError(
                "missing_name", f"the name must be between {_NAME} and {_NAME_END}, then {_ARGUMENTS}"
            )
        return match[1].strip(), None

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it.

        Raises:
            ValueError: If the format cannot express the name of the tool.
        """
        format = self.format
        if not call.tool.strip() or call.tool != call.tool.strip() or "<" in call.tool or ">" in call.tool:
            raise ValueError(f"the format cannot express the name {call.tool!r}")
        name = f"{_NAME}{call.tool}{_NAME_END}"
        arguments = f"{_ARGUMENTS}{_JSON}{format.separator}{dumps(call.args)}{format.json_end}"
        return f"{format.openers[0]}{name}{arguments}{format.closer}"
