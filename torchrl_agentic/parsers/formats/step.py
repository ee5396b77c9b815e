"""Parser of Step-3; Step-3.5 and later use the parser `qwen3_coder`."""

from __future__ import annotations

from dataclasses import replace

from torchrl_agentic.messages import Fields, ParsedCall
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.xml_params import XMLFormat, XMLParamsParser
from torchrl_agentic.parsers.formats.invoke import AttributeTags

_BEGIN, _END, _KIND, _SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "function", "<｜tool_sep｜>"
_INVOKE = "<steptml:invoke"
_TAGS = AttributeTags(gap="")


class Step3Parser(XMLParamsParser):
    """The format of Step-3: `steptml` elements, each between markers of a call, in one section.

        <｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">
        <steptml:parameter name="a">1</steptml:parameter></steptml:invoke>
        <｜tool_call_end｜><｜tool_calls_end｜>

    (Without the line breaks.) A complete `steptml:invoke` without these markers is a call too. Source: the
    parsers of vLLM and SGLang.
    """

    name = "step3"
    models = "Step-3"
    example = '<steptml:invoke name="f"><steptml:parameter name="k">v</steptml:parameter>…'
    stop = ("<|EOT|>",)
    format = XMLFormat(
        openers=("<｜tool_call_begin｜>", "<steptml:invoke"),
        closer="</steptml:invoke>",
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        around=("<｜tool_calls_begin｜>", "", "<｜tool_calls_end｜>"),
        turn_end=("<|EOT|>", "<｜end▁of▁sentence｜>"),
        parameter="<steptml:parameter",
        parameter_end="</steptml:parameter>",
        tags=_TAGS,
        needs_line=True,
    )

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether the marker begins a call: `<｜tool_call_begin｜>` does at any place."""
        return reader.at(_BEGIN, start) or (yield from super().opens(reader, start))

    def read_name(self, reader: Reader, start: int) -> Incremental[tuple[str, int]]:
        """Read the kind of the call and the name of the tool."""
        format = self.format
        if reader.at(_BEGIN, start):
            begin = yield from reader.past_repeated(_BEGIN, start + len(_BEGIN))
            markers = (_INVOKE, _BEGIN, _END, format.section[1], *format.turn_end)
            start, marker = yield from reader.find_first(markers, begin)
            if start < 0 or marker in (_BEGIN, *format.turn_end):
                broke = len(reader.text) if start < 0 else start
                raise CallParseError("unclosed", f"it ends before {format.closer}", broke)
            kind = reader.text[begin:start].strip()
            if not kind and marker != _INVOKE:
                raise CallParseError("empty", f"nothing follows {_BEGIN}", begin)
            if marker != _INVOKE or kind.removesuffix(_SEPARATOR).strip() not in ("", _KIND):
                raise CallParseError("wrong_dialect", f"expecting {_KIND}{_SEPARATOR}{_INVOKE}", begin)
        attributes, end = yield from _TAGS.read_tag(reader, start, _INVOKE)
        return attributes["name"], end

    def _read_arguments(
        self, reader: Reader, at: int, schema: Fields | None
    ) -> Incremental[tuple[PartialCall, int]]:
        attempt, end = yield from super()._read_arguments(reader, at, schema)
        return attempt, (yield from self._past_end(reader, end))

    def _past_end(self, reader: Reader, end: int) -> Incremental[int]:
        """Return the index after the end marker of a call, if it follows `end`."""
        after = yield from reader.skip(end)
        return after + len(_END) if (yield from reader.which((_END,), after)) else end

    def _next_call(self, reader: Reader, at: int, before: int) -> Incremental[int]:
        place = reader.seek(_BEGIN, at)
        is_inside = place >= 0 and (before < 0 or place < before)
        found = yield from super()._next_call(reader, at, place if is_inside else before)
        return place if is_inside and found < 0 else found

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed call at `start`: its closer, or the next call.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        end = yield from super().end_of_malformed(reader, start, broke)
        place, marker = yield from reader.find_first((_END, self.format.section[1]), max(start + 1, broke))
        if 0 <= place < end:
            return place + (len(_END) if marker == _END else 0)
        return (yield from self._past_end(reader, end))

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it."""
        format = replace(self.format, openers=(_INVOKE,))
        return f"{_BEGIN}{_KIND}{_SEPARATOR}{_TAGS.write(format, call, self.raw)}{_END}"
