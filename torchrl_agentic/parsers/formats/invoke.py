"""Parsers of `<invoke name="f">` elements: MiniMax M2, and DeepSeek V3.2 to V4.1 ("DSML")."""

from __future__ import annotations

import html
import re
from typing import ClassVar

from torchrl_agentic.messages import JSON, ParsedCall
from torchrl_agentic.parsers.engine.json_text import read_arguments
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.xml_params import Parameter, XMLParamsParser

_TAG_END = re.compile(r"\s*+>")


class InvokeParser(XMLParamsParser):
    """A format of `invoke` and `parameter` elements with a `name` attribute.

        <invoke name="f"><parameter name="a">1</parameter></invoke>

    Attributes:
        attribute: Pattern of an attribute and its quoted value.
    """

    attribute: ClassVar[re.Pattern[str]] = re.compile(r'\s++(\w++)\s*+=\s*+("[^"<>]*+")')

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether the tag is in a section or begins a line; elsewhere it is prose about calls.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        return reader.in_section or reader.is_line_start(start)
        yield

    def read_name(self, reader: Reader, start: int) -> Incremental[tuple[str, int]]:
        """Read the name of the tool."""
        attributes, end = yield from self._tag(reader, start, self.openers[0])
        return attributes["name"], end

    def read_parameter(self, reader: Reader, start: int) -> Incremental[Parameter]:
        """Read the opening tag of an argument."""
        attributes, end = yield from self._tag(reader, start, self.parameter)
        return Parameter(attributes["name"], end, self.is_string(attributes))

    def is_string(self, attributes: dict[str, str]) -> bool | None:
        """Return whether the tag declares a string; None if it declares no type."""
        del attributes
        return None

    def _tag(self, reader: Reader, start: int, tag: str) -> Incremental[tuple[dict[str, str], int]]:
        begin = at = start + len(tag)
        closed = yield from reader.find(">", begin)
        attributes: dict[str, str] = {}
        while match := self.attribute.match(reader.text, at):
            attributes[match[1]] = html.unescape(match[2][1:-1]).strip()
            at = match.end()
        end = _TAG_END.match(reader.text, at)
        if end is None and closed < 0:
            raise CallParseError("unclosed", f"{tag} has no end", begin)
        if end is None or not attributes.get("name"):
            raise CallParseError("missing_name", f'{tag} has no name="…"', begin)
        return attributes, end.end()

    def _arguments(self, call: ParsedCall, after: str = "") -> str:
        """Write the arguments of a call, each followed by `after`."""
        end = f"{self.parameter_end}{after}"
        return "".join(
            f"{self._named(self.parameter, name, self.kind(value))}{self.raw(name, value)}{end}"
            for name, value in call.args.items()
        )

    def kind(self, value: JSON) -> str:
        """Return the attribute that declares a value's type, after a space; "" if there is none."""
        del value
        return ""

    def _named(self, tag: str, name: str, more: str = "") -> str:
        if not name.strip() or name != name.strip():
            raise ValueError(f"the format cannot express the name {name!r}")
        return f'{tag} name="{html.escape(name)}"{more}>'


class MiniMaxM2Parser(InvokeParser):
    """The format of MiniMax M2 and M2.5: any number of calls in one section.

        <minimax:tool_call>
        <invoke name="f">
        <parameter name="a">1</parameter>
        </invoke>
        </minimax:tool_call>

    Source: the chat template and the tool-calling guide of MiniMax M2.
    """

    name: ClassVar[str] = "minimax_m2"
    aliases = ("minimax", "minimax-m2")
    models = "MiniMax M2, M2.5"
    example = '<invoke name="f"><parameter name="k">v</parameter></invoke>'
    stop = ("[e~[",)
    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    openers = ("<invoke",)
    closer = "</invoke>"
    parameter, parameter_end = "<parameter", "</parameter>"
    around = (f"{section[0]}\n", "\n", f"\n{section[1]}")
    style = "minimax_xml"
    turn_end = ("[e~[",)
    result_tags = ("<response>", "</response>")
    shape = (
        '<minimax:tool_call>\n<invoke name="tool_name">\n<parameter name="argument">value</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    )

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it."""
        values = self._arguments(call, "\n")
        return f"{self._named(self.openers[0], call.tool)}\n{values}{self.closer}"


_DIALECTS = (
    "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜ calls>",
    "<｜DSML｜invoke", "<｜DSML｜ invoke",
)  # fmt: skip
"""The openers of sections and calls in V3.2, V4 and V4.1."""


def _dialects_but(*ours: str) -> tuple[str, ...]:
    """Return the openers of sections and calls in versions other than the one with these markers."""
    return tuple(marker for marker in _DIALECTS if marker not in ours)


class DeepSeekV32Parser(InvokeParser):
    """The format of DeepSeek V3.2 ("DSML"): any number of calls in one section.

        <｜DSML｜function_calls>
        <｜DSML｜invoke name="f">
        <｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
        </｜DSML｜invoke>
        </｜DSML｜function_calls>

    `string="false"` marks a value that is JSON. A call may hold one JSON object instead of parameters.
    `｜DSML｜` is a single token and never data. Calls of another version are read if only the section has
    another name, which is noted on the message; other differences are an error. Source: the encoding guide of
    DeepSeek V3.2.
    """

    name: ClassVar[str] = "deepseek_v32"
    aliases = ("deepseekv32",)
    models = "DeepSeek V3.2"
    example = '<｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">…'
    stop = ("<｜end▁of▁sentence｜>",)
    section = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    openers = ("<｜DSML｜invoke",)
    closer = "</｜DSML｜invoke>"
    parameter, parameter_end = "<｜DSML｜parameter", "</｜DSML｜parameter>"
    around = (f"{section[0]}\n", "\n", f"\n{section[1]}")
    markup = "｜DSML｜"
    other_openers = _dialects_but(*openers, *section)
    more_markers = (parameter, parameter_end, *other_openers, markup)
    style = "deepseek_xml"
    turn_end = ("<｜end▁of▁sentence｜>",)
    result_tags = ("<function_results>", "</function_results>")
    shape = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="tool_name">\n'
        '<｜DSML｜parameter name="argument" string="true">value</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    )

    def read_other_opener(self, reader: Reader, place: int, marker: str) -> Incremental[int]:
        """Read a call in another version's section; report that version's calls as errors.

        Args:
            reader: The message as read so far.
            place: Index of the opener.
            marker: The opener.
        """
        if marker[-1] != ">" and not reader.is_line_start(place):
            return place + len(marker)
        inside = yield from reader.skip(place + len(marker))
        if marker[-1] == ">" and (yield from reader.which(self.openers, inside)):
            reader.note("other_dialect")
            reader.opened_at = place
            return (yield from self.attempt(reader, inside))
        return (yield from self.attempt(reader, place, self._read_other))

    def _read_other(self, reader: Reader, start: int) -> Incremental[int]:
        """Raise the error for a call in the syntax of another version.

        Raises:
            CallParseError: Always.
        """
        marker = yield from reader.which(self.other_openers, start)
        closer = f"</{marker[1:].removesuffix('>')}>"
        error = CallParseError("wrong_dialect", "this is the syntax of another DeepSeek version", start)
        found = yield from reader.find(closer, start)
        error.end = len(reader.text) if found < 0 else found + len(closer)
        raise error

    def is_string(self, attributes: dict[str, str]) -> bool | None:
        """Return whether the tag declares a string."""
        told = attributes.get("string")
        return None if told not in ("true", "false") else told == "true"

    def json_body(self, reader: Reader, at: int) -> Incremental[tuple[PartialCall, int]]:
        """Read arguments written as one JSON object.

        Args:
            reader: The message as read so far.
            at: Index of the object.
        """
        value, end = yield from reader.json(at, (self.closer,))
        args, notes = read_arguments(value, self.limits)
        return PartialCall(args=args, notes=notes), (yield from self.past_closer(reader, end))

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it."""
        values = self._arguments(call, "\n")
        return f"{self._named(self.openers[0], call.tool)}\n{values}{self.closer}"

    def kind(self, value: JSON) -> str:
        """Return the attribute that declares a value a string or JSON."""
        return f' string="{"true" if isinstance(value, str) else "false"}"'


class DeepSeekV4Parser(DeepSeekV32Parser):
    """The format of DeepSeek V4: that of V3.2 in a section called `tool_calls`.

        <｜DSML｜tool_calls>
        <｜DSML｜invoke name="f">
        <｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
        </｜DSML｜invoke>
        </｜DSML｜tool_calls>

    Source: the encoding guide of DeepSeek V4.
    """

    name: ClassVar[str] = "deepseek_v4"
    aliases = ("deepseekv4",)
    models = "DeepSeek V4"
    example = '<｜DSML｜tool_calls><｜DSML｜invoke name="f">…'
    section = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
    around = (f"{section[0]}\n", "\n", f"\n{section[1]}")
    result_tags = ("<tool_result>", "</tool_result>")
    other_openers = _dialects_but(*DeepSeekV32Parser.openers, *section)
    more_markers = (
        DeepSeekV32Parser.parameter,
        DeepSeekV32Parser.parameter_end,
        *other_openers,
        DeepSeekV32Parser.markup,
    )
    shape = DeepSeekV32Parser.shape.replace("function_calls", "tool_calls")


class DeepSeekV41Parser(DeepSeekV4Parser):
    """The format of DeepSeek V4.1: that of V4 with a space before each name, in a section called `calls`.

        <｜DSML｜ calls>
        <｜DSML｜ invoke name="f">
        <｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>
        </｜DSML｜ invoke>
        </｜DSML｜ calls>

    Source: the encoding guide of DeepSeek V4.1.
    """

    name: ClassVar[str] = "deepseek_v41"
    aliases = ("deepseekv41",)
    models = "DeepSeek V4.1"
    example = '<｜DSML｜ calls><｜DSML｜ invoke name="f">…'
    section = ("<｜DSML｜ calls>", "</｜DSML｜ calls>")
    openers = ("<｜DSML｜ invoke",)
    closer = "</｜DSML｜ invoke>"
    parameter, parameter_end = "<｜DSML｜ parameter", "</｜DSML｜ parameter>"
    around = (f"{section[0]}\n", "\n", f"\n{section[1]}")
    style = "deepseek_v4_1_xml"
    other_openers = _dialects_but(*openers, *section)
    more_markers = (parameter, parameter_end, *other_openers, DeepSeekV32Parser.markup)
    shape = DeepSeekV4Parser.shape.replace("｜tool_calls", "｜calls").replace("｜DSML｜", "｜DSML｜ ")
