"""Parsers of calls in Python syntax: Llama 4, Llama 3.2, ToolACE and OLMo 3; `lfm2` has LFM2.

Nothing that the model wrote is compiled or run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.json_text import check_size
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall, call_error
from torchrl_agentic.parsers.engine.python_literals import LiteralReader
from torchrl_agentic.parsers.engine.python_source import bracket_end, open_string, split_items
from torchrl_agentic.parsers.engine.reader import Incremental, Reader, finish
from torchrl_agentic.parsers.engine.scan import has_shape, past_word
from torchrl_agentic.parsers.engine.text_format import TextFormat
from torchrl_agentic.parsers.engine.text_parser import TextParser

_FIRST = re.compile(r"\[\s{0,99}+([A-Za-z_][\w.-]{0,200}+)\s{0,99}+\(")
_PART_OF_FIRST = re.compile(r"\[\s{0,99}+(?:[A-Za-z_][\w.-]{0,200}+)?+\s{0,99}+\Z")
_BLANKS = " \t\r\n\f\ufeff"
_IDENTIFIER = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


@dataclass(frozen=True, kw_only=True)
class CallListFormat(TextFormat):
    """Description of a format of calls in Python syntax; see `TextFormat` for the markers.

    Attributes:
        in_brackets: Whether the list has brackets.
        separators: Characters that separate calls.
    """

    in_brackets: bool = True
    separators: str = ","


class CallListParser(TextParser):
    """A format with a list of calls between markers, whose arguments are literals passed by keyword.

    <opener>[f(a='x', n=3), g()]<closer>
    """

    format: CallListFormat  # pyright: ignore[reportIncompatibleVariableOverride]  a frozen value

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one list.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        word = yield from past_word(self.format, reader, start)
        if word >= 0:
            return word
        opener = self.format.openers[0]
        begin = yield from reader.past_repeated(opener, start + len(opener))
        inside, end, notes = yield from self._list(reader, begin)
        attempts = self._attempts(reader, inside)
        self._refuse_open_string(reader, begin, end, attempts)
        self._add(reader, start, inside, attempts, end, notes)
        return end

    def _list(self, reader: Reader, begin: int) -> Incremental[tuple[tuple[int, int], int, tuple[str, ...]]]:
        """Return the bounds of the calls after an opener, the end of the block, and notes.

        Raises:
            CallParseError: If the message ends inside the list.
        """
        format = self.format
        stop = yield from bracket_end(reader, begin, format.closer, format.openers[0], *format.turn_end)
        at_end = stop < 0 or not reader.at(format.closer, stop)
        quoted = len(reader.text) if stop < 0 else None  # the only closer, if any, is in a string
        if stop < 0:
            stop = len(reader.text)
        inside = self._trimmed(reader.text, begin, stop)
        if not at_end:
            return inside, stop + len(format.closer), ()
        if not (reader.text.startswith(format.openers[0], stop) or self._is_complete(reader, inside, begin)):
            self._refuse_open_string(reader, begin, stop)
            raise CallParseError("unclosed", f"the message ends before {format.closer}", begin, end=quoted)
        return inside, stop, ("unclosed_tag",)

    def _refuse_open_string(
        self, reader: Reader, begin: int, stop: int, attempts: Sequence[PartialCall] | None = None
    ) -> None:
        """Raise an error if the message ends inside a string, which may quote later calls.

        Raises:
            CallParseError: If it does.
        """
        is_broken = attempts is None or any(attempt.error for attempt in attempts)
        if is_broken and reader.text.find(self.format.openers[0], stop) >= 0:
            place = open_string(reader.text, begin, stop)
            if place >= 0:
                raise CallParseError(
                    "unclosed", "the message ends inside a string", place, end=len(reader.text)
                )

    def _is_complete(self, reader: Reader, inside: tuple[int, int], begin: int) -> bool:
        """Return whether a list without its closer is complete."""
        begin = reader.text.find("[", begin, inside[0])
        if self.format.in_brackets and (
            begin < 0 or finish(bracket_end(Reader(reader.text), begin)) != inside[1] + 1
        ):
            return False
        attempts = self._attempts(reader, inside)
        return bool(attempts) and all(attempt.error is None for attempt in attempts[-1:])

    def _trimmed(self, text: str, begin: int, stop: int) -> tuple[int, int]:
        """Return bounds without white space and the brackets of the list."""
        inside = text[begin:stop]
        begin += len(inside) - len(inside.lstrip(_BLANKS))
        stop -= len(inside) - len(inside.rstrip(_BLANKS))
        if self.format.in_brackets and text.startswith("[", begin) and text.endswith("]", begin, stop):
            return begin + 1, stop - 1
        return begin, stop

    def _attempts(self, reader: Reader, inside: tuple[int, int]) -> list[PartialCall]:
        """Read the calls of a list."""
        places = split_items(reader.text, *inside, self.format.separators)
        return [self._item(reader, index, *place) for index, place in enumerate(places, len(reader.calls))]

    def _add(
        self,
        reader: Reader,
        start: int,
        inside: tuple[int, int],
        attempts: Sequence[PartialCall],
        end: int,
        notes: tuple[str, ...] = (),
    ) -> None:
        """Add the calls of a list; the span of the first one covers the whole list.

        Raises:
            CallParseError: If the list is empty.
        """
        if not attempts:
            raise CallParseError("empty", "the list contains no call", inside[0])
        for attempt in attempts:
            attempt.notes += notes
            reader.add(attempt, start, end)
            start = end

    def _item(self, reader: Reader, index: int, begin: int, stop: int) -> PartialCall:
        literal = LiteralReader(reader.text, self.limits)
        try:
            check_size(reader.text, begin, stop, self.limits)
            name, args, end = literal.call(literal.skip(begin))
            if (after := literal.skip(end)) < stop:
                raise CallParseError("extra_data", "unexpected text after the call", after, tool=name)
        except CallParseError as error:
            return PartialCall(error.tool, error=call_error(index, error, reader.text, self.shape, stop))
        return PartialCall(name, args)

    def write(self, call: ParsedCall) -> str:
        """Write a call without the list around it.

        Raises:
            ValueError: If a name is not a Python identifier.
        """
        for name in (call.tool, *call.args):
            if not _IDENTIFIER.fullmatch(name):
                raise ValueError(f"a pythonic call cannot express the name {name!r}")
        return f"{call.tool}({', '.join(f'{key}={value!r}' for key, value in call.args.items())})"


class OLMo3Parser(CallListParser):
    """The format of OLMo 3: one call per line, without brackets.

        <function_calls>f(a='x')
        g()</function_calls>

    Source: the chat template.
    """

    name = "olmo3"
    models = "OLMo 3"
    example = "<function_calls>f(a='x')</function_calls>"
    result_role = "environment"
    format = CallListFormat(
        openers=("<function_calls>",),
        closer="</function_calls>",
        around=("<function_calls>", "\n", "</function_calls>"),
        turn_end=("<|im_end|>",),
        in_brackets=False,
        separators=",\n",
        has_grammar=False,
    )


class PythonicParser(CallListParser):
    """The format of Llama 4, Llama 3.2 and ToolACE: a list on a line of its own.

        [f(a='x', n=3), g()]

    `<|python_start|>` and `<|python_end|>` may surround it. A bare list is a call if one of its items can be
    read, or its first name is that of a tool. After prose on the same line it is text; if it is readable, the
    message is noted "call_behind_prose". Source: Meta's prompt formats of Llama 3.2 and 4, and the chat
    templates.
    """

    name = "pythonic"
    aliases = ("llama4_pythonic",)
    models = "Llama 4, Llama 3.2, ToolACE"
    example = "[f(a='x'), g()]"
    stop = ("<|eot|>", "<|eom|>", "<|eot_id|>")
    result_role = "ipython"
    format = CallListFormat(
        openers=("<|python_start|>", "["),
        shapes={"[": (_FIRST, _PART_OF_FIRST)},
        closer="<|python_end|>",
        around=("[", ", ", "]"),
        turn_end=("<|eot|>", "<|eom|>", "<|eot_id|>", "<|end_of_text|>"),
        has_grammar=False,
    )

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether a list is where calls may be, and begins like one.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        if reader.at(self.format.openers[0], start):
            return True
        if not (_FIRST.match(reader.text, start) or (yield from has_shape(self.format, reader, start))):
            return False
        if reader.is_line_start(start):
            return True
        reader.suspect(start)
        return False

    def has_call_behind_prose(self, reader: Reader) -> bool:
        """Return whether a list after prose calls a known tool, or has arguments if no tools are known."""
        passed = 0
        for place in reader.suspects:
            first = _FIRST.match(reader.text, place)
            if place < passed or first is None or not reader.knows(first[1]):
                continue
            passed = finish(bracket_end(Reader(reader.text), place))
            if passed < 0:
                return False
            attempts = self._attempts(reader, (place + 1, passed - 1))
            if any(attempt.error is None and (reader.tools or attempt.args) for attempt in attempts):
                return True
        return False

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one list; a bare one without calls stays text."""
        if (yield from reader.which(self.format.openers[:1], start)):
            return (yield from super().read(reader, start))
        passed = len(reader.unclosed)
        end = yield from bracket_end(reader, start)
        first = _FIRST.match(reader.text, start)
        is_known = first is not None and reader.tools is not None and first[1] in reader.tools
        if end < 0:
            # A search of the rest of the text costs more than a known unclosed bracket.
            reader.failed_searches += 1 if len(reader.unclosed) == passed else 16
            line_end = reader.text.find("\n", start)
            line = reader.text[start : line_end if line_end >= 0 else len(reader.text)]
            is_prose = not is_known and reader.tools is not None and "'" not in line and '"' not in line
            if is_prose and reader.failed_searches <= self.limits.calls:
                return start + 1
            raise CallParseError("unclosed", "the message ends inside the list of calls", start)
        inside = (start + 1, end - 1)
        attempts = self._attempts(reader, inside)
        errors = [attempt.error for attempt in attempts]
        if not is_known and all(error and error.code not in ("too_large", "too_deep") for error in errors):
            return end
        self._add(reader, start, inside, attempts, end)
        return end

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed list at `start`.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        if (yield from reader.which(self.format.openers[:1], start)):
            return (yield from super().end_of_malformed(reader, start, broke))
        end = yield from bracket_end(reader, start)
        return len(reader.text) if end < 0 else end
