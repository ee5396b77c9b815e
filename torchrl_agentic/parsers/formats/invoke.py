"""Parsers of `<invoke name="f">` elements: MiniMax M2, and DeepSeek V3.2 to V4.1 ("DSML")."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from torchrl_agentic.messages import JSON, ParsedCall
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.xml_params import ArgumentTags, Parameter, XMLFormat, XMLParamsParser

_TAG_END = re.compile(r"\s*+>")


@dataclass(frozen=True)
class AttributeTags(ArgumentTags):
    """Elements for calls and arguments with a `name` attribute.

        <invoke name="f"><parameter name="a">1</parameter></invoke>

    Attributes:
        attribute: Pattern of an attribute and its quoted value.
        is_typed: Whether the tag of an argument has an attribute `string`, "true" or "false".
        gap: White space that is written between the tags.
    """

    attribute: re.Pattern[str] = re.compile(r'\s++(\w++)\s*+=\s*+("[^"<>]*+")')
    is_typed: bool = False
    gap: str = "\n"

    def read_name(self, format: XMLFormat, reader: Reader, start: int) -> Incremental[tuple[str, int]]:
        """Read the name of the tool."""
        attributes, end = yield from self.read_tag(reader, start, format.openers[0])
        return attributes["name"], end

    def read_parameter(self, format: XMLFormat, reader: Reader, start: int) -> Incremental[Parameter]:
        """Read the opening tag of an argument."""
        attributes, end = yield from self.read_tag(reader, start, format.parameter)
        told = attributes.get("string") if self.is_typed else None
        return Parameter(attributes["name"], end, told == "true" if told in ("true", "false") else None)

    def read_tag(self, reader: Reader, start: int, tag: str) -> Incremental[tuple[dict[str, str], int]]:
        """Read the attributes of a tag; return them and the index after it.

        Args:
            reader: The message as read so far.
            start: Index of the tag.
            tag: The beginning of the tag.

        Raises:
            CallParseError: If it is not closed or has no name.
        """
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

    def write(self, format: XMLFormat, call: ParsedCall, raw: Callable[[str, JSON], str]) -> str:
        """Write a call without the section around it."""
        end = f"{format.parameter_end}{self.gap}"
        values = "".join(
            f"{named_tag(format.parameter, name, self._kind(value))}{raw(name, value)}{end}"
            for name, value in call.args.items()
        )
        return f"{named_tag(format.openers[0], call.tool)}{self.gap}{values}{format.closer}"

    def _kind(self, value: JSON) -> str:
        """Return the attribute that declares a value a string or JSON, after a space."""
        return f' string="{"true" if isinstance(value, str) else "false"}"' if self.is_typed else ""


EITHER_QUOTES = re.compile(r"""\s++(\w++)\s*+=\s*+("[^"<>]*+"|'[^'<>]*+')""")
"""Pattern of an attribute whose value has either kind of quotes."""


def named_tag(tag: str, name: str, more: str = "") -> str:
    """Write an opening tag.

    Args:
        tag: The beginning of the tag.
        name: Its attribute `name`.
        more: Further attributes, after a space.

    Raises:
        ValueError: If the name does not read back.
    """
    if not name.strip() or name != name.strip():
        raise ValueError(f"the format cannot express the name {name!r}")
    return f'{tag} name="{html.escape(name)}"{more}>'


class MiniMaxM2Parser(XMLParamsParser):
    """The format of MiniMax M2 and M2.5: any number of calls in one section.

        <minimax:tool_call>
        <invoke name="f">
        <parameter name="a">1</parameter>
        </invoke>
        </minimax:tool_call>

    Source: the chat template and the tool-calling guide of MiniMax M2.
    """

    name = "minimax_m2"
    aliases = ("minimax", "minimax-m2")
    models = "MiniMax M2, M2.5"
    example = '<invoke name="f"><parameter name="k">v</parameter></invoke>'
    format = XMLFormat(
        openers=("<invoke",),
        closer="</invoke>",
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        around=("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"),
        turn_end=("[e~[",),
        result_tags=("<response>", "</response>"),
        parameter="<parameter",
        parameter_end="</parameter>",
        style="minimax_xml",
        tags=AttributeTags(),
        needs_line=True,
    )


class DeepSeekV32Parser(XMLParamsParser):
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

    name = "deepseek_v32"
    aliases = ("deepseekv32",)
    models = "DeepSeek V3.2"
    example = '<｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">…'
    format = XMLFormat(
        openers=("<｜DSML｜invoke",),
        closer="</｜DSML｜invoke>",
        section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        around=("<｜DSML｜function_calls>\n", "\n", "\n</｜DSML｜function_calls>"),
        turn_end=("<｜end▁of▁sentence｜>",),
        result_tags=("<function_results>", "</function_results>"),
        other_openers=("<｜DSML｜tool_calls>", "<｜DSML｜ calls>", "<｜DSML｜ invoke"),
        parameter="<｜DSML｜parameter",
        parameter_end="</｜DSML｜parameter>",
        markup="｜DSML｜",
        style="deepseek_xml",
        tags=AttributeTags(is_typed=True),
        needs_line=True,
        json_bodies=True,
        other_dialect="another DeepSeek version",
    )


class DeepSeekV4Parser(XMLParamsParser):
    """The format of DeepSeek V4: that of V3.2 in a section called `tool_calls`.

        <｜DSML｜tool_calls>
        <｜DSML｜invoke name="f">
        <｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
        </｜DSML｜invoke>
        </｜DSML｜tool_calls>

    Source: the encoding guide of DeepSeek V4.
    """

    name = "deepseek_v4"
    aliases = ("deepseekv4",)
    models = "DeepSeek V4"
    example = '<｜DSML｜tool_calls><｜DSML｜invoke name="f">…'
    format = replace(
        DeepSeekV32Parser.format,
        section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        around=("<｜DSML｜tool_calls>\n", "\n", "\n</｜DSML｜tool_calls>"),
        result_tags=("<tool_result>", "</tool_result>"),
        other_openers=("<｜DSML｜function_calls>", "<｜DSML｜ calls>", "<｜DSML｜ invoke"),
    )


class DeepSeekV41Parser(XMLParamsParser):
    """The format of DeepSeek V4.1: that of V4 with a space before each name, in a section called `calls`.

        <｜DSML｜ calls>
        <｜DSML｜ invoke name="f">
        <｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>
        </｜DSML｜ invoke>
        </｜DSML｜ calls>

    Source: the encoding guide of DeepSeek V4.1.
    """

    name = "deepseek_v41"
    aliases = ("deepseekv41",)
    models = "DeepSeek V4.1"
    example = '<｜DSML｜ calls><｜DSML｜ invoke name="f">…'
    format = replace(
        DeepSeekV32Parser.format,
        openers=("<｜DSML｜ invoke",),
        closer="</｜DSML｜ invoke>",
        section=("<｜DSML｜ calls>", "</｜DSML｜ calls>"),
        around=("<｜DSML｜ calls>\n", "\n", "\n</｜DSML｜ calls>"),
        result_tags=("<tool_result>", "</tool_result>"),
        other_openers=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜invoke"),
        parameter="<｜DSML｜ parameter",
        parameter_end="</｜DSML｜ parameter>",
        style="deepseek_v4_1_xml",
    )
