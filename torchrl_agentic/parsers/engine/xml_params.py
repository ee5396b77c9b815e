"""The engine of formats in which each argument has tags of its own and its value stands raw between them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from torchrl_agentic.messages import JSON, Fields, ParsedCall, fields_of
from torchrl_agentic.parsers.engine.json_text import check_size, dumps
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader, finish
from torchrl_agentic.parsers.engine.structural_tag import Frame
from torchrl_agentic.parsers.engine.text_parser import TextParser
from torchrl_agentic.parsers.engine.typed_values import json_or_text, property_schema, typed_value, types_of
from torchrl_agentic.text import one_line


@dataclass(frozen=True, slots=True)
class Parameter:
    """The opening tag of an argument: its name, where its value begins, and what the tag says of its type."""

    name: str
    value_at: int
    is_string: bool | None = None


class XMLParamsParser(TextParser):
    """A call with one element per argument, whose values stand as they are.

    A parameter's closer counts only where another parameter or the end of the call follows, so that code
    which prints one survives. A parameter without a closer ends before the next one if the tool has that one,
    which is noted. A new call at the start of a line ends an unfinished one, which is an error.

    parameter, parameter_end: how the tag of an argument begins, and what closes it. newlines: whether the
    first and the last newline of a value are "data", or belong to the format, "each" or only as a "pair".
    own_lines: whether each parameter begins a line, so that the newline before it is never data. markup:
    what all tags of the format hold, and no value: a value with it ends at the next argument, or is an error.
    style: xgrammar's name of the format.
    """

    parameter: ClassVar[str] = ""
    parameter_end: ClassVar[str] = ""
    newlines: ClassVar[Literal["data", "each", "pair"]] = "data"
    own_lines: ClassVar[bool] = False
    markup: ClassVar[str] = ""
    style: ClassVar[str] = ""

    @abstractmethod
    def read_name(self, reader: Reader, start: int) -> Incremental[tuple[str, int]]:
        """Step: read the tool's name off the tag at `start`; give it and where the arguments begin.

        Raises:
            CallParseError: there is none.
        """

    @abstractmethod
    def read_parameter(self, reader: Reader, start: int) -> Incremental[Parameter]:
        """Step: read the opening tag of an argument.

        Raises:
            CallParseError: it has no end, or no name.
        """

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one call."""
        name, at = yield from self.read_name(reader, start)
        schema = None if reader.tools is None else reader.tools.get(name)
        return (yield from self.named_call(reader, start, name, self._read_arguments(reader, at, schema)))

    def _read_arguments(
        self, reader: Reader, at: int, schema: Fields | None
    ) -> Incremental[tuple[PartialCall, int]]:
        args: dict[str, JSON] = {}
        notes: tuple[str, ...] = ()
        body = at
        while True:
            at = yield from reader.skip(at)
            marker = yield from reader.which((self.parameter, self.closer), at)
            if not marker:
                break
            if marker == self.closer:
                end = at + len(self.closer)
                check_size(reader.text, body, end, self.limits)
                return PartialCall(args=args, notes=notes), end
            parameter = yield from self.read_parameter(reader, at)
            stop, at, is_closed = yield from self._value_end(reader, parameter, schema, args)
            if not is_closed:
                notes = (*notes, "unclosed_parameter")
            if parameter.name in args:
                notes = (*notes, "duplicate_argument")
            written = reader.text[parameter.value_at : stop]
            if self.markup and self.markup in written:
                raise self._holds_markup(reader.text, parameter)
            text = self.unwrapped(written)
            if text == written and self.own_lines and not is_closed:
                text = text.removesuffix("\n").removesuffix("\r")
            args[parameter.name], odd = self._value(text, parameter, schema)
            if odd:
                notes += tuple(note for note in odd if note not in notes)
        if at == len(reader.text) or (self.section[1] and (yield from reader.which(self.section[1:], at))):
            raise CallParseError("unclosed", f"the message ends before {self.closer}", at)
        if reader.at("{", at):
            return (yield from self.json_body(reader, at))
        raise CallParseError("extra_data", f"expecting {self.parameter} or {self.closer}", at)

    def json_body(self, reader: Reader, at: int) -> Incremental[tuple[PartialCall, int]]:
        """Step: read arguments that are one JSON object in place of parameters.

        Raises:
            CallParseError: always, but for formats that have both.
        """
        del reader
        raise CallParseError("wrong_dialect", "here each argument has a tag of its own", at)
        yield

    def past_closer(self, reader: Reader, end: int, *, tool: str = "") -> Incremental[int]:
        """Step: return the place behind the closer, which has to follow JSON that ends at `end`.

        Raises:
            CallParseError: Something else follows, or nothing.
        """
        after = yield from reader.skip(end)
        if not (yield from reader.which((self.closer,), after)):
            code = "unclosed" if after == len(reader.text) else "extra_data"
            reason = f"after its JSON comes something else than {self.closer}"
            raise CallParseError(code, reason, after, tool=tool)
        return after + len(self.closer)

    def _value_end(
        self, reader: Reader, parameter: Parameter, schema: Fields | None, known: dict[str, JSON]
    ) -> Incremental[tuple[int, int, bool]]:
        """Step: give where a value ends, where to go on, and whether its closer is there.

        Raises:
            CallParseError: it does not end.
        """
        at = parameter.value_at
        name = one_line(parameter.name, 40)
        reason = f"{name} has no {self.parameter_end}"
        while True:
            closer = yield from reader.find(self.parameter_end, at)
            if closer >= 0 and not any(reader.text.find(sign, at, closer) >= 0 for sign in self._signs):
                end = closer + len(self.parameter_end)
                after = yield from reader.skip(end)
                if (yield from reader.which((self.parameter, self.closer), after)):
                    return closer, after, True
            # What may end the value before that closer does: the end of the turn, the next call or argument.
            before = yield from self.find_invented_turn(reader, at, closer)
            cut_off = yield from self._next_call(reader, at, closer if before < 0 else before)
            cut_off = before if cut_off < 0 else cut_off
            end = yield from self._next_parameter(
                reader, at, closer if cut_off < 0 else cut_off, schema, (parameter.name, known)
            )
            if end >= 0:
                return end, end, False
            if closer < 0 or cut_off >= 0:
                raise CallParseError("unclosed", reason, len(reader.text) if cut_off < 0 else cut_off)
            at = closer + len(self.parameter_end)
            after = yield from reader.skip(at)
            if (yield from reader.which((self.parameter, self.closer), after)):
                return closer, after, True
            reason = f"behind {name} stands neither {self.parameter} nor {self.closer}"

    @cached_property
    def _signs(self) -> frozenset[str]:
        """The first characters of what may end a value."""
        return frozenset(marker[0] for marker in (*self._calling, *self.turn_end, self.parameter))

    def _next_parameter(
        self, reader: Reader, at: int, before: int, schema: Fields | None, known: tuple[str, dict[str, JSON]]
    ) -> Incremental[int]:
        """Step: give where, before `before`, a parameter begins that the tool has and lacks here; or -1.

        Where parameters begin lines, it must too. Where no value holds markup, an unknown tool has any.
        """
        properties = fields_of((schema or {}).get("properties"))
        takes_any = bool(self.markup) and schema is None
        while (
            (properties or takes_any)
            and (found := reader.seek(self.parameter, at)) >= 0
            and (before < 0 or found < before)
        ):
            at = found + len(self.parameter)
            if self.own_lines and reader.text[found - 1] != "\n":
                continue
            try:
                name = (yield from self.read_parameter(reader, found)).name
            except CallParseError:
                continue
            if (takes_any or name in (properties or ())) and name != known[0] and name not in known[1]:
                return found
        return -1

    def _next_call(self, reader: Reader, at: int, before: int) -> Incremental[int]:
        """Step: give where, before `before`, another call begins; or -1.

        That is: on a line of its own, with its section, or behind what closes a call.
        """
        section, closers = self.section[0], tuple(filter(None, (self.closer, self.section[1])))
        while True:
            place, marker = reader.first(self._calling, at)
            if place < 0 or 0 <= before < place:
                return -1
            at = place + len(marker)
            if reader.text[max(0, place - 32) : place].rstrip().endswith(closers):
                return place
            if place and reader.text[place - 1] != "\n":
                continue
            after = yield from reader.skip(at)
            if marker == section and (yield from reader.which(self.openers, after)):
                return place
            if not section or (self.around[0] and marker in self.openers):
                return place

    def _holds_markup(self, text: str, parameter: Parameter) -> CallParseError:
        at = text.index(self.markup, parameter.value_at)
        while text[at - 1] in "</" and at > parameter.value_at:
            at -= 1
        name = one_line(parameter.name, 40)
        reason = f"the value of {name} holds {self.markup}, or has no {self.parameter_end}"
        return CallParseError("unclosed", reason, at)

    def unwrapped(self, text: str) -> str:
        """Return the text between the tags of an argument without the newlines of the format."""
        newline = "\r\n" if text.startswith("\r\n") else "\n"
        if self.newlines == "each":
            return text.removeprefix(newline).removesuffix(newline)
        is_pair = len(text) > len(newline) and text.startswith(newline) and text.endswith(newline)
        return text[len(newline) : -len(newline)] if is_pair and self.newlines == "pair" else text

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
        """Step: give the end of the unreadable call at `start`: its closer, or where the next one begins."""
        end = yield from super().end_of_malformed(reader, start, broke)
        at = max(start + 1, broke)
        turn_end = yield from self.find_invented_turn(reader, at, end)
        end = end if turn_end < 0 else turn_end
        following = yield from self._next_call(reader, at, end)
        return end if following < 0 else following

    def raw(self, name: str, value: JSON) -> str:
        """Write the value of an argument.

        Raises:
            ValueError: it holds what would end it.
        """
        text = value if isinstance(value, str) else dumps(value)
        if self._would_end(text):
            raise ValueError(f"the value of {name!r} holds tags of the format, which has no escapes")
        return text

    def _would_end(self, text: str) -> bool:
        """Return whether a value would be read as something else, whichever arguments the tool has."""
        if self.markup and self.markup in text:
            return True
        if (f"\n{self.parameter}" in f"\n{text}") if self.own_lines else (self.parameter in text):
            return True
        return not self.reads_back(text)

    def reads_back(self, text: str) -> bool:
        """Return whether the reader finds the end of a value where it ends, in a call that ends behind it."""
        begin = len(self.parameter) + (self.newlines == "each")
        written = f"{self.parameter}\n"[:begin] + f"{text}{self.parameter_end}\n{self.closer}"
        try:
            reading = self._value_end(Reader(written), Parameter("", begin), None, {})
            return finish(reading) == (begin + len(text), len(written) - len(self.closer), True)
        except CallParseError:
            return False

    def frame(self, name: str) -> Frame | None:
        """Return the text around the arguments in a call of this tool; None if xgrammar has no such style."""
        if not self.style:
            return None
        text = self.write(ParsedCall(name, {}, "call_0_0"))
        before, closer, after = text.rpartition(self.closer)
        return Frame(before, closer + after, self.style)
