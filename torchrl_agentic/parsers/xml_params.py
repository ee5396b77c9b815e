"""The engine of formats in which each argument has tags of its own and its value stands raw between them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchrl_agentic.messages import JSON, Fields, ParsedCall, fields_of
from torchrl_agentic.parsers.attempts import Attempt, Unreadable
from torchrl_agentic.parsers.jsontext import dumps, fits
from torchrl_agentic.parsers.reader import Reader, Steps
from torchrl_agentic.parsers.text import TextParser
from torchrl_agentic.parsers.typed import json_or_text, property_schema, typed_value, types_of


@dataclass(frozen=True, slots=True)
class Parameter:
    """The opening tag of an argument: its name, where its value begins, and what the tag says of its type."""

    name: str
    value_at: int
    is_string: bool | None = None


class XMLParamsParser(TextParser):
    """A call with one element per argument, whose values stand as they are.

    A parameter's closer counts only where another parameter or the end of the call follows, so that code which
    prints one survives. A parameter without a closer ends before the next one if the tool has that one, which
    is noted. A new call at the start of a line ends an unfinished one, which is an error.

    parameter, parameter_end: how the tag of an argument begins, and what closes it. strip_newlines: whether
    the first and the last newline of a value belong to the format.
    """

    parameter: ClassVar[str] = ""
    parameter_end: ClassVar[str] = ""
    strip_newlines: ClassVar[bool] = False

    @abstractmethod
    def read_name(self, reader: Reader, start: int) -> Steps[tuple[str, int]]:
        """Step: read the name of the tool off the opening tag at `start`; give it and where its arguments begin.

        Raises:
            Unreadable: there is none.
        """

    @abstractmethod
    def read_parameter(self, reader: Reader, start: int) -> Steps[Parameter]:
        """Step: read the opening tag of an argument.

        Raises:
            Unreadable: it has no end, or no name.
        """

    def read(self, reader: Reader, start: int) -> Steps[int]:
        """Read one call."""
        name, at = yield from self.read_name(reader, start)
        schema = None if reader.tools is None else reader.tools.get(name)
        try:
            attempt, end = yield from self._read_arguments(reader, start, at, schema)
        except Unreadable as error:
            error.tool = name
            raise
        attempt.tool = name
        reader.add(attempt, start, end)
        return end

    def _read_arguments(
        self, reader: Reader, start: int, at: int, schema: Fields | None
    ) -> Steps[tuple[Attempt, int]]:
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
                if not fits(reader.text, body, end, self.limits):
                    raise Unreadable(
                        "too_large", f"a call has at most {self.limits.argument_bytes} bytes", body
                    )
                return Attempt(args=args, notes=notes), end
            parameter = yield from self.read_parameter(reader, at)
            stop, at, is_closed = yield from self._value_end(reader, parameter, schema, args)
            if not is_closed:
                notes = (*notes, "unclosed_parameter")
            args[parameter.name] = self._value(reader.text[parameter.value_at : stop], parameter, schema)
        if at == len(reader.text):
            raise Unreadable("unclosed", f"the message ends before {self.closer}", at)
        if reader.at("{", at):
            return (yield from self.json_body(reader, at))
        raise Unreadable("extra_data", f"expecting {self.parameter} or {self.closer}", at)

    def json_body(self, reader: Reader, at: int) -> Steps[tuple[Attempt, int]]:
        """Step: read arguments that are one JSON object in place of parameters.

        Raises:
            Unreadable: always, but for formats that have both.
        """
        del reader
        raise Unreadable("wrong_dialect", "here each argument has a tag of its own", at)
        yield

    def _value_end(
        self, reader: Reader, parameter: Parameter, schema: Fields | None, known: dict[str, JSON]
    ) -> Steps[tuple[int, int, bool]]:
        """Step: give where a value ends, where to go on, and whether its closer is there.

        Raises:
            Unreadable: it does not end.
        """
        at = parameter.value_at
        while True:
            closer = yield from reader.find(self.parameter_end, at)
            # What may end the value before that closer does: the next argument, or the next call.
            next_call = yield from self._next_call(reader, at, closer)
            before = closer if next_call < 0 else next_call
            end = yield from self._next_parameter(reader, at, before, schema, (parameter.name, known))
            if end >= 0:
                return end, end, False
            if closer < 0 or next_call >= 0:
                broke = len(reader.text) if next_call < 0 else next_call
                raise Unreadable("unclosed", f"{parameter.name} has no {self.parameter_end}", broke)
            at = closer + len(self.parameter_end)
            after = yield from reader.skip(at)
            if (yield from reader.which((self.parameter, self.closer), after)):
                return closer, after, True

    def _next_parameter(
        self, reader: Reader, at: int, before: int, schema: Fields | None, known: tuple[str, dict[str, JSON]]
    ) -> Steps[int]:
        """Step: give where, before `before`, a parameter that the tool has begins on a line of its own; or -1."""
        properties = fields_of((schema or {}).get("properties"))
        while (
            properties and (found := reader.seek(self.parameter, at)) >= 0 and (before < 0 or found < before)
        ):
            at = found + len(self.parameter)
            if reader.text[found - 1] != "\n":
                continue
            try:
                name = (yield from self.read_parameter(reader, found)).name
            except Unreadable:
                continue
            if name in properties and name != known[0] and name not in known[1]:
                return found
        return -1

    def _next_call(self, reader: Reader, at: int, before: int) -> Steps[int]:
        """Step: give where, before `before`, another call begins on a line of its own; or -1."""
        opening = self.section[0] if self.section[0] else self.openers[0]
        while (found := reader.seek(opening, at)) >= 0 and (before < 0 or found < before):
            at = found + len(opening)
            if found and reader.text[found - 1] != "\n":
                continue
            after = yield from reader.skip(at)
            if not self.section[0] or (yield from reader.which(self.openers, after)):
                return found
        return -1

    def _value(self, text: str, parameter: Parameter, schema: Fields | None) -> JSON:
        if self.strip_newlines:
            newline = "\r\n" if text.startswith("\r\n") else "\n"
            text = text.removeprefix(newline).removesuffix(newline)
        if parameter.is_string is not None:
            return text if parameter.is_string else json_or_text(text, self.limits)
        return typed_value(text, types_of(property_schema(schema, parameter.name), schema), self.limits)

    def end_of_bad(self, reader: Reader, start: int, broke: int) -> Steps[int]:
        """Step: give the end of the unreadable call at `start`: its closer, or where the next one begins."""
        end = yield from super().end_of_bad(reader, start, broke)
        following = yield from self._next_call(reader, max(start + 1, broke), end)
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
        opening = self.section[0] if self.section[0] else self.openers[0]
        if f"\n{self.parameter}" in f"\n{text}" or f"\n{opening}" in f"\n{text}":
            return True
        pieces = text.split(self.parameter_end)[1:]
        return any(piece.lstrip().startswith((self.parameter, self.closer)) for piece in pieces)

    def render_call(self, call: ParsedCall) -> str:
        """Write a call as the model would."""
        return self.render_calls([call])

    @abstractmethod
    def render_one(self, call: ParsedCall) -> str:
        """Write a call without the section around it."""

    def render_calls(self, calls: Sequence[ParsedCall]) -> str:
        """Write several calls, in one section where the format has sections."""
        body = "\n".join(map(self.render_one, calls))
        return f"{self.section[0]}\n{body}\n{self.section[1]}" if self.section[0] else body
