"""Lay out blocks as lines of a given width, and search words in them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchrl_agentic.viewer.render_record import Block
from torchrl_agentic.viewer.text_wrap import Line, Paint, fit, padded, painted, wrapped

# JSON never escapes these. Without i, k and s, which equal non-ASCII characters if case is ignored.
_CERTAIN = re.compile("[0-9A-HJLM-RT-Za-hjlm-rt-z _,.]+")


class Needle:
    """Words that are searched, regardless of case.

    Args:
        words: The words.
    """

    def __init__(self, words: str) -> None:
        self.words = words
        self._pattern = re.compile(re.escape(words), re.IGNORECASE)
        certain = max(_CERTAIN.findall(words), key=len, default="")
        self._bytes = certain.lower().encode()

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the start and end of each match."""
        return [found.span() for found in self._pattern.finditer(text)]

    def may_be_in(self, line: bytes) -> bool:
        """Return False if a line of a dump cannot contain the words. Much faster than parsing the line."""
        return self._bytes in line.lower()


BAR = "▎ "
_AROUND = 400  # characters shown around a match in a hidden part of a text


@dataclass(frozen=True, slots=True)
class Look:
    """How a page is shown.

    Attributes:
        width: Number of cells in a line.
        needle: Searched words, or None.
        focus: Index of the match that the user looks at, or -1.
        is_unfolded: Whether reasoning is shown.
        most: Number of characters shown per text; the whole page shows about twelve times as many.
    """

    width: int = 80
    needle: Needle | None = None
    focus: int = -1
    is_unfolded: bool = False
    most: int = 20_000


@dataclass(frozen=True, slots=True)
class Page:
    """The lines of a page.

    Attributes:
        lines: The lines.
        matches: Line number of each match; -1 for a match that is only shown when it has the focus.
    """

    lines: list[Line] = field(default_factory=list[Line])
    matches: list[int] = field(default_factory=list[int])


def page(blocks: Iterable[Block], look: Look) -> Page:
    """Lay out blocks as a page.

    Args:
        blocks: The blocks.
        look: Width, search and folding.
    """
    made = Page()
    room = 12 * look.most
    for block in blocks:
        spans = [] if look.needle is None else look.needle.spans(block.text)
        is_open = look.is_unfolded or not block.is_folded or bool(spans)
        if block.title:
            made.lines.append(_title(block, look.width, is_open=is_open))
        if is_open and block.text:
            most = min(look.most, max(room, 200))
            _add_text(made, block, spans, look, most)
            room -= min(most, len(block.text))
        else:
            made.matches.extend([-1] * len(spans))
    return made


def _title(block: Block, width: int, *, is_open: bool) -> Line:
    if block.title[0][1] == "rule":  # a rule fills the line
        return padded(fit(block.title, width), width, ("─", "rule"))
    return fit((*block.title, *(() if is_open else ((" · e unfolds", "faint"),))), width)


def _add_text(made: Page, block: Block, spans: Sequence[tuple[int, int]], look: Look, most: int) -> None:
    first = len(made.matches)
    focus = look.focus - first if first <= look.focus < first + len(spans) else None
    paints: list[Paint] = [*block.paints]
    paints.extend((*span, "focus" if place == focus else "match") for place, span in enumerate(spans))
    lines = [-1] * len(spans)
    for begin, end in _shown(len(block.text), most, None if focus is None else spans[focus]):
        if begin:
            _say(made, f"… {begin:,} characters from its beginning:", look.width)
        top = len(made.lines)
        starts = _add_part(made, block, paints, begin, end, look.width)
        for place, (start, _) in enumerate(spans):
            if begin <= start < end:
                lines[place] = top + max(0, bisect_right(starts, start - begin) - 1)
        if end < len(block.text):
            _say(made, f"… {len(block.text) - end:,} more characters: + shows more", look.width)
    made.matches.extend(lines)


def _shown(length: int, most: int, focus: tuple[int, int] | None) -> list[tuple[int, int]]:
    """Return the visible parts of a text, as (start, end): its beginning, and what surrounds the focus."""
    parts = [(0, min(length, most))]
    if focus is not None and focus[1] > parts[0][1]:
        parts.append((max(parts[0][1], focus[0] - _AROUND), min(length, focus[1] + _AROUND)))
    return parts


def _add_part(
    made: Page, block: Block, paints: Sequence[Paint], begin: int, end: int, width: int
) -> list[int]:
    """Lay out a part of a text; return the offset at which each line begins."""
    inside = [
        (max(start, begin) - begin, min(stop, end) - begin, name)
        for start, stop, name in paints
        if start < end and stop > begin
    ]
    starts: list[int] = []
    bar = (BAR, block.style)
    text = block.text[begin:end].removesuffix("\n")
    inside = [(min(start, len(text)), min(stop, len(text)), name) for start, stop, name in inside]
    for line, start in wrapped(painted(text, block.style, inside), max(1, width - len(BAR))):
        starts.append(start)
        made.lines.append((bar, *line))
    return starts


def _say(made: Page, words: str, width: int) -> None:
    made.lines.append(fit(((BAR, "faint"), (words, "more")), width))


def count(blocks: Iterable[Block], needle: Needle) -> int:
    """Return the number of matches in a trajectory, as `page` finds them.

    Args:
        blocks: The blocks of the trajectory.
        needle: The words.
    """
    return sum(len(needle.spans(block.text)) for block in blocks)


def beside(left: Sequence[Block], right: Sequence[Block], look: Look) -> list[Line]:
    """Lay out two trajectories side by side, turn beside turn.

    Args:
        left: Blocks of the first trajectory.
        right: Blocks of the second one.
        look: Width and folding.
    """
    half = (look.width - 3) // 2
    narrow = Look(half, None, -1, look.is_unfolded, look.most // 2)
    turns = sorted({block.turn for block in (*left, *right)})
    found: list[Line] = []
    for turn in turns:
        parts = [[block for block in side if block.turn == turn] for side in (left, right)]
        is_same = [block.text for block in parts[0]] == [block.text for block in parts[1]]
        if turn >= 0:
            words = "same in both" if is_same else "different"
            found.append(fit(((f"turn {turn}: {words} ", "same" if is_same else "differs"),), look.width))
        columns = [page(part, narrow).lines for part in parts]
        for number in range(max(map(len, columns))):
            pair = [column[number] if number < len(column) else () for column in columns]
            found.append(_joined(pair[0], pair[1], half))
    return found


def _joined(left: Line, right: Line, half: int) -> Line:
    return (*padded(left, half), (" ┃ ", "faint"), *right)
