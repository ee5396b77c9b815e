"""Parsers of GigaChat 3, 3.1 and 3.5."""

from __future__ import annotations

from dataclasses import replace

from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.xml_params import XMLParamsParser
from torchrl_agentic.parsers.formats.invoke import DeepSeekV4Parser

_MESSAGE_END, _ROLE_END = "<|message_sep|>", "<|role_sep|>"
_ROLE = f"function call{_ROLE_END}"


class GigaChat3Parser(JSONBlockParser):
    """The format of GigaChat 3.1: JSON after a marker.

        <|function_call|>{"name": "f", "arguments": {"a": 1}}

    GigaChat 3 writes the JSON in a message of its own, which begins with `<|message_sep|>`, two newlines and
    `function call<|role_sep|>`; this is read too and stays in the text. Elsewhere `<|message_sep|>` ends the
    turn. Source: the chat templates of both.
    """

    name = "gigachat3"
    aliases = ("gigachat31",)
    models = "GigaChat 3, 3.1"
    example = '<|function_call|>{"name", "arguments"}'
    stop = ("</s>",)
    format = JSONFormat(
        openers=("<|function_call|>", _ROLE),
        turn_end=("<|message_sep|>", "</s>"),
        more_markers=("<|role_sep|>",),
        written=("<|function_call|>", ""),
        continued=("<|message_sep|>", "function call<|role_sep|>"),
    )

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether a marker opens a call; the name of the role must end with its token.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        return not reader.at(_ROLE, start) or reader.at(_ROLE_END, start + len(_ROLE) - len(_ROLE_END))
        yield


class GigaChat35Parser(XMLParamsParser):
    """The format of GigaChat 3.5: that of DeepSeek V4 with `GCML` instead of `DSML`.

        <｜GCML｜tool_calls>
        <｜GCML｜invoke name="f">
        <｜GCML｜parameter name="a" string="false">1</｜GCML｜parameter>
        </｜GCML｜invoke>
        </｜GCML｜tool_calls>

    Source: SGLang's detector.
    """

    name = "gigachat35"
    models = "GigaChat 3.5"
    example = '<｜GCML｜tool_calls><｜GCML｜invoke name="f">…'
    stop = ("</s>",)
    format = replace(
        DeepSeekV4Parser.format,
        openers=("<｜GCML｜invoke",),
        closer="</｜GCML｜invoke>",
        section=("<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>"),
        around=("<｜GCML｜tool_calls>\n", "\n", "\n</｜GCML｜tool_calls>"),
        turn_end=("<|message_sep|>", "</s>"),
        parameter="<｜GCML｜parameter",
        parameter_end="</｜GCML｜parameter>",
        markup="｜GCML｜",
        result_tags=("", ""),
        other_openers=(),
        style="",
        other_dialect="",
    )
