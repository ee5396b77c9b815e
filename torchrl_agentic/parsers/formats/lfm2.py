"""Parser of LFM2 and LFM2.5: calls in Python syntax or as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torchrl_agentic.messages import JSON, Fields, fields_of, is_encodable
from torchrl_agentic.parsers.base import Limits
from torchrl_agentic.parsers.engine.decoded_calls import read_calls
from torchrl_agentic.parsers.engine.json_text import check_size, fits, read_call
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.python_literals import LiteralReader
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.scan import past_word
from torchrl_agentic.parsers.formats.pythonic import CallListFormat, CallListParser

_JSON = re.compile(r"\[?+\s*+\{")
_PART_OF_JSON = re.compile(r"\[\s*+\Z")
_WORD = r"[^\W\d]\w*+(?:\.[^\W\d]\w*+)*+"
_BEHIND = re.compile(
    rf"\s*+(?:,\s*+(?P<argument>[^\W\d]\w*+)\s*+=(?!=)"
    rf"|,?+\s*+\)\s*+(?:,\s*+(?P<call>{_WORD})\s*+\(|(?P<end>,?+\s*+\])))"
)
_SIGN = re.compile(r"""\\.|["'()\[\]{}]""", re.DOTALL)
_PAIRS = {")": "(", "]": "[", "}": "{"}
_APOSTROPHE = re.compile(r"\w'\w")
_PREFIX = re.compile(r"(?<!\w)(?:[rbfuRBFU]|[rRfF][bB]|[bBrR][rRfF]|[rR][fF])\Z")
_DOUBLE_QUOTED = re.compile(r'"([^"\\]*+)"')
_TWO_DIGITS = re.compile(r"0[0-9](?![\w.])")


class LFM2Parser(CallListParser):
    """The format of LFM2 and LFM2.5: a list of calls in Python syntax.

        <|tool_call_start|>[f(a='x', n=3), g()]<|tool_call_end|>

    LFM2.5's chat template puts quotes around a string and escapes nothing in it. A string that is not a
    Python literal is therefore read as a raw one and noted "raw_string"; see `RawCallReader`. If its end is
    ambiguous, the call is an error. JSON calls, one or a list, are read too. Source: the chat templates and
    model cards.
    """

    name = "lfm2"
    models = "LFM2, LFM2.5"
    example = "<|tool_call_start|>[f(a='x')]<|tool_call_end|>"
    format = CallListFormat(
        openers=("<|tool_call_start|>",),
        closer="<|tool_call_end|>",
        around=("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        turn_end=("<|im_end|>",),
        result_tags=("<|tool_response_start|>", "<|tool_response_end|>"),
        has_grammar=False,
    )

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one list of calls, or JSON."""
        format = self.format
        word = yield from past_word(format, reader, start)
        if word >= 0:
            return word
        opener = format.openers[0]
        begin = yield from reader.past_repeated(opener, start + len(opener))
        at = yield from reader.skip(begin)
        while not reader.is_whole and _PART_OF_JSON.match(reader.text, at):
            yield
        if _JSON.match(reader.text, at):
            return (yield from self._json_calls(reader, start, at))
        error: CallParseError | None = None
        inside, end, notes, attempts = (begin, begin), begin, (), list[PartialCall]()
        try:
            inside, end, notes = yield from self._list(reader, begin)
            attempts = self._attempts(reader, inside)
        except CallParseError as unreadable:
            error = unreadable
        if error is not None or any(attempt.error for attempt in attempts):
            stop = (
                reader.seek(format.closer, at)
                if error is None
                else (yield from reader.find(format.closer, at))
            )
            raw = self._raw_attempts(reader, at, stop) if error is not None or stop < end else None
            if raw is not None:
                end = stop + len(format.closer)
                error, notes, attempts = None, (), raw
        if error is not None:
            raise error
        self._refuse_open_string(reader, begin, end, attempts)
        self._add(reader, start, inside, attempts, end, notes)
        return end

    def _raw_attempts(self, reader: Reader, at: int, stop: int) -> Sequence[PartialCall] | None:
        """Read the list at a place with raw strings, up to the closer; return None if it cannot be read."""
        if stop < 0 or not reader.text.startswith("[", at):
            return None
        try:
            return RawCallReader(reader.text, stop, self.limits, reader.tools).calls(at)
        except CallParseError:
            return None

    def _json_calls(self, reader: Reader, start: int, at: int) -> Incremental[int]:
        """Read calls as JSON and return the end of their block."""
        format = self.format
        value, end = yield from reader.json(at, (format.closer,))
        after, notes = (yield from reader.skip(end)), ()
        if (yield from reader.which((format.closer,), after)):
            end = after + len(format.closer)
        elif after == len(reader.text) or (
            yield from reader.which((*format.openers, *format.turn_end), after)
        ):
            notes = ("unclosed_tag",)
        else:
            raise CallParseError(
                "extra_data", f"unexpected text after the JSON, expecting {format.closer}", after
            )
        reader.block = at, end
        found = self._of_json(value, notes, len(reader.calls), fits(reader.text, at, end, self.limits))
        self._add(reader, start, (at, end), found, end)
        return end

    def _of_json(
        self, value: JSON, notes: tuple[str, ...], first: int, is_small: bool
    ) -> Sequence[PartialCall]:
        notes = ("json_call", *notes)
        if isinstance(value, list):
            items = cast("list[JSON]", value)
            return read_calls(items, self.shape, notes, self.limits, first, is_checked=is_small)
        attempt = read_call(value, limits=self.limits)
        attempt.notes += notes
        return [attempt]


class RawCallReader(LiteralReader):
    """A reader of a list of calls whose strings may be raw: any text between quotes, without escapes.

    A string that is a Python literal is read as one if the next argument, the next call or the end of the
    list follows. Any other string ends at the first quote that one of these follows while brackets and quotes
    in the string are balanced; the tools' schemas tell which arguments and calls exist. If another quote
    outside of brackets could end the string too, the call is an error, since either value would be a guess.

    Args:
        text: Text of the message.
        stop: Index of the closer after the list.
        limits: Bounds on size and depth.
        tools: JSON Schema by name of the tool, None if unknown.
    """

    def __init__(self, text: str, stop: int, limits: Limits, tools: Mapping[str, Fields] | None) -> None:
        super().__init__(text, limits)
        self._stop = stop
        self._tools = tools
        self._notes: list[str] = []

    def calls(self, at: int) -> Sequence[PartialCall]:
        """Read the list whose bracket opens at `at`.

        Raises:
            CallParseError: If it contains something else than calls, or a string whose end is ambiguous.
        """
        attempts: list[PartialCall] = []
        at = self.skip(at + 1)
        while not self._text.startswith("]", at):
            self._notes = []
            name, args, end = self.call(at)
            check_size(self._text, at, end, self._limits)
            attempts.append(PartialCall(name, args, notes=tuple(dict.fromkeys(self._notes))))
            at = self._next(end, "]")
        if self.skip(at + 1) != self._stop:
            self._refuse("expecting the end of the list", at + 1)
        return attempts

    def argument(self, at: int, name: str, args: Mapping[str, JSON]) -> tuple[JSON, int]:
        """Read the value of an argument: a literal or a raw string.

        Raises:
            CallParseError: If it is neither.
        """
        at = self.skip(at)
        if not self._text.startswith(("'", '"'), at):
            return self.value(at)
        literal = self._closed_string(at)
        if literal is not None and self._ends_at(literal.end(), name, args):
            return self._string(at)
        end = self._raw_end(at, name, args)
        value = self._text[at + 1 : end - 1]
        if not is_encodable(value):
            self._refuse("an unpaired surrogate", at)
        self._notes.append("raw_string")
        return value, end

    def value(self, at: int, depth: int = 1) -> tuple[JSON, int]:
        """Read a literal, a number such as 07, or a set, which becomes a list."""
        at = self.skip(at)
        if number := _TWO_DIGITS.match(self._text, at):
            self._notes.append("leading_zero")
            return int(number[0]), number.end()
        if not self._text.startswith("{", at) or depth > self._limits.depth:
            return super().value(at, depth)
        first = self.skip(at + 1)
        if self._text.startswith("}", first):
            return super().value(at, depth)
        if self._text.startswith(("'", '"'), first):
            _, end = self._string(first)
            if self._text.startswith(":", self.skip(end)):
                return super().value(at, depth)
        self._notes.append("set_as_list")
        return self._list(at, "}", depth)

    def _ends_at(self, place: int, name: str, args: Mapping[str, JSON]) -> bool:
        """Return whether the text at a place, after a quote, may follow the value of an argument."""
        behind = _BEHIND.match(self._text, place, self._stop)
        if behind is None:
            return False
        if behind["end"] is not None:
            return self.skip(behind.end()) == self._stop
        if behind["call"] is not None:
            return self._schema(behind["call"]) is not None
        argument, schema = behind["argument"], self._schema(name)
        properties = fields_of((schema or {}).get("properties"))
        others: Any = (schema or {}).get("additionalProperties")
        return argument not in args and (not properties or bool(others) or argument in properties)

    def _schema(self, name: str) -> Fields | None:
        """Return the schema of a tool, {} where the tools are unknown, None if there is none of this name."""
        if self._tools is None:
            return {}
        return self._tools.get(name, self._tools.get(name.rpartition(".")[2]))

    def _raw_end(self, start: int, name: str, args: Mapping[str, JSON]) -> int:
        """Return the end of the raw string that opens at `start`, after its quote."""
        text = self._text
        if text[start] == '"':  # templates do not write these raw; only newlines are accepted
            match = _DOUBLE_QUOTED.match(text, start)
            if match is None or not self._ends_at(match.end(), name, args):
                self._refuse("the string is not closed on its line", start)
            return match.end()
        opened, quote = list[str](), ""
        ends, is_doubtful, has_quote, has_escape = list[int](), False, False, False
        for match in _SIGN.finditer(text, start + 1, self._stop):
            sign, place = match[0], match.start()
            if sign == "'" and self._ends_at(place + 1, name, args):
                if not opened and not quote and not is_doubtful:
                    ends = [place + 1]
                    break
                ends.append(place + 1)
                is_doubtful = is_doubtful or not opened or quote != "'" or opened[0] == "!"
            if sign[0] == "\\":
                has_escape = has_escape or sign[1] == "'"
            elif sign in "'\"":
                if not self._is_apostrophe(start, place):
                    has_quote = has_quote or sign == "'"
                    quote = sign if not quote else "" if quote == sign else quote
            elif not quote:
                if sign not in _PAIRS:
                    opened.append(sign)
                elif opened and opened[-1] == _PAIRS[sign]:
                    opened.pop()
                else:  # an unbalanced bracket
                    opened.insert(0, "!") if not opened or opened[0] != "!" else None
        if len(ends) != 1:
            self._refuse("the end of the string is ambiguous; escape the quotes in it", start)
        if has_escape and not has_quote:
            self._refuse("the string has escaped quotes but unescaped newlines; escape these too", start)
        return ends[0]

    def _is_apostrophe(self, start: int, place: int) -> bool:
        """Return whether a quote is an apostrophe, as in "it's", and does not begin f'', r'' and such."""
        if self._text[place] != "'" or not _APOSTROPHE.match(self._text, place - 1):
            return False
        return _PREFIX.search(self._text, max(start + 1, place - 3), place) is None
