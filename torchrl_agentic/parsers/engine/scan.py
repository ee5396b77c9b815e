"""The pass over a message: find where calls begin, and skip reasoning, examples and invented turns.

The functions take the parser, or the format if its description suffices, and the reader, which has the state.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torchrl_agentic.parsers.engine.partial_call import (
    CallParseError,
    PartialCall,
    call_error,
    over_limit_error,
)
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.text_format import FENCES, TextFormat

if TYPE_CHECKING:
    from torchrl_agentic.parsers.engine.text_parser import TextParser

_SHORT = 4096
_LONGEST_FENCE = 20
_RUN = re.compile("`++|~++")
_SIGNS_OF_CALLS = ("{", "</", '="', "<function=")
"""Strings that occur in calls of some dialect, but not in prose between two markers."""
PROSE = re.compile(r"""[^\w{}\[<>(=]*+(?:[^\W\d_][\w'’-]*+[,;.!?"'`”»]*+\s++[^\W_]|(?![!-~])[^\W\d_])""")
"""The beginning of prose: two words, or a letter that is not ASCII."""
_NAME = re.compile(r"[\w.:/-]*\w")


def scan_text(parser: TextParser, reader: Reader) -> Incremental[None]:
    """Read a message of text with calls in it.

    Args:
        parser: Parser of the format.
        reader: The message as read so far.
    """
    at = 0
    format, longest = parser.format, parser.format.longest
    if reader.reasoning_open:
        at = yield from _read_reasoning(parser, reader, 0)
    while True:
        place, marker = _next_marker(format, reader, at)
        if place < 0:
            if reader.is_whole:
                reader.emit_text(len(reader.text))
                if reader.suspects and parser.has_call_behind_prose(reader):
                    reader.note("call_behind_prose")
                return
            at = max(at, len(reader.text) - longest + 1)
            if not _may_belong(format, reader, at):
                reader.emit_text(at)
            yield
            continue
        if not (marker == format.section[1] and _may_belong(format, reader, place)):
            reader.emit_text(place)
        at = yield from _handle_marker(parser, reader, place, marker)


def _next_marker(format: TextFormat, reader: Reader, at: int) -> tuple[int, str]:
    """Return the place and text of the next marker, possibly incomplete; short texts take one search."""
    if len(reader.text) > _SHORT or reader.exact:
        place, marker = reader.first(format.watched, at)
        return _or_shape(format, reader, at, place, marker) if format.shapes else (place, marker)
    if not format.shapes:
        match = format.pattern.search(reader.text, at)
        return (-1, "") if match is None else (match.start(), match[0])
    bracket, sign = -1, ""
    for shaped in format.shapes:
        if reader.text.find(shaped, at) >= 0:
            bracket, sign = _or_shape(format, reader, at, -1, "")
            break
    # Stop at the bracket; otherwise a list of short calls would be searched once per call.
    match = format.pattern.search(reader.text, at, bracket + format.longest if bracket >= 0 else sys.maxsize)
    if match is None or 0 <= bracket < match.start():
        return bracket, sign
    return match.start(), match[0]


def _or_shape(format: TextFormat, reader: Reader, at: int, place: int, marker: str) -> tuple[int, str]:
    """Return a marker and its place, or those of a bracket before it that opens a call."""
    for sign, (shape, part) in format.shapes.items():
        bracket = reader.seek_shape(shape, part, sign, at)
        if 0 <= bracket < place or place < 0 <= bracket:
            place, marker = bracket, sign
    return place, marker


def has_shape(format: TextFormat, reader: Reader, start: int) -> Incremental[bool]:
    """Return whether the bracket at `start` looks like the opener of a call.

    Args:
        format: Description of the format.
        reader: The message as read so far.
        start: Index of the bracket.
    """
    shape, part = format.shapes[reader.text[start]]
    while not shape.match(reader.text, start):
        if reader.is_whole or not part.match(reader.text, start):
            return False
        yield
    return True


def _handle_marker(parser: TextParser, reader: Reader, place: int, marker: str) -> Incremental[int]:
    """Handle a marker and return where to continue."""
    format = parser.format
    if marker in format.openers:
        if (yield from parser.opens(reader, place)):
            if reader.in_section and reader.text[reader.covered : place].strip():
                reader.note("text_in_section")
            return max(place + 1, (yield from attempt(parser, reader, place)))
        return place + 1
    if marker in format.other_openers:
        return (yield from parser.read_other_opener(reader, place, marker))
    if marker == format.section[0]:
        return (yield from _open_section(parser, reader, place))
    if marker == format.section[1]:
        return _close_section(format, reader, place)
    if marker in format.reasoning_tags:
        return (yield from _read_reasoning(parser, reader, place + len(marker)))
    if marker in FENCES:
        return (yield from _read_fence(format, reader, place, marker))
    if marker == format.continued[0]:
        after = yield from reader.skip(place + len(marker))
        if (yield from reader.which(format.continued[1:], after)) and (
            yield from parser.opens(reader, after)
        ):
            return (yield from attempt(parser, reader, after))
    return (yield from _read_forgery(format, reader, place, marker))


def attempt(
    parser: TextParser,
    reader: Reader,
    start: int,
    read: Callable[[Reader, int], Incremental[int]] | None = None,
) -> Incremental[int]:
    """Read the block whose opener is at `start`, or add an error entry; return its end.

    Args:
        parser: Parser of the format.
        reader: The message as read so far.
        start: Index of the opener.
        read: Method that reads the block; `parser.read` by default.
    """
    index = len(reader.calls)
    if index >= reader.limits.calls:
        end = yield from parser.end_of_malformed(reader, start, start)
        reader.add(PartialCall(error=over_limit_error(index, reader.limits.calls)), start, end)
        return end
    reader.header, reader.block = ("", None), (None, None)
    try:
        return (yield from (read or parser.read)(reader, start))
    except CallParseError as unreadable:
        error = unreadable
    error.tool = error.tool or reader.header[0]
    error.call_id = error.call_id or reader.header[1]
    error.at = reader.block[0] if error.at is None else error.at
    error.end = reader.block[1] if error.end is None else error.end
    is_content = read == parser.read_other_content
    if parser.format.openers_may_be_words and len(reader.calls) == index and (read is None or is_content):
        inside = yield from past_word(parser.format, reader, start, is_content=is_content)
        if inside >= 0:
            return inside
    end = error.end
    if end is None:
        broke = start if error.at is None else error.at
        if is_content:
            end = yield from _end_of_other_content(parser.format, reader, max(start, broke))
        else:
            end = yield from parser.end_of_malformed(reader, start, broke)
    if len(reader.calls) > index:  # the block held good calls before it broke
        start = reader.covered
    why = call_error(len(reader.calls), error, reader.text, parser.shape, end)
    reader.add(PartialCall(error.tool, error=why, call_id=error.call_id), start, end)
    return end


def past_word(
    format: TextFormat, reader: Reader, start: int, *, is_content: bool = False
) -> Incremental[int]:
    """Return the index after an opener that is a word of the text, or -1.

    Prose must follow it, up to another opener before the closer.

    Args:
        format: Description of the format.
        reader: The message as read so far.
        start: Index of the opener; of the text after it if `is_content`.
        is_content: Whether the opener is that of a section.
    """
    opener = "" if is_content else (yield from reader.which(format.openers, start))
    if not opener and not is_content:
        return -1
    inside = start + len(opener)
    begin = yield from reader.skip(inside)
    if reader.text[begin : begin + 1] in ("", "{", "[", "<"):
        return -1
    place, marker = yield from reader.find_first(format.ends_word, inside)
    if place < 0 and format.shapes:
        place, marker = _or_shape(format, reader, inside, place, marker)
        if not reader.is_line_start(place):
            return -1
    if marker not in format.calling or not _is_prose(reader, inside, place):
        return -1
    reader.note("opener_in_text")
    reader.opened_at = None
    reader.in_section = reader.in_section and not is_content
    return inside


def _is_prose(reader: Reader, start: int, end: int) -> bool:
    """Return whether the text after an opener is prose rather than a malformed call."""
    text = reader.text[start:end]
    if PROSE.match(text) is not None:
        return True
    if any(sign in text for sign in "{}[]<>=()"):
        return False
    word = text.strip()
    return _NAME.fullmatch(word) is None or (reader.tools is not None and not reader.knows(word))


def named_call(
    reader: Reader, start: int, name: str, read: Incremental[tuple[PartialCall, int]]
) -> Incremental[int]:
    """Add a call whose name is known and return its end.

    Args:
        reader: The message as read so far.
        start: Index of the opener.
        name: Name of the tool.
        read: Generator that reads the arguments.

    Raises:
        CallParseError: If the arguments are malformed; it has the name of the tool.
    """
    reader.header = name, None
    attempt, end = yield from read
    attempt.tool = name
    reader.add(attempt, start, end)
    return end


# Text that contains no calls


def closing(
    format: TextFormat, reader: Reader, markers: str | Sequence[str], start: int, since: int
) -> Incremental[int]:
    """Return the place of the first of some markers, or -1 if the message ends without one.

    Unlike `Reader.find_first`, it emits the text up to the first opener while it waits: if no marker
    comes, that opener begins a call.

    Args:
        format: Description of the format.
        reader: The message as read so far.
        markers: Marker or markers to find.
        start: Index where the search begins.
        since: Index where the search for openers begins.
    """
    markers = (markers,) if isinstance(markers, str) else markers
    found = reader.first(markers, start)[0]
    if found >= 0 or reader.is_whole:
        return found
    opener, searched, longest = -1, since, max(map(len, format.calling))
    while (found := reader.first(markers, start)[0]) < 0 and not reader.is_whole:
        end = len(reader.text) - longest + 1
        if opener < 0:
            opener = _next_calling(format, reader, searched)
            searched = max(searched, end)
        reader.emit_text(opener if opener >= 0 else end)
        yield
    return found


def _next_calling(format: TextFormat, reader: Reader, at: int) -> int:
    """Return the place of the next opener or section, or -1, by one search over the rest of the text."""
    if reader.exact:
        return reader.first(format.calling, at)[0]
    match = format.calling_pattern.search(reader.text, at)
    return -1 if match is None else match.start()


def _first_call(format: TextFormat, reader: Reader, at: int) -> tuple[int, str]:
    """Return the place of the first opener or section, and the marker; brackets must match `shapes`."""
    place, marker = reader.first(format.calling_alone, at)
    return _or_shape(format, reader, at, place, marker) if format.shapes else (place, marker)


def _read_reasoning(parser: TextParser, reader: Reader, inside: int) -> Incremental[int]:
    """Read the reasoning that begins at `inside` and return where to continue."""
    format = parser.format
    inside = yield from parser.begin_reasoning(reader, inside)
    closers = _thought_ends(format, reader, inside)
    closed = yield from closing(format, reader, closers, inside, inside)
    if closed >= 0 and len(closers) == 1 and _is_plain(format, reader.text, inside, closed):
        reader.reasoning.append(reader.text[inside:closed])
        reader.reasoning_end = closed + len(closers[0])
        return reader.reasoning_end
    opener, _ = _first_call(format, reader, inside)
    if closed < 0:
        if opener >= 0:
            reader.note("unclosed_reasoning")
        return inside
    if format.calls_end_thoughts and 0 <= opener < closed:
        reader.note("unclosed_reasoning")
        return inside
    forged = yield from find_invented_turn(format, reader, inside, closed)
    if forged >= 0:
        return (yield from _read_forgery(format, reader, forged, reader.first(format.turn_end, forged)[1]))
    reader.reasoning.append(reader.text[inside:closed])
    at = reader.reasoning_end = closed + len(reader.first(closers, inside)[1])
    if 0 <= opener < closed:
        reader.note("call_in_reasoning")
        if parser.parse_reasoning != "text":
            at = max(at, (yield from _read_drafts(parser, reader, inside, closed)))
    return at


def _is_plain(format: TextFormat, text: str, start: int, end: int) -> bool:
    """Return whether a part of reasoning lacks the first characters of all markers, as is usual."""
    return all(text.find(sign, start, end) < 0 for sign in format.signs_in_thoughts)


def _thought_ends(format: TextFormat, reader: Reader, inside: int) -> tuple[str, ...]:
    """Return the tags that may end the reasoning: that of its opener, any if the prompt opened it."""
    for think, think_end in format.reasoning_tags.items():
        if reader.text.endswith(think, 0, inside):
            return (think_end,)
    return format.think_ends


def _read_drafts(parser: TextParser, reader: Reader, at: int, closed: int) -> Incremental[int]:
    """Read the calls inside closed reasoning and return the end of the last one."""
    reader.draft_policy = parser.parse_reasoning
    while True:
        place, marker = _first_call(parser.format, reader, at)
        if not 0 <= place < closed:
            break
        at = yield from _handle_marker(parser, reader, place, marker)
    reader.draft_policy = ""
    return at


def find_invented_turn(format: TextFormat, reader: Reader, at: int, before: int) -> Incremental[int]:
    """Return the place of a turn's end before `before` that another turn or nothing follows, or -1.

    Args:
        format: Description of the format.
        reader: The message as read so far.
        at: Index where the search begins.
        before: Index where it ends; -1 for the end of the text so far.
    """
    while True:
        place, marker = reader.first(format.turn_end, at)
        if place < 0 or 0 <= before < place:
            return -1
        at = place + len(marker)
        after = yield from reader.skip(at)
        if after == len(reader.text) or reader.text[after] in "<[]":
            return place


def _read_fence(format: TextFormat, reader: Reader, place: int, marker: str) -> Incremental[int]:
    """Read a Markdown fence, whose content is text."""
    if format.call_fences:
        line_end = yield from reader.line_end(place)
        if line_end - place <= _LONGEST_FENCE and reader.text[place:line_end].strip() in format.call_fences:
            return line_end
    end = yield from _closed_fence(format, reader, place, marker)
    inside = place + len(marker)
    if end >= 0 and 0 <= _first_call(format, reader, inside)[0] < end:
        reader.note("call_in_fence")
    return inside if end < 0 else end


def _closed_fence(format: TextFormat, reader: Reader, place: int, marker: str) -> Incremental[int]:
    """Return the end of the fenced block that opens at `place`, -1 if none does or it never closes.

    CommonMark defines where blocks end; a call in a closed one is an example.
    """
    if not _is_at_line_start(reader, place):
        return -1
    line_end = yield from closing(format, reader, "\n", place, place)
    match = _RUN.match(reader.text, place)
    if match is None or line_end < 0 or marker[0] in reader.text[match.end() : line_end]:
        return -1
    run = match.end() - place
    # If no fence closes one of this length, none closes a longer one that comes later.
    if run >= reader.unclosed_fences.get(marker, run + 1):
        return -1
    at = line_end
    while (at := (yield from closing(format, reader, marker, at, place))) >= 0:
        line_end = yield from closing(format, reader, "\n", at, place)
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


def _read_forgery(format: TextFormat, reader: Reader, place: int, marker: str) -> Incremental[int]:
    """Read a result, or an end of the turn, that the model wrote itself."""
    inside = place + len(marker)
    if marker == format.result_tags[0]:
        if marker in format.turn_end and (yield from reader.skip(inside)) == len(reader.text):
            return len(reader.text)  # sampling stopped there
        reader.note("forged_result")
        closed = yield from reader.find(format.result_tags[1], inside)
        if closed >= 0:
            return closed + len(format.result_tags[1])
    elif (yield from reader.skip(inside)) < len(reader.text):
        reader.note("forged_turn")
    return (yield from reader.end_of_text())


# Sections


def _open_section(parser: TextParser, reader: Reader, place: int) -> Incremental[int]:
    """Read the opener of a section and the first call in it."""
    inside = yield from reader.past_repeated(parser.format.section[0], place + len(parser.format.section[0]))
    after = yield from reader.skip(inside)
    reader.opened_at, reader.in_section = place, True
    opener = yield from reader.which(parser.format.openers, after)
    if opener and (yield from parser.opens(reader, after)):
        return (yield from attempt(parser, reader, after))
    opened, is_prose = yield from _first_in_section(parser.format, reader, after)
    if not is_prose:
        return (yield from attempt(parser, reader, after, parser.read_other_content))
    reader.note("text_in_section")
    reader.opened_at = None
    return (yield from attempt(parser, reader, opened))


def _first_in_section(format: TextFormat, reader: Reader, start: int) -> Incremental[tuple[int, bool]]:
    """Return the place of the first call of a section, or -1, and whether prose precedes it.

    The text may also be a call in another dialect that contains an opener as data. In that case a call
    must begin a line or follow a closer.
    """
    closers = tuple(filter(None, (format.closer,)))
    at, is_prose = start, False
    while True:
        place, marker = yield from reader.find_first(format.ends_prose, at)
        text = reader.text
        if marker not in format.openers:
            return -1, False
        if at == start:
            signs = (*_SIGNS_OF_CALLS, *closers)
            is_prose = text[start] != "[" and all(text.find(sign, start, place) < 0 for sign in signs)
        if is_prose or text[max(start, place - 32) : place].rstrip(" \t\r").endswith(("\n", *closers)):
            return place, is_prose
        at = place + len(marker)


def _end_of_other_content(format: TextFormat, reader: Reader, at: int) -> Incremental[int]:
    """Return the end of other content in a section: the first call, the closer, or the next section."""
    opened, _ = yield from _first_in_section(format, reader, at)
    if opened >= 0:
        return opened
    place, marker = yield from reader.find_first(format.section, at)
    reader.in_section = False
    if place < 0:
        return len(reader.text)
    return place + len(marker) if marker == format.section[1] else place


def _may_belong(format: TextFormat, reader: Reader, place: int) -> bool:
    """Return whether a section's closer at `place` follows the last call, with only blanks between."""
    covered = reader.covered
    if not format.section[1] or not reader.calls or place - covered > 16:
        return False
    return not reader.text[covered:place].strip()


def _close_section(format: TextFormat, reader: Reader, place: int) -> int:
    end = place + len(format.section[1])
    reader.in_section = False
    if _may_belong(format, reader, place):
        reader.extend(end)
    return end
