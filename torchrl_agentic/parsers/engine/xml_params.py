"""Formats in which each argument has its own tags, with the raw value between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torchrl_agentic.messages import JSON, Fields, ParsedCall, fields_of
from torchrl_agentic.parsers.engine.json_text import check_size, dumps, read_arguments
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader, finish
from torchrl_agentic.parsers.engine.scan import attempt, find_invented_turn, named_call
from torchrl_agentic.parsers.engine.structural_tag import Frame
from torchrl_agentic.parsers.engine.text_format import TextFormat
from torchrl_agentic.parsers.engine.text_parser import TextParser
from torchrl_agentic.parsers.engine.typed_values import json_or_text, property_schema, typed_value, types_of
from torchrl_agentic.parsers.engine.value_tags import ValueTags
from torchrl_agentic.text import one_line


@dataclass(frozen=True, slots=True)
class Parameter:
    """The opening tag of an argument.

    Attributes:
        name: Name of the argument.
        value_at: Index where its value begins.
        is_string: Whether the tag declares a string; None if it declares no type.
    """

    name: str
    value_at: int
    is_string: bool | None = None


class ArgumentTags(ABC):
    """The tags that name tools and arguments, in the way of a family of formats."""

    @property
    def end_tags(self) -> tuple[str, ...]:
        """Return the tags of an argument, besides its closer, that end no value."""
        return ()

    @abstractmethod
    def read_name(self, format: XMLFormat, reader: Reader, start: int) -> Incremental[tuple[str, int]]:
        """Read the tool's name from the tag at `start`; return it and the start of the arguments.

        Args:
            format: Description of the format.
            reader: The message as read so far.
            start: Index of the opener in the text.

        Raises:
            CallParseError: If there is no name.
        """

    @abstractmethod
    def read_parameter(self, format: XMLFormat, reader: Reader, start: int) -> Incremental[Parameter]:
        """Read the opening tag of an argument.

        Args:
            format: Description of the format.
            reader: The message as read so far.
            start: Index of the tag.

        Raises:
            CallParseError: If the tag is not closed or has no name.
        """

    @abstractmethod
    def write(self, format: XMLFormat, call: ParsedCall, raw: Callable[[str, JSON], str]) -> str:
        """Write a call, without what is around all calls of a message.

        Args:
            format: Description of the format.
            call: The call.
            raw: Writes the value of an argument, see `XMLParamsParser.raw`.

        Raises:
            ValueError: If the format cannot express the call.
        """


@dataclass(frozen=True, kw_only=True)
class XMLFormat(TextFormat):
    """Description of a format with a tag per argument; see `TextFormat` for the other markers.

    Attributes:
        tags: How tags name tools and arguments.
        parameter: Beginning of an argument's opening tag; "" if it has the name of the argument.
        parameter_end: Closing tag of an argument.
        needs_line: Whether a call outside of a section must begin a line; elsewhere it is prose about calls.
        newlines: Whether the first and the last newline of a value are "data", or part of the format: "each"
            of them, or only both as a "pair".
        own_lines: Whether each parameter begins a line, so that the newline before it is never data.
        markup: String that all tags contain and no value does; a value with it ends at the next argument, or
            is an error.
        json_bodies: Whether a call may hold one JSON object instead of parameters.
        other_dialect: Whose syntax `other_openers` begin, for the error of such a call. A section with
            another name is read.
        style: xgrammar's name of the format; "" if it has none.
    """

    tags: ArgumentTags
    parameter: str = ""
    parameter_end: str = ""
    needs_line: bool = False
    newlines: Literal["data", "each", "pair"] = "data"
    own_lines: bool = False
    markup: str = ""
    json_bodies: bool = False
    other_dialect: str = ""
    style: str = ""

    @cached_property
    def end_tags(self) -> tuple[str, ...]:
        """Return the end tags of the format, of which only that of an argument ends a value."""
        return tuple(filter(None, (self.closer, self.section[1], *self.tags.end_tags)))

    @cached_property
    def after_values(self) -> tuple[str, ...]:
        """Return the tags that follow a value or a call."""
        return (self.parameter, *self.end_tags, *self.calling)

    @cached_property
    def value_signs(self) -> frozenset[str]:
        """Return the first characters of markers that may end a value."""
        return frozenset(marker[0] for marker in (*self.calling, *self.turn_end, self.parameter))

    def control_markers(self) -> tuple[str, ...]:
        """Return the markers that tool results must not contain."""
        more = filter(None, (self.parameter, self.parameter_end, self.markup)) if self.markup else ()
        return (*super().control_markers(), *more)

    def unwrapped(self, text: str) -> str:
        """Return the text between the tags of an argument without the newlines of the format."""
        newline = "\r\n" if text.startswith("\r\n") else "\n"
        if self.newlines == "each":
            return text.removeprefix(newline).removesuffix(newline)
        is_pair = len(text) > len(newline) and text.startswith(newline) and text.endswith(newline)
        return text[len(newline) : -len(newline)] if is_pair and self.newlines == "pair" else text

    def wrapped(self, text: str) -> str:
        """Return a value with the newlines that the format writes around it.

        In a format with pairs of newlines, only a value that begins and ends with newlines itself needs them.
        """
        is_bare = self.newlines == "data" or (self.newlines == "pair" and self.unwrapped(text) == text)
        return text if is_bare else f"\n{text}\n"


class XMLParamsParser(TextParser):
    """A format with one element per argument, whose values are not escaped.

        <call name="f"><parameter name="a">1</parameter></call>

    The closer of a parameter counts only if another parameter or the end of the call follows, so code that
    contains the closer survives. A parameter without a closer ends before the next one if the tool has that
    argument, which is noted. A damaged closer before another tag of the format is an error, see `ValueTags`.
    A new call at the start of a line ends an unfinished one, which is an error.
    """

    format: XMLFormat  # pyright: ignore[reportIncompatibleVariableOverride]  a frozen value

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether the tag is where a call may be.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        return not self.format.needs_line or reader.in_section or reader.is_line_start(start)
        yield

    def read_name(self, reader: Reader, start: int) -> Incremental[tuple[str, int]]:
        """Read the tool's name; see `ArgumentTags.read_name`.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        return self.format.tags.read_name(self.format, reader, start)

    def read_parameter(self, reader: Reader, start: int) -> Incremental[Parameter]:
        """Read the opening tag of an argument; see `ArgumentTags.read_parameter`.

        Args:
            reader: The message as read so far.
            start: Index of the tag.
        """
        return self.format.tags.read_parameter(self.format, reader, start)

    def write(self, call: ParsedCall) -> str:
        """Write a call, without what is around all calls of a message.

        Raises:
            ValueError: If the format cannot express the call.
        """
        return self.format.tags.write(self.format, call, self.raw)

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
        if marker[-1] == ">" and (yield from reader.which(self.format.openers, inside)):
            reader.note("other_dialect")
            reader.opened_at = place
            return (yield from attempt(self, reader, inside))
        return (yield from attempt(self, reader, place, self._read_other))

    def _read_other(self, reader: Reader, start: int) -> Incremental[int]:
        """Raise the error for a call in the syntax of another version.

        Raises:
            CallParseError: Always.
        """
        marker = yield from reader.which(self.format.other_openers, start)
        closer = f"</{marker[1:].removesuffix('>')}>"
        error = CallParseError("wrong_dialect", f"this is the syntax of {self.format.other_dialect}", start)
        found = yield from reader.find(closer, start)
        error.end = len(reader.text) if found < 0 else found + len(closer)
        raise error

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one call.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        name, at = yield from self.read_name(reader, start)
        schema = None if reader.tools is None else reader.tools.get(name)
        return (yield from named_call(reader, start, name, self._read_arguments(reader, at, schema)))

    def _read_arguments(
        self, reader: Reader, at: int, schema: Fields | None
    ) -> Incremental[tuple[PartialCall, int]]:
        format = self.format
        args: dict[str, JSON] = {}
        notes: tuple[str, ...] = ()
        body = at
        while True:
            at = yield from reader.skip(at)
            marker = yield from reader.which((format.parameter, format.closer), at)
            if not marker:
                break
            if marker == format.closer:
                end = at + len(format.closer)
                check_size(reader.text, body, end, self.limits)
                return PartialCall(args=args, notes=notes), end
            parameter = yield from self.read_parameter(reader, at)
            stop, at, is_closed = yield from self._value_end(reader, parameter, schema, args)
            if not is_closed:
                notes = (*notes, "unclosed_parameter")
            if parameter.name in args:
                notes = (*notes, "duplicate_argument")
            written = reader.text[parameter.value_at : stop]
            if format.markup and format.markup in written:
                raise self._holds_markup(reader.text, parameter)
            text = format.unwrapped(written)
            if text == written and format.own_lines and not is_closed:
                text = text.removesuffix("\n").removesuffix("\r")
            args[parameter.name], odd = self._value(text, parameter, schema)
            if odd:
                notes += tuple(note for note in odd if note not in notes)
        if at == len(reader.text) or (
            format.section[1] and (yield from reader.which(format.section[1:], at))
        ):
            raise CallParseError("unclosed", f"the message ends before {format.closer}", at)
        if reader.at("{", at):
            return (yield from self._json_body(reader, at))
        raise CallParseError("extra_data", f"expecting {format.parameter} or {format.closer}", at)

    def _json_body(self, reader: Reader, at: int) -> Incremental[tuple[PartialCall, int]]:
        """Read arguments written as one JSON object instead of parameters.

        Raises:
            CallParseError: If the format allows none, or it is malformed.
        """
        if not self.format.json_bodies:
            raise CallParseError("wrong_dialect", "each argument needs its own tag", at)
        value, end = yield from reader.json(at, (self.format.closer,))
        args, notes = read_arguments(value, self.limits)
        return PartialCall(args=args, notes=notes), (yield from self.past_json(reader, end))

    def past_json(self, reader: Reader, end: int, *, tool: str = "") -> Incremental[int]:
        """Return the index after the closer, which must follow the JSON.

        Args:
            reader: The message as read so far.
            end: Index just after the JSON.
            tool: Name of the tool, for the error.

        Raises:
            CallParseError: If other text follows, or nothing.
        """
        format = self.format
        after = yield from reader.skip(end)
        if not (yield from reader.which((format.closer,), after)):
            code = "unclosed" if after == len(reader.text) else "extra_data"
            reason = f"unexpected text after the JSON, expecting {format.closer}"
            raise CallParseError(code, reason, after, tool=tool)
        return after + len(format.closer)

    def _value_end(
        self, reader: Reader, parameter: Parameter, schema: Fields | None, known: dict[str, JSON]
    ) -> Incremental[tuple[int, int, bool]]:
        """Return the end of a value, where to continue, and whether its closer is present.

        Raises:
            CallParseError: If the value does not end.
        """
        format = self.format
        at = parameter.value_at
        name = one_line(parameter.name, 40)
        reason = f"{name} has no {format.parameter_end}"
        tags: ValueTags | None = None
        while True:
            closer = yield from reader.find(format.parameter_end, at)
            if closer >= 0 and not any(
                reader.text.find(sign, at, closer) >= 0 for sign in format.value_signs
            ):
                end = closer + len(format.parameter_end)
                after = yield from reader.skip(end)
                if (yield from reader.which((format.parameter, format.closer), after)):
                    return closer, after, True
            tags = tags or ValueTags(parameter.name, parameter.value_at, format.end_tags)
            # The end of the turn, the next call or argument may end the value before that closer.
            before = yield from find_invented_turn(format, reader, at, closer)
            cut_off = yield from self._next_call(reader, at, closer if before < 0 else before)
            cut_off = before if cut_off < 0 else cut_off
            before = closer if cut_off < 0 else cut_off
            end = yield from self._next_parameter(reader, at, before, schema, (parameter.name, known))
            damaged = yield from self._damaged_end(reader, tags, at, before if end < 0 else end)
            if damaged >= 0:
                reason = f"{name} has no {format.parameter_end}: its end tag is damaged"
                raise CallParseError("unclosed", reason, damaged)
            if end >= 0:
                return end, end, False
            if closer < 0 or cut_off >= 0:
                raise CallParseError("unclosed", reason, len(reader.text) if cut_off < 0 else cut_off)
            at = closer + len(format.parameter_end)
            after = yield from reader.skip(at)
            if (yield from reader.which((format.parameter, format.closer), after)):
                return closer, after, True
            reason = f"expecting {format.parameter} or {format.closer} after {name}"
            if not tags.is_data(reader.text, closer):
                for expected in (format.parameter, format.closer):
                    if (yield from tags.is_damaged_at(reader, after, expected)):
                        raise CallParseError("unclosed", reason, after)

    def _damaged_end(self, reader: Reader, tags: ValueTags, at: int, before: int) -> Incremental[int]:
        """Return the place of a damaged end tag that a tag of the format up to `before` follows, or -1."""
        format = self.format
        while True:
            place, marker = reader.first(format.after_values, at)
            if place < 0 or 0 <= before < place:
                return -1
            at = place + len(marker)
            goes_on = marker == format.parameter
            damaged = tags.damaged_before(reader.text, place, format.parameter_end, goes_on=goes_on)
            if damaged >= 0 and goes_on:
                try:
                    yield from self.read_parameter(reader, place)
                except CallParseError:
                    continue
            if damaged >= 0:
                return damaged

    def _next_parameter(
        self, reader: Reader, at: int, before: int, schema: Fields | None, known: tuple[str, dict[str, JSON]]
    ) -> Incremental[int]:
        """Return the place of the next parameter before `before` that the tool has and the call lacks, or -1.

        Where parameters begin lines, this one must too. Where values contain no markup, unknown tools have
        any argument.
        """
        format = self.format
        properties = fields_of((schema or {}).get("properties"))
        takes_any = bool(format.markup) and schema is None
        while (
            (properties or takes_any)
            and (found := reader.seek(format.parameter, at)) >= 0
            and (before < 0 or found < before)
        ):
            at = found + len(format.parameter)
            if format.own_lines and reader.text[found - 1] != "\n":
                continue
            try:
                name = (yield from self.read_parameter(reader, found)).name
            except CallParseError:
                continue
            if (takes_any or name in (properties or ())) and name != known[0] and name not in known[1]:
                return found
        return -1

    def _next_call(self, reader: Reader, at: int, before: int) -> Incremental[int]:
        """Return the place of the next call before `before`, or -1.

        It must begin a line, open its section, or follow the closer of a call.
        """
        format = self.format
        section, closers = (
            format.section[0],
            tuple(filter(None, (format.closer, format.section[1]))),
        )
        while True:
            place, marker = reader.first(format.calling, at)
            if place < 0 or 0 <= before < place:
                return -1
            at = place + len(marker)
            if reader.text[max(0, place - 32) : place].rstrip().endswith(closers):
                return place
            if place and reader.text[place - 1] != "\n":
                continue
            after = yield from reader.skip(at)
            if marker == section and (yield from reader.which(format.openers, after)):
                return place
            if not section or (format.around[0] and marker in format.openers):
                return place

    def _holds_markup(self, text: str, parameter: Parameter) -> CallParseError:
        format = self.format
        at = text.index(format.markup, parameter.value_at)
        while text[at - 1] in "</" and at > parameter.value_at:
            at -= 1
        name = one_line(parameter.name, 40)
        reason = f"the value of {name} contains {format.markup}, or has no {format.parameter_end}"
        return CallParseError("unclosed", reason, at)

    def _value(self, text: str, parameter: Parameter, schema: Fields | None) -> tuple[JSON, tuple[str, ...]]:
        """Return the value of an argument, and notes."""
        if parameter.is_string:
            return text, ()
        types, is_odd = types_of(property_schema(schema, parameter.name), schema)
        value, is_python = typed_value(text, types, self.limits)
        if parameter.is_string is False and not is_python:
            return json_or_text(text, self.limits), ()
        if not is_odd and not is_python:
            return value, ()
        return value, (("odd_schema_type",) if is_odd else ()) + (("python_literals",) if is_python else ())

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed call at `start`: its closer, or the start of the next call.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        end = yield from super().end_of_malformed(reader, start, broke)
        at = max(start + 1, broke)
        turn_end = yield from find_invented_turn(self.format, reader, at, end)
        end = end if turn_end < 0 else turn_end
        following = yield from self._next_call(reader, at, end)
        return end if following < 0 else following

    def raw(self, name: str, value: JSON) -> str:
        """Write the value of an argument.

        Args:
            name: Name of the argument.
            value: Its value.

        Raises:
            ValueError: If the value contains a string that would end it.
        """
        text = value if isinstance(value, str) else dumps(value)
        if self._would_end(name, text):
            raise ValueError(f"the value of {name!r} contains tags of the format, which has no escapes")
        return text

    def _would_end(self, name: str, text: str) -> bool:
        """Return whether a value would be read as something else, for any arguments of the tool."""
        format = self.format
        if format.markup and format.markup in text:
            return True
        if (f"\n{format.parameter}" in f"\n{text}") if format.own_lines else (format.parameter in text):
            return True
        return not self.reads_back(name, text)

    def reads_back(self, name: str, text: str) -> bool:
        """Return whether the reader finds the correct end of a value if the call ends after it.

        Args:
            name: Name of the argument.
            text: Its value as text.
        """
        format = self.format
        begin = len(format.parameter) + (format.newlines == "each")
        written = f"{format.parameter}\n"[:begin] + f"{text}{format.parameter_end}\n{format.closer}"
        try:
            reading = self._value_end(Reader(written), Parameter(name, begin), None, {})
            return finish(reading) == (begin + len(text), len(written) - len(format.closer), True)
        except CallParseError:
            return False

    def frame(self, name: str) -> Frame | None:
        """Return the text around the arguments in a call of this tool; None if xgrammar has no such style."""
        format = self.format
        if not format.style:
            return None
        text = self.write(ParsedCall(name, {}, "call_0_0"))
        before, closer, after = text.rpartition(format.closer)
        return Frame(before, closer + after, format.style)
