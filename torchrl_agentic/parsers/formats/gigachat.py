"""Parsers of GigaChat 3, 3.1 and 3.5."""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
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

    name: ClassVar[str] = "gigachat3"
    aliases = ("gigachat31",)
    models = "GigaChat 3, 3.1"
    example = '<|function_call|>{"name", "arguments"}'
    stop = ("</s>",)
    openers = ("<|function_call|>", _ROLE)
    turn_end = (_MESSAGE_END, "</s>")
    more_markers = (_ROLE_END,)
    shape = '<|function_call|>{"name": "tool name", "arguments": {"argument": "value"}}'

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether a marker opens a call; the name of the role must end with its token.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        return not reader.at(_ROLE, start) or reader.at(_ROLE_END, start + len(_ROLE) - len(_ROLE_END))
        yield

    def _handle_marker(self, reader: Reader, place: int, marker: str) -> Incremental[int]:
        """Handle a marker; the end of one message may begin the message of a call."""
        if marker == _MESSAGE_END:
            after = yield from reader.skip(place + len(marker))
            if (yield from reader.which((_ROLE,), after)) and (yield from self.opens(reader, after)):
                return (yield from self.attempt(reader, after))
        return (yield from super()._handle_marker(reader, place, marker))

    def write(self, call: ParsedCall) -> str:
        """Write a call as the model would."""
        return f"{self.openers[0]}{super().write(call)}"


class GigaChat35Parser(DeepSeekV4Parser):
    """The format of GigaChat 3.5: that of DeepSeek V4 with `GCML` instead of `DSML`.

        <｜GCML｜tool_calls>
        <｜GCML｜invoke name="f">
        <｜GCML｜parameter name="a" string="false">1</｜GCML｜parameter>
        </｜GCML｜invoke>
        </｜GCML｜tool_calls>

    Source: SGLang's detector.
    """

    name: ClassVar[str] = "gigachat35"
    models = "GigaChat 3.5"
    example = '<｜GCML｜tool_calls><｜GCML｜invoke name="f">…'
    stop = ("</s>",)
    section = ("<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>")
    openers = ("<｜GCML｜invoke",)
    closer = "</｜GCML｜invoke>"
    parameter, parameter_end = "<｜GCML｜parameter", "</｜GCML｜parameter>"
    around = (f"{section[0]}\n", "\n", f"\n{section[1]}")
    markup = "｜GCML｜"
    other_openers = ()
    more_markers = (parameter, parameter_end, markup)
    turn_end = (_MESSAGE_END, "</s>")
    result_tags = ("", "")
    shape = DeepSeekV4Parser.shape.replace("DSML", "GCML")

    def frame(self, name: str) -> None:
        """Return None: xgrammar has this style for DSML only."""
        del name
