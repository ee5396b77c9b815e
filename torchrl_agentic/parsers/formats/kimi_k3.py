"""Parser of Kimi K3, whose elements are made of three control tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchrl_agentic.messages import JSON, Fields, ParsedCall
from torchrl_agentic.parsers.engine.json_text import check_size, read_arguments
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.structural_tag import Frame
from torchrl_agentic.parsers.engine.typed_values import kinds_of
from torchrl_agentic.parsers.engine.xml_params import ArgumentTags, Parameter, XMLFormat, XMLParamsParser

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_ATTRIBUTE = re.compile(r'\s++(\w++)="([^"]*+)"')
_BLANKS = re.compile(r"\s*+")
_JSON, _JSON_END = f"{_OPEN}json", f"{_CLOSE}json{_SEP}"


class ElementTags(ArgumentTags):
    """Elements with attributes, made of control tokens."""

    def read_name(self, format: XMLFormat, reader: Reader, start: int) -> Incremental[tuple[str, int]]:
        """Read the name of the tool."""
        attributes, end = yield from self._tag(reader, start, format.openers[0], "tool")
        return attributes["tool"], end

    def read_parameter(self, format: XMLFormat, reader: Reader, start: int) -> Incremental[Parameter]:
        """Read the opening tag of an argument."""
        attributes, end = yield from self._tag(reader, start, format.parameter, "key")
        kind = attributes.get("type")
        return Parameter(attributes["key"], end, None if kind is None else kind == "string")

    def _tag(
        self, reader: Reader, start: int, tag: str, name: str
    ) -> Incremental[tuple[dict[str, str], int]]:
        begin = at = start + len(tag)
        closed = yield from reader.find(_SEP, begin)
        if closed < 0:
            raise CallParseError("unclosed", f"{tag} has no {_SEP}", begin)
        attributes: dict[str, str] = {}
        while match := _ATTRIBUTE.match(reader.text, at, closed):
            attributes[match[1]] = match[2].replace("&quot;", '"').replace("&amp;", "&")
            at = match.end()
        if not attributes.get(name, "").strip():
            raise CallParseError("missing_name", f'{tag} has no {name}="…"', begin)
        if not _BLANKS.fullmatch(reader.text, at, closed):
            raise CallParseError("extra_data", f"expecting {_SEP}", at)
        return attributes, closed + len(_SEP)

    def write(self, format: XMLFormat, call: ParsedCall, raw: Callable[[str, JSON], str]) -> str:
        """Write a call without the channel around it.

        Raises:
            ValueError: If the format cannot express a name or a value.
        """
        values = "".join(
            f"{format.parameter}{_attributes(key=name, type=_kind(value))}"
            f"{raw(name, value)}{format.parameter_end}"
            for name, value in call.args.items()
        )
        header = _attributes(tool=call.tool, index=str(call.index + 1))
        return f"{format.openers[0]}{header}{values}{format.closer}"


class KimiK3Parser(XMLParamsParser):
    """The format of Kimi K3: any number of calls in a channel called `tools`.

        <|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>
        <|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>
        <|close|>call<|sep|><|close|>tools<|sep|>

    (Without the line breaks.) Each argument declares its type: strings have no escapes, other values are
    JSON. A call may contain one element with a JSON object instead. The tags of the channel `response` stay
    in the text. Source: the chat template.
    """

    name = "kimi_k3"
    aliases = ("kimi-k3", "kimik3")
    models = "Kimi K3"
    example = '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="string"<|sep|>…'
    format = XMLFormat(
        openers=("<|open|>call",),
        closer="<|close|>call<|sep|>",
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        around=("<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>"),
        think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        turn_end=("<|end_of_msg|>",),
        result_tags=('<|open|>message role="tool"', "<|close|>message<|sep|>"),
        more_markers=("<|open|>", "<|close|>", "<|sep|>", "<|open|>argument", "<|close|>argument<|sep|>"),
        parameter="<|open|>argument",
        parameter_end="<|close|>argument<|sep|>",
        tags=ElementTags(),
    )

    def _read_arguments(
        self, reader: Reader, at: int, schema: Fields | None
    ) -> Incremental[tuple[PartialCall, int]]:
        body = yield from reader.skip(at)
        if not (yield from reader.which((_JSON,), body)):
            return (yield from super()._read_arguments(reader, at, schema))
        begin = yield from reader.find(_SEP, body)
        if begin < 0:
            raise CallParseError("unclosed", f"{_JSON} has no {_SEP}", body)
        begin = yield from reader.skip(begin + len(_SEP))
        value, end = yield from reader.json(begin, (_JSON_END,))
        check_size(reader.text, begin, end, self.limits)
        for marker in (_JSON_END, self.format.closer):
            end = yield from reader.skip(end)
            if not (yield from reader.which((marker,), end)):
                code = "unclosed" if end == len(reader.text) else "extra_data"
                raise CallParseError(code, f"expecting {marker}", end)
            end += len(marker)
        reader.block = begin, end
        args, notes = read_arguments(value, self.limits)
        return PartialCall(args=args, notes=notes), end

    def render_calls(self, calls: Sequence[ParsedCall]) -> str:
        """Write several calls, counted from 1, as they appear in one message."""
        return super().render_calls([replace(call, index=index) for index, call in enumerate(calls)])

    def raw(self, name: str, value: JSON) -> str:
        """Write the value of an argument.

        Raises:
            ValueError: If the value contains a string that would end it.
        """
        text = super().raw(name, value)
        if self.format.parameter in text or self.format.openers[0] in text:
            raise ValueError(f"the value of {name!r} contains tags of the format, which has no escapes")
        return text

    def frame(self, name: str) -> Frame:
        """Return the text around the arguments of a call, with any number as its index."""
        before = f'{self.format.openers[0]}{_attributes(tool=name).removesuffix(_SEP)} index="'
        return Frame(before, self.format.closer, "kimi_k3_xml", infix=(r"\d{1,4}", f'"{_SEP}'))


def _kind(value: JSON) -> str:
    """Return the format's name of a value's type."""
    return kinds_of(value)[-1]


def _attributes(**attributes: str) -> str:
    """Write attributes and the end of the tag.

    Raises:
        ValueError: If one is empty or contains the end of the tag.
    """
    for value in attributes.values():
        if not value.strip() or _SEP in value:
            raise ValueError(f"the format cannot express the name {value!r}")
    written = (
        (name, value.replace("&", "&amp;").replace('"', "&quot;")) for name, value in attributes.items()
    )
    return "".join(f' {name}="{value}"' for name, value in written) + _SEP
