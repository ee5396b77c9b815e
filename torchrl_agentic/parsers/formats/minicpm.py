"""Parser of MiniCPM5."""

from __future__ import annotations

import html
import re

from torchrl_agentic.messages import JSON, Fields
from torchrl_agentic.parsers.engine.json_text import dumps
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.scan import find_invented_turn
from torchrl_agentic.parsers.engine.value_tags import ValueTags
from torchrl_agentic.parsers.engine.xml_params import Parameter, XMLFormat, XMLParamsParser
from torchrl_agentic.parsers.formats.invoke import AttributeTags
from torchrl_agentic.text import one_line

_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_SPLIT = f"{_CDATA_END}{_CDATA}"
_ATTRIBUTE = re.compile(r"""\s*+(\w++)\s*+=\s*+("[^"<>]*+"|'[^'<>]*+')""")
_ENTITY = re.compile("&(?:amp|lt|gt|quot|apos|#[0-9]{1,7}|#x[0-9a-fA-F]{1,6});")


class MiniCPM5Parser(XMLParamsParser):
    """The format of MiniCPM5: `function` and `param` elements.

        <function name="f"><param name="a">1</param><param name="code"><![CDATA[a < b]]></param></function>

    A value may be a CDATA block; XML entities count outside of it. The chat template writes values other than
    strings in Python's syntax, so `True` and `{'a': 1}` are read if the tool's schema asks for such a value.
    Source: the chat template.
    """

    name = "minicpm5"
    aliases = ("minicpm5xml",)
    models = "MiniCPM5"
    example = '<function name="f"><param name="k">v</param></function>'
    format = XMLFormat(
        openers=("<function",),
        closer="</function>",
        turn_end=("<|im_end|>",),
        result_tags=("<tool_response>", "</tool_response>"),
        parameter="<param",
        parameter_end="</param>",
        tags=AttributeTags(_ATTRIBUTE, gap=""),
    )

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether it is a tag with a name, unlike `<functional>`."""
        after = yield from reader.skip(start + len(self.format.openers[0]))
        return (yield from reader.which(("name",), after)) != ""

    def _value_end(
        self, reader: Reader, parameter: Parameter, schema: Fields | None, known: dict[str, JSON]
    ) -> Incremental[tuple[int, int, bool]]:
        """Return the end of a value; that of a CDATA block is the `]]>` before the end of the parameter."""
        format = self.format
        begin = yield from reader.skip(parameter.value_at)
        if not (yield from reader.which((_CDATA,), begin)):
            return (yield from super()._value_end(reader, parameter, schema, known))
        stop = end = begin
        is_closed = False
        tags = ValueTags(parameter.name, begin, format.end_tags)
        while not is_closed:
            end = yield from reader.find(_CDATA_END, end)
            if end < 0:
                rest = len(reader.text)  # calls inside the block do not count
                raise CallParseError("unclosed", f"its CDATA block has no {_CDATA_END}", begin, end=rest)
            end += len(_CDATA_END)
            stop = yield from reader.skip(end)
            is_closed = bool((yield from reader.which((format.parameter_end,), stop)))
            if not is_closed and (yield from tags.is_damaged_at(reader, stop, format.parameter_end)):
                reason = (
                    f"{one_line(parameter.name, 40)} has no {format.parameter_end}: its end tag is damaged"
                )
                raise CallParseError("unclosed", reason, stop)
        # A block that was cut off must not extend to the end of a later one.
        later = yield from find_invented_turn(format, reader, begin, end)
        later = (yield from self._next_call(reader, begin, end)) if later < 0 else later
        if later >= 0 and reader.text.find(_CDATA, later, end) >= 0:
            raise CallParseError("unclosed", f"its CDATA block has no {_CDATA_END}", later)
        return stop, (yield from reader.skip(stop + len(format.parameter_end))), True

    def _value(self, text: str, parameter: Parameter, schema: Fields | None) -> tuple[JSON, tuple[str, ...]]:
        block = text.strip()
        if block.startswith(_CDATA):
            text = block[len(_CDATA) : -len(_CDATA_END)].replace(_SPLIT, "")
        else:
            text = _ENTITY.sub(_character, text)
        return super()._value(text, parameter, schema)

    def raw(self, name: str, value: JSON) -> str:
        """Write the value of an argument, in a CDATA block where the chat template uses one.

        Args:
            name: Name of the argument.
            value: Its value.

        Raises:
            ValueError: If it would be read as something else.
        """
        text = value if isinstance(value, str) else dumps(value)
        if any(character in text for character in "<&\n"):
            text = (
                f"{_CDATA}{text.replace(_CDATA_END, f'{_CDATA_END[:2]}{_SPLIT}{_CDATA_END[2:]}')}{_CDATA_END}"
            )
        if not self.reads_back(name, text):
            raise ValueError(f"the value of {name!r} contains a call, and the format has no escapes for it")
        return text


def _character(entity: re.Match[str]) -> str:
    return html.unescape(entity[0])
