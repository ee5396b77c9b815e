"""Parsers of DeepSeek V3, R1-0528 and V3.1; V3.2 and later are in `invoke`."""

from __future__ import annotations

from dataclasses import replace

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.json_text import dumps
from torchrl_agentic.parsers.engine.named_json import NamedJSONFormat, NamedJSONParser
from torchrl_agentic.parsers.engine.partial_call import CallParseError

_SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekV31Parser(NamedJSONParser):
    """The format of DeepSeek V3.1: any number of calls in one section.

        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>
        <｜tool▁calls▁end｜>

    (Without the line break.) Source: the chat template.
    """

    name = "deepseek_v31"
    aliases = ("deepseekv31",)
    models = "DeepSeek V3.1"
    example = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>"
    format = NamedJSONFormat(
        openers=("<｜tool▁call▁begin｜>",),
        closer="<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        around=("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
        turn_end=("<｜end▁of▁sentence｜>",),
        result_tags=("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        separator=_SEPARATOR,
    )

    def header(self, text: str) -> tuple[str, str | None]:
        """Return the name of the tool."""
        if not text.strip():
            raise CallParseError("missing_name", "the call has no name")
        return text.strip(), None

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it."""
        format = self.format
        return f"{format.openers[0]}{call.tool}{format.separator}{dumps(call.args)}{format.closer}"


class DeepSeekV3Parser(NamedJSONParser):
    """The format of DeepSeek V3 and R1-0528: a type before the name, and JSON in a Markdown fence.

        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
        ```json
        {"a": 1}
        ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    Source: the chat templates.
    """

    name = "deepseek_v3"
    aliases = ("deepseekv3",)
    models = "DeepSeek V3, R1-0528"
    example = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f, then JSON in a fence"
    format = replace(
        DeepSeekV31Parser.format,
        around=("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
        result_tags=("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        separator="```json",
        json_end="```",
    )

    def header(self, text: str) -> tuple[str, str | None]:
        """Return the name of the tool, after the type."""
        _, separator, name = text.partition(_SEPARATOR)
        if not separator or not name.strip():
            raise CallParseError(
                "missing_name", f"the name must be between {_SEPARATOR} and {self.format.separator}"
            )
        return name.strip(), None

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it."""
        body = f"```json\n{dumps(call.args)}\n```"
        return f"{self.format.openers[0]}function{_SEPARATOR}{call.tool}\n{body}{self.format.closer}"
