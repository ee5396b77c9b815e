"""Python-like calls whose strings hold anything, newlines and quotes included, with no escapes.

LFM2.5's chat template writes a string argument as a quote, the value without escapes, and a quote. The end of
such a string follows from the text behind the quote and from the content of the string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_agentic.messages import JSON, Fields, fields_of, is_encodable
from torchrl_agentic.parsers.base import Limits
from torchrl_agentic.parsers.engine.attempts import Attempt
from torchrl_agentic.parsers.engine.jsontext import check_size
from torchrl_agentic.parsers.engine.literals import LiteralReader

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


class RawCallReader(LiteralReader):
    """Reads a list of calls whose strings may be raw, and notes where one was.

    A string that is a Python literal, with the next argument, the next call or the end of the list behind it,
    is one. Any other ends at the first quote that has one of these behind it while the brackets and quotes of
    the string are balanced; the tools' schemas say which arguments and calls there are. A quote that could
    end the string too, other than one inside brackets, makes it unreadable, for then either value would be
    a guess.

    stop: the place of the closer behind the list. tools: name → JSON Schema, None if unknown.
    """

    def __init__(self, text: str, stop: int, limits: Limits, tools: Mapping[str, Fields] | None) -> None:
        super().__init__(text, limits)
        self._stop = stop
        self._tools = tools
        self._notes: list[str] = []

    def calls(self, at: int) -> Sequence[Attempt]:
        """Read the list whose bracket opens at `at`.

        Raises:
            Unreadable: it holds something else than calls, or a string whose end is not certain.
        """
        attempts: list[Attempt] = []
        at = self.skip(at + 1)
        while not self._text.startswith("]", at):
            self._notes = []
            name, args, end = self.call(at)
            check_size(self._text, at, end, self._limits)
            attempts.append(Attempt(name, args, notes=tuple(dict.fromkeys(self._notes))))
            at = self._next(end, "]")
        if self.skip(at + 1) != self._stop:
            self._refuse("expecting the end of the list", at + 1)
        return attempts

    def argument(self, at: int, name: str, args: Mapping[str, JSON]) -> tuple[JSON, int]:
        """Read the value of an argument: a literal, or a raw string.

        Raises:
            Unreadable: it is neither.
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
            self._refuse("half of a surrogate pair", at)
        self._notes.append("raw_string")
        return value, end

    def value(self, at: int, depth: int = 1) -> tuple[JSON, int]:
        """Read a literal; also a number such as 07, and a set, which becomes a list."""
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
        """Return whether the text at a place, behind a quote, may follow the value of an argument."""
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
        """Return where the raw string that opens at `start` ends, behind its quote."""
        text = self._text
        if text[start] == '"':  # no template writes these raw; a newline is all that is forgiven
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
                else:  # nothing balances this one any more
                    opened.insert(0, "!") if not opened or opened[0] != "!" else None
        if len(ends) != 1:
            self._refuse("it is not certain where the string ends; escape the quotes in it", start)
        if has_escape and not has_quote:
            self._refuse(
                "the string has escaped quotes but newlines that are none; write them as escapes", start
            )
        return ends[0]

    def _is_apostrophe(self, start: int, place: int) -> bool:
        """Return whether a quote is an apostrophe, as in "it's", and not the begin of f'', r'' and such."""
        if self._text[place] != "'" or not _APOSTROPHE.match(self._text, place - 1):
            return False
        return _PREFIX.search(self._text, max(start + 1, place - 3), place) is None
