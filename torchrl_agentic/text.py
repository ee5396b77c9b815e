"""Functions of text that every layer may use: truncate it, show it safely, read it as JSON, suggest a name.

This module imports nothing of ours.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import unicodedata
from collections.abc import Iterable
from typing import Any, Literal

MAX_INT_BITS = 14_000
"""Larger integers, of about 4,200 digits and more, are neither written nor read by Python's json."""
MAX_DEPTH = 200
"""How many lists and mappings may be inside each other; pydantic's JSON reader has the same bound."""
MAX_LINE_DEPTH = 255
"""The bound for a line of a dump or a cassette, which wraps such a value in levels of its own."""

Side = Literal["left", "right", "middle"]


def truncate(text: str, max_chars: int, *, side: Side = "right", mark: str = "…") -> str:
    """Return a text of at most `max_chars` characters, the mark of the cut included.

    Args:
        text: The text.
        max_chars: Length of the result at most; no less than that of the mark.
        side: Which part is dropped.
        mark: What takes its place.
    """
    if len(text) <= max_chars:
        return text
    kept = max_chars - len(mark)
    head = {"left": 0, "right": kept, "middle": (kept + 1) // 2}[side]
    return text[:head] + mark + text[len(text) - (kept - head) :]


def truncate_middle(text: str, max_chars: int) -> str:
    """Return the head and the tail of a text, with a line between them that counts the omitted characters.

    Args:
        text: The text.
        max_chars: How many characters of the text are kept at most; the line comes on top.
    """
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n… [{len(text) - 2 * half} characters omitted] …\n{text[len(text) - half :]}"


def shorten(value: Any, max_chars: int = 80) -> str:
    """Return a text, or the `repr` of another value, truncated for an error message.

    Args:
        value: A text or any other value.
        max_chars: Length of the result at most, in characters.
    """
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, or nested too deep
        text = f"a huge {type(value).__name__}"
    return truncate(text, max_chars)


def one_line(text: str, max_chars: int) -> str:
    """Return a text as one line, with escapes for characters that cannot be printed.

    Args:
        text: The text.
        max_chars: Length of the line at most, in characters.
    """
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:max_chars])
    line = line.encode("utf-8", "replace").decode()
    return line if len(line) <= max_chars and len(text) <= max_chars else f"{line[: max_chars - 1]}…"


def nearest(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to another one, or None if none is similar.

    Args:
        name: The name that was met; anything but a text is compared by its `str`.
        known: The names that exist.
        cutoff: How similar it must be at least, from 0 to 1; see `difflib.get_close_matches`.
    """
    return next(iter(difflib.get_close_matches(str(name), list(known), 1, cutoff)), None)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for an error message about an unknown name, or "" if none is similar.

    Args:
        name: The name that was met.
        known: The names that exist.
    """
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near!r}?"


def unknown_key(key: object, known: Iterable[str], hint: str = "") -> str:
    """Return the error message for a key that does not exist.

    Args:
        key: The key that was met.
        known: The keys that exist.
        hint: Text to add if none of them is similar.
    """
    known = list(known)
    expected = ", ".join(known) or "(none)"
    return f"unknown key {key!r}; expected one of {expected}{did_you_mean(key, known) or hint}"


_ODD = re.compile("[^ -~]+")
_MARKS = 3  # as many as a letter of a living script carries
_SELECTORS = "\ufe0e\ufe0f"  # ask for a picture, or for none: terminals disagree on the width


def printable(text: str) -> str:
    """Return foreign text as one line that a terminal can show: it moves no cursor and sets no colors.

    Control characters become their pictures (escape is ␛, a newline ␊). Other characters without a shape of
    their own (bidi overrides, zero width, halves of surrogate pairs) become their code, as in ‹202E›. Spaces
    of all kinds become plain ones. Marks above and below a letter beyond the third are counted.
    """
    if text.isascii() and text.isprintable():
        return text
    return _ODD.sub(lambda found: _shown(found[0]), text)


def _shown(run: str) -> str:
    shown: list[str] = []
    marks = 0
    for character in run:
        category = unicodedata.category(character)
        if category in ("Mn", "Me"):
            marks += 1
            if marks <= _MARKS and character not in _SELECTORS:
                shown.append(character)
            continue
        if marks > _MARKS:
            shown.append(f"‹+{marks - _MARKS} marks›")
        marks = 0
        shown.append(character if character.isprintable() else _symbol(character, category))
    if marks > _MARKS:
        shown.append(f"‹+{marks - _MARKS} marks›")
    return "".join(shown)


def _symbol(character: str, category: str) -> str:
    code = ord(character)
    if category == "Zs":
        return " "
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"‹{code:02X}›"


_CONTAINERS = (dict, list, tuple)
are_scalars = frozenset((str, int, float, bool, type(None))).issuperset


class TooDeepError(ValueError):
    """A value is nested too deep."""

    def __init__(self, max_depth: int = MAX_DEPTH) -> None:
        super().__init__(f"nested more than {max_depth} levels deep; make it flatter")


class TooManyValuesError(ValueError):
    """A value contains too many values."""

    def __init__(self, max_values: int) -> None:
        super().__init__(f"more than {max_values} values")


def count_values(value: Any, *, max_values: int = sys.maxsize, max_depth: int = MAX_DEPTH) -> int:
    """Return the number of values inside a value, at any depth.

    Args:
        value: A value of dicts, lists and tuples. A part that occurs in several places counts in each.
        max_values: Bound on that number.
        max_depth: How many dicts, lists and tuples may be inside each other.

    Raises:
        TooDeepError: If the value is nested deeper, or contains itself.
        TooManyValuesError: If there are more values.
    """
    count = depth = 0
    level: list[Any] = [value] if isinstance(value, _CONTAINERS) else []
    while level:
        depth += 1
        if depth > max_depth:
            raise TooDeepError(max_depth)
        inner: list[Any] = []
        for node in level:
            count += len(node)
            if count > max_values:
                raise TooManyValuesError(max_values)
            items: Any = node.values() if isinstance(node, dict) else node  # pyright: ignore[reportUnknownVariableType]
            if not are_scalars(map(type, items)):  # much faster than to look at each
                inner += [item for item in items if isinstance(item, _CONTAINERS)]
        level = inner
    return count


def read_json(text: str | bytes | bytearray, *, max_depth: int = MAX_DEPTH, **options: Any) -> Any:
    """Read JSON as `json.loads` does, with a bound on its depth that holds in every version of Python.

    Args:
        text: The JSON.
        max_depth: How many lists and mappings may be inside each other.
        options: Passed to `json.loads`.

    Raises:
        TooDeepError: If the value is nested deeper.
        ValueError: If the text is not JSON.
    """
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise TooDeepError(max_depth) from None
    # Only text with as many brackets can be nested as deep.
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > max_depth:  # pyright: ignore[reportArgumentType]
        count_values(value, max_depth=max_depth)
    return value


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def canonical_json(value: Any) -> str | None:
    """Return the JSON of a value, the same text for equal values, or None if no JSON can hold it."""
    try:
        return _canonical(value)
    except (TypeError, ValueError, RecursionError):
        return None
