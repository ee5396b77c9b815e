"""Find the end of fenced code blocks as CommonMark defines them; a call in a closed one is an example."""

from __future__ import annotations

import re
from collections.abc import Callable

from torchrl_agentic.parsers.engine.reader import Incremental, Reader

FENCES = ("```", "~~~")
_RUN = re.compile("`++|~++")


def closed_fence(
    reader: Reader, place: int, marker: str, closing: Callable[[Reader, str, int, int], Incremental[int]]
) -> Incremental[int]:
    """Return the end of the fenced block that opens at `place`, -1 if none does or it never closes.

    Args:
        reader: The message as read so far.
        place: Index of the fence's first character.
        marker: The fence: three backticks or tildes.
        closing: `TextScanner.closing`, which waits for a marker.
    """
    if not _is_at_line_start(reader, place):
        return -1
    line_end = yield from closing(reader, "\n", place, place)
    match = _RUN.match(reader.text, place)
    if match is None or line_end < 0 or marker[0] in reader.text[match.end() : line_end]:
        return -1
    run = match.end() - place
    # If no fence closes one of this length, none closes a longer one that comes later.
    if run >= reader.unclosed_fences.get(marker, run + 1):
        return -1
    at = line_end
    while (at := (yield from closing(reader, marker, at, place))) >= 0:
        line_end = yield from closing(reader, "\n", at, place)
        match = _RUN.match(reader.text, at)
        end = at + len(marker) if match is None else match.end()
        rest = reader.text[end : len(reader.text) if line_end < 0 else line_end]
        if end - at >= run and not rest.strip() and _is_at_line_start(reader, at):
            return end
        at = end
    reader.unclosed_fences[marker] = run
    return -1


def _is_at_line_start(reader: Reader, place: int) -> bool:
    """Return whether at most three spaces precede a place on its line or since the last call."""
    begin = reader.text.rfind("\n", max(0, place - 4), place) + 1
    begin = max(begin, *(end for end in (reader.covered, reader.reasoning_end) if end <= place))
    return place - begin <= 3 and not reader.text[begin:place].strip(" ")
