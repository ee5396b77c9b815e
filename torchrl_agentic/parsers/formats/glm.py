"""Parser of GLM-4.5 to 4.7 and GLM-5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchrl_agentic.messages import JSON, ParsedCall
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.xml_params import ArgumentTags, Parameter, XMLFormat, XMLParamsParser


@dataclass(frozen=True)
class KeyTags(ArgumentTags):
    """The name of the tool after its opener, and one tag for the name of an argument, one for its value.

    Attributes:
        key_end: Tag after the name of an argument.
        value_begin: Tag before its value.
        separator: Tag after the name of the tool; "" if there is none.
        gap: White space that is written between the tags.
        type_tags: Tags around the type of an argument, which may precede its value; ("", "") if none.
    """

    key_end: str = "</arg_key>"
    value_begin: str = "<arg_value>"
    separator: str = ""
    gap: str = "\n"
    type_tags: tuple[str, str] = ("", "")

    @property
    def end_tags(self) -> tuple[str, ...]:
        """Return the tag after the name of an argument."""
        return (self.key_end,)

    def read_name(self, format: XMLFormat, reader: Reader, start: int) -> Incremental[tuple[str, int]]:
        """Read the name of the tool, up to the first argument or the closer."""
        begin = yield from reader.past_repeated(format.openers[0], start + len(format.openers[0]))
        markers = filter(
            None, (self.separator, format.parameter, format.closer, *format.openers, *format.turn_end)
        )
        end = yield from reader.find_first(tuple(markers), begin)
        if end[0] < 0:
            raise CallParseError("unclosed", f"the message ends before {format.closer}", begin)
        name = reader.text[begin : end[0]].strip()
        if "{" in name or name.startswith("<"):
            raise CallParseError(
                "wrong_dialect", "a call must begin with the name of the tool, then its arguments", begin
            )
        if "<" in name:
            at = reader.text.find("<", begin)
            following = self.separator or format.parameter
            raise CallParseError("extra_data", f"expecting {following} after the name", at)
        if end[1] in format.turn_end:
            raise CallParseError("unclosed", f"the turn ends before {format.closer}", end[0])
        if not name or len(name.split()) > 1:
            code = "missing_name" if name or end[1] == format.parameter else "empty"
            raise CallParseError(code, "the name of the tool is missing", begin)
        if end[1] in format.openers:
            raise CallParseError("unclosed", f"{format.closer} is missing", end[0])
        if self.separator and end[1] != self.separator:
            reader.note("missing_separator")
        return name, end[0] + (len(self.separator) if end[1] == self.separator else 0)

    def read_parameter(self, format: XMLFormat, reader: Reader, start: int) -> Incremental[Parameter]:
        """Read the name of an argument and the tag of its value."""
        begin = start + len(format.parameter)
        end = yield from self._within_call(format, reader, self.key_end, begin)
        value, is_string = yield from self._read_type(format, reader, end + len(self.key_end))
        value = yield from reader.skip(value)
        if value == len(reader.text):
            raise CallParseError("unclosed", f"the message ends before {self.value_begin}", value)
        if not (yield from reader.which((self.value_begin,), value)):
            raise CallParseError("extra_data", f"expecting {self.value_begin}", value)
        return Parameter(reader.text[begin:end].strip(), value + len(self.value_begin), is_string)

    def _read_type(self, format: XMLFormat, reader: Reader, at: int) -> Incremental[tuple[int, bool | None]]:
        """Read the type between name and value; return its end, and whether it is a string (None if unknown).

        `array[string]` and its like are not strings.
        """
        begin = yield from reader.skip(at)
        type_begin, type_end = self.type_tags
        if not type_begin or not (yield from reader.which((type_begin,), begin)):
            return at, None
        begin += len(type_begin)
        markers = (type_end, self.value_begin, format.closer, *format.openers, *format.turn_end)
        end, marker = yield from reader.find_first(markers, begin)
        if marker != type_end:
            raise CallParseError("unclosed", f"the type of an argument must end with {type_end}", begin)
        kind = reader.text[begin:end].strip().lower()
        return end + len(type_end), None if kind in ("", "any") else kind == "string"

    def _within_call(self, format: XMLFormat, reader: Reader, marker: str, at: int) -> Incremental[int]:
        markers = (marker, format.closer, *format.openers, *format.turn_end)
        found = yield from reader.find_first(markers, at)
        if found[1] != marker or not reader.text[at : found[0]].strip():
            broke = len(reader.text) if found[0] < 0 else found[0]
            code = "missing_name" if found[1] == marker else "unclosed"
            raise CallParseError(code, f"the name of an argument must end with {marker}", broke)
        tag = reader.text.find("<", at, found[0])
        if tag >= 0:
            raise CallParseError("unclosed", f"the name of an argument must end with {marker}", tag)
        return found[0]

    def write(self, format: XMLFormat, call: ParsedCall, raw: Callable[[str, JSON], str]) -> str:
        """Write a call.

        Raises:
            ValueError: If the format cannot express the call.
        """
        for name in (call.tool, *call.args):
            if name != name.strip() or not name or "<" in name or "{" in name:
                raise ValueError(f"the format cannot express the name {name!r}")
        values = "".join(
            f"{self.gap}{format.parameter}{name}{self.key_end}"
            f"{self.gap}{self.value_begin}{raw(name, value)}{format.parameter_end}"
            for name, value in call.args.items()
        )
        return f"{format.openers[0]}{call.tool}{self.separator}{values}{self.gap}{format.closer}"


class GLM45Parser(XMLParamsParser):
    """The format of GLM-4.5 to 4.7 and GLM-5, with or without newlines between the tags.

        <tool_call>f
        <arg_key>a</arg_key>
        <arg_value>1</arg_value>
        </tool_call>

    Source: the chat templates.
    """

    name = "glm45"
    aliases = ("glm", "glm47", "ling3", "spark25", "poolside_v1")
    models = "GLM-4.5 to 4.7, GLM-5, Ling 3, Spark 2.5, Laguna"
    example = "<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"
    format = XMLFormat(
        openers=("<tool_call>",),
        closer="</tool_call>",
        turn_end=("<|observation|>", "<|user|>", "<|endoftext|>"),
        result_tags=("<tool_response>", "</tool_response>"),
        parameter="<arg_key>",
        parameter_end="</arg_value>",
        style="glm_xml",
        tags=KeyTags(),
    )
