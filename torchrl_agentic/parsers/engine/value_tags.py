"""The rule for damaged tags around raw values, shared by all formats that write values between tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from torchrl_agentic.parsers.engine.reader import Incremental, Reader

_LONGEST = 96
_SHORTEST, _SIMILAR = 3, 0.8
_BEGIN = re.compile(r"<|&lt;|[\[({](?=\s*+/)|(?<!<)/(?=[^/<>]*+>)")
_TAG = re.compile(r"(?P<lead>(?:&lt;)?+\W*+)(?P<name>[\w:.|｜-]*+)")
_COMPLETE = re.compile(r"<[^<>]*+>")
_ELEMENT = re.compile(r"<(?P<slash>/?+)(?P<name>[\w:.|｜-]++|(?=>))(?P<rest>[^<>]*+)>")
_AFTER = re.compile(r"""[^\s'"`()\[\]{}]{0,3}+""")
_NO_LETTERS = re.compile(r"[\W\d_]++")


class ValueTags:
    """Decide which tags in and after a value are damaged spellings of those that the format expects there.

    A tag in the place of an expected one is damaged if it has no name or the name of the argument, or if its
    name resembles the expected one: by its letters alone, in lower case, one of the two contains the other,
    or they are similar. It is data if it ends an element that the value opens.

    Args:
        argument: Name of the argument.
        begin: Index where its value begins.
        others: End tags of the call and its section, which are damaged tags only where an argument follows.
    """

    __slots__ = ("_argument", "_begin", "_counted", "_open", "_others")

    def __init__(self, argument: str, begin: int, others: Sequence[str] = ()) -> None:
        self._argument = argument
        self._begin = self._counted = begin
        self._others = others
        self._open: dict[str, int] = {}

    def damaged_before(self, text: str, place: int, expected: str, *, goes_on: bool) -> int:
        """Return the place of a damaged end tag with only blanks between it and `place`, or -1.

        Args:
            text: Text of the message.
            place: Index of a tag of the format.
            expected: The end tag of the value.
            goes_on: Whether the tag at `place` begins another argument of the call.
        """
        since = max(self._begin, place - _LONGEST)
        window = text[since:place].rstrip()
        begins = [match.start() for match in _BEGIN.finditer(window)]
        for begin in begins[-1 - expected.count("<") :]:
            tag = window[begin:]
            is_other = tag in self._others
            if goes_on if is_other else self._is_damaged(tag, expected):
                return -1 if self.is_data(text, since + begin) else since + begin
            if is_other:
                break
        return -1

    def is_damaged_at(self, reader: Reader, place: int, expected: str) -> Incremental[bool]:
        """Return whether a damaged spelling of a tag, with an end, is at a place.

        Args:
            reader: The message as read so far.
            place: Index where the tag should begin.
            expected: The tag, or its beginning.
        """
        while not reader.is_whole and len(reader.text) - place < _LONGEST:
            if reader.text.find(">", place) >= 0:
                break
            yield
        match = _COMPLETE.match(reader.text, place, place + _LONGEST)
        if match is None or match[0] in self._others or not self._is_damaged(match[0], expected):
            return False
        return not self.is_data(reader.text, place)

    def is_data(self, text: str, at: int) -> bool:
        """Return whether the tag at a place ends an element that the value opens.

        Args:
            text: Text of the message.
            at: Index of the tag; elements before it are counted once, so places must not decrease.
        """
        for match in _ELEMENT.finditer(text, self._counted, at):
            count = self._open.get(match["name"], 0)
            if match["slash"]:
                self._open[match["name"]] = max(0, count - 1)
            elif not match["rest"].endswith("/"):
                self._open[match["name"]] = count + 1
        self._counted = max(self._counted, at)
        match = _TAG.match(text, at)
        return match is not None and self._open.get(match["name"], 0) > 0

    def _is_damaged(self, tag: str, expected: str) -> bool:
        if tag.startswith(expected):
            return len(tag) > len(expected) and _AFTER.fullmatch(tag, len(expected)) is not None
        letters, wanted = _letters(tag), _letters(expected)
        if letters == wanted or (len(tag) > 1 and expected.startswith(tag)):
            return True
        match = _TAG.match(tag)
        assert match is not None
        name, is_end = match["name"], "/" in match["lead"] or "\\" in match["lead"]
        closers = max(1, expected.count(">"))
        after = tag[match.end() :].split(">", closers)[closers:]
        if (after and _AFTER.fullmatch(after[0]) is None) or ("/" in expected and not is_end):
            return False
        if not name:
            return is_end
        return name == self._argument or _resembles(_letters(name), wanted) or _are_similar(letters, wanted)


def _resembles(letters: str, wanted: str) -> bool:
    short, long = sorted((letters, wanted), key=len)
    return (len(short) >= _SHORTEST and short in long) or _are_similar(letters, wanted)


def _are_similar(letters: str, wanted: str) -> bool:
    matcher = SequenceMatcher(None, letters, wanted)
    return matcher.real_quick_ratio() >= _SIMILAR and matcher.ratio() >= _SIMILAR


def _letters(text: str) -> str:
    return _NO_LETTERS.sub("", text).lower()
