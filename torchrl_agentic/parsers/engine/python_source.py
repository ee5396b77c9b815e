"""Find the end of strings and brackets in Python source that a model wrote, without compiling it."""

from __future__ import annotations

import re

from torchrl_agentic.parsers.engine.python_literals import STRING_BODIES
from torchrl_agentic.parsers.engine.reader import Incremental, Reader, end_of, finish

_SIGN = re.compile(r"""["'()\[\]{},\n]|\\.?""", re.DOTALL)
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_NEAR = 1000
_IN_STRING = {quote: re.compile(body, re.DOTALL) for quote, body in STRING_BODIES.items()}


def bracket_end(reader: Reader, place: int, *closers: str) -> Incremental[int]:
    """Return the index after the bracket that closes the one at `place`; -1 if it never closes.

    With `closers`, return the place of the first of them outside of strings instead. Brackets that never
    close are stored in `reader.unclosed`, so that the text is searched once.

    Args:
        reader: The message as read so far.
        place: Index of the opening bracket, or where the search for closers begins.
        *closers: Strings to search for.
    """
    opened: list[str] = []
    places: list[int] = []
    ends = "".join(f"|{re.escape(closer)}" for closer in closers)
    sign = re.compile(f"{_SIGN.pattern}{ends}", re.DOTALL) if closers else _SIGN
    longest = max(map(len, closers), default=1)
    if not closers and reader.is_whole and _is_unclosed(reader, place):
        return -1
    while True:
        match = sign.search(reader.text, place)
        begin, found = (-1, "") if match is None else (match.start(), match[0])
        match = None  # a match object would prevent the text from growing in place
        if begin < 0 or found == "\\":  # at the very end
            if reader.is_whole:
                reader.unclosed.update(places)
                return -1
            place = max(place, len(reader.text) - longest)
            yield
            continue
        if found in "\"'":
            place = _closed_string(reader.text, begin)
            if place < 0:
                place = yield from string_end(reader, begin)
            continue
        if closers:
            if found in closers:
                return begin
        elif found in _PAIRS:
            opened.append(_PAIRS[found])
            places.append(begin)
        elif opened and found == opened[-1]:
            opened.pop()
            places.pop()
            if not opened:
                return begin + 1
        place = begin + len(found)


def _is_unclosed(reader: Reader, place: int) -> bool:
    """Return whether the bracket at `place` is known to never close in the complete text."""
    if place in reader.unclosed:
        return True
    closer = _PAIRS.get(reader.text[place : place + 1])
    if closer is None or reader.text.find(closer, place, place + _NEAR) >= 0:
        return False
    return reader.seek(closer, place) < 0


def _closed_string(text: str, place: int) -> int:
    """Return the end of the one-line string that begins at `place`; -1 if only `string_end` can find it."""
    quote = text[place]
    if len(text) < place + 3 or text.startswith(quote * 3, place):
        return -1
    end = end_of(_IN_STRING[quote].match(text, place + 1), place)
    return end + 1 if text.startswith(quote, end) else -1


def string_end(reader: Reader, place: int) -> Incremental[int]:
    """Return the end of the string that begins at `place`.

    A quote without its closing quote on the line is an ordinary character and ends after itself.

    Args:
        reader: The message as read so far.
        place: Index of the opening quote.
    """
    while len(reader.text) < place + 3 and not reader.is_whole:
        yield
    quote = reader.text[place]
    if reader.text.startswith(quote * 3, place):
        quote *= 3
    pattern, at = _IN_STRING[quote], place + len(quote)
    while True:
        at = end_of(pattern.match(reader.text, at), at)
        if reader.text.startswith(quote, at):
            return at + len(quote)
        if len(quote) == 1 and reader.text.startswith("\n", at):
            return place + 1
        if reader.is_whole:
            return len(reader.text) if len(quote) == 3 else place + 1
        if len(quote) == 3:
            # One or two quotes at the end of the text so far may become three: read them again.
            while at > place + 3 and reader.text[at - 1] == quote[0] and at > len(reader.text) - 2:
                at -= 1
        yield


def open_string(text: str, begin: int, stop: int) -> int:
    """Return the place of a string that opens on the last line of the message and never closes, or -1.

    Args:
        text: Text of the message.
        begin: Index where the search begins.
        stop: Index where it ends.
    """
    reader, at = Reader(text), begin
    while match := _SIGN.search(text, at, stop):
        at = match.end()
        if match[0] in "\"'":
            at = finish(string_end(reader, match.start()))
            if at == match.end() and text.find("\n", at) < 0:
                return match.start()
    return -1


def split_items(text: str, start: int, end: int, separators: str) -> list[tuple[int, int]]:
    """Return the bounds of the items between two places, ignoring separators in brackets and strings.

    Args:
        text: Text of the message.
        start: Index where the items begin.
        end: Index where they end.
        separators: Characters that separate items.
    """
    found: list[tuple[int, int]] = []
    opened, at = list[str](), start
    while match := _SIGN.search(text, at, end):
        sign, at = match[0], match.end()
        if sign in "\"'":
            at = _closed_string(text, match.start())
            if at < 0:
                at = finish(string_end(Reader(text), match.start()))
        elif sign in _PAIRS:
            opened.append(_PAIRS[sign])
        elif opened and sign == opened[-1]:
            opened.pop()
        elif sign in separators and not opened:
            found.append((start, match.start()))
            start = at
    found.append((start, end))
    return [(begin, stop) for begin, stop in found if text[begin:stop].strip()]
