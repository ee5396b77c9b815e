"""Parsers of DeepSeek V3, R1-0528 and V3.1; V3.2 and later are in `invoke`."""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.json_text import dumps
from torchrl_agentic.parsers.engine.named_json import NamedJSONParser
from torchrl_agentic.parsers.engine.partial_call import CallParseError

_SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekV31Parser(NamedJSONParser):
    """The format of DeepSeek V3.1: any number of calls in one section.

        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>
        <｜tool▁calls▁end｜>

    (Without the line break.) Source: the chat template.
    """

    name: ClassVar[str] = "deepseek_v31"
    aliases = ("deepseekv31",)
    models = "DeepSeek V3.1"
    example = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>"
    stop = ("<｜end▁of▁sentence｜>",)
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    around = (section[0], "", section[1])
    openers = ("<｜tool▁call▁begin｜>",)
    closer = "<｜tool▁call▁end｜>"
    separator = _SEPARATOR
    turn_end = ("<｜end▁of▁sentence｜>",)
    result_tags = ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")
    shape = f'{section[0]}{openers[0]}tool name{_SEPARATOR}{{"argument": "value"}}{closer}{section[1]}'

    def header(self, text: str) -> tuple[str, str | None]:
        """Return the name of the tool."""
        if not text.strip():
            raise CallParseError("missing_name", "the call has no name")
        return text.strip(), None

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it."""
        return f"{self.openers[0]}{call.tool}{self.separator}{dumps(call.args)}{self.closer}"


class DeepSeekV3Parser(DeepSeekV31Parser):
    """The format of DeepSeek V3 and R1-0528: a type before the name, and JSON in a Markdown fence.

        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
        ```json
        {"a": 1}
        ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    Source: the chat templates.
    """

    name: ClassVar[str] = "deepseek_v3"
    aliases = ("deepseekv3",)
    models = "DeepSeek V3, R1-0528"
    example = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f, then JSON in a fence"
    separator = "```json"
    json_end = "```"
    around = (DeepSeekV31Parser.section[0], "\n", DeepSeekV31Parser.section[1])
    result_tags = ("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>")
    shape = (
        f"{DeepSeekV31Parser.section[0]}{DeepSeekV31Parser.openers[0]}function{_SEPARATOR}tool name\n"
        f'```json\n{{"argument": "value"}}\n```{DeepSeekV31Parser.closer}{DeepSeekV31Parser.section[1]}'
    )

    def header(self, text: str) -> tuple[str, str | None]:
        """Return the name of the tool, after the type."""
        _, separator, name = text.partition(_SEPARATOR)
        if not separator or not name.strip():
            raise CallParseError(
                "missing_name", f"the name must be between {_SEPARATOR} and {self.separator}"
            )
        return name.strip(), None

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it."""
        body = f"```json\n{dumps(call.args)}\n```"
        return f"{self.openers[0]}function{_SEPARATOR}{call.tool}\n{body}{self.closer}"
