"""Wrap styled text into lines of a given width."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from rich.cells import cell_len, get_character_cell_size

from torchrl_agentic.text import printable

Piece: TypeAlias = tuple[str, str]
"""A text and the name of its style."""
Line: TypeAlias = tuple[Piece, ...]
"""A line of the screen: printable pieces that fit the width."""
Paint: TypeAlias = tuple[int, int, str]
"""A style for text[start:stop]; where several overlap, the last one wins."""


def painted(text: str, style: str, paints: Sequence[Paint] = ()) -> Iterator[Piece]:
    """Yield the pieces of a text, split where the style changes.

    Args:
        text: The text.
        style: Its style.
        paints: Other styles for parts of it.
    """
    begins: dict[int, list[tuple[int, int, str]]] = {}
    edges = {0, len(text)}
    for place, (start, stop, name) in enumerate(paints):
        begins.setdefault(start, []).append((place, stop, name))
        edges.update((start, stop))
    over = [(-1, len(text), style)]
    for start, stop in itertools.pairwise(sorted(edges)):
        over = [paint for paint in over if paint[1] > start] + begins.get(start, [])
        yield text[start:stop], max(over)[2]


def wrapped(pieces: Iterable[Piece], width: int) -> Iterator[tuple[Line, int]]:
    """Split pieces at newlines, and into printable lines that fit the width.

    Args:
        pieces: The pieces.
        width: Number of cells in a line.

    Yields:
        Each line, and the number of characters of the pieces before it, newlines included.
    """
    offset = begin = 0
    line: list[tuple[str, str, int]] = []
    for text, style in pieces:
        head, *rest = text.split("\n")
        line.append((head, style, offset))
        offset += len(head)
        for part in rest:
            yield from _fitted(line, begin, width)
            offset += 1
            begin = offset
            line = [(part, style, offset)]
            offset += len(part)
    yield from _fitted(line, begin, width)


def _fitted(line: list[tuple[str, str, int]], begin: int, width: int) -> Iterator[tuple[Line, int]]:
    """Yield the lines of the screen for one line of text."""
    shown = [(printable(text), style) for text, style, _ in line]
    whole = "".join(text for text, _ in shown)
    cuts = breaks(whole, width)
    if not cuts:
        yield tuple((text, style) for text, style in shown if text), begin
        return
    length = sum(len(text) for text, _, _ in line)
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        # Too late by some characters if symbols replace control characters, but never beyond the line.
        yield _part(shown, start, stop), begin + min(start, length)


def _part(pieces: Sequence[Piece], start: int, stop: int) -> Line:
    found: list[Piece] = []
    offset = 0
    for text, style in pieces:
        part = text[max(0, start - offset) : max(0, stop - offset)]
        if part:
            found.append((part, style))
        offset += len(text)
    return tuple(found)


def breaks(text: str, width: int) -> list[int]:
    """Return the positions at which to split a text so that each part fits, at spaces if possible.

    Args:
        text: The text.
        width: Number of cells in a line.
    """
    if len(text) * 2 <= width or (text.isascii() and len(text) <= width):
        return []
    found: list[int] = []
    start = 0
    while (stop := _reach(text, start, width)) < len(text):
        space = text.rfind(" ", start + 1, stop)
        start = space + 1 if space > start + width // 3 else stop
        found.append(start)
    return found


def _reach(text: str, start: int, width: int) -> int:
    """Return the end of the part of a text that fits a width, at least one character."""
    stop = min(len(text), start + width)
    if text[start:stop].isascii():
        return max(stop, start + 1)
    room = width
    for index in range(start, len(text)):
        room -= get_character_cell_size(text[index])
        if room < 0:
            return max(index, start + 1)
    return len(text)


def fit(pieces: Iterable[Piece], width: int) -> Line:
    """Return printable pieces that fit the width; a longer line ends with an ellipsis.

    Args:
        pieces: The pieces.
        width: Number of cells in the line.
    """
    found: list[Piece] = []
    room = width
    for text, style in pieces:
        shown = printable(text[: 4 * width])
        cells = cell_len(shown)
        if cells > room or len(text) > 4 * width:
            stop = _reach(shown, 0, room - 1) if room > 1 else 0
            if (
                cell_len(shown[:stop]) >= room
            ):  # `_reach` returns at least one character, which may be too wide
                stop = 0
            found.append((shown[:stop] + "…"[:room], style))
            return tuple(found)
        found.append((shown, style))
        room -= cells
    return tuple(found)


def padded(line: Line, width: int, filling: Piece = (" ", "")) -> Line:
    """Fill a line up to a width.

    Args:
        line: The line.
        width: Number of cells.
        filling: Character to fill with, and its style.
    """
    missing = width - sum(cell_len(text) for text, _ in line)
    return (*line, (filling[0] * missing, filling[1])) if missing > 0 else line


def plain(line: Line) -> str:
    """Return the text of a line without its styles."""
    return "".join(text for text, _ in line)
