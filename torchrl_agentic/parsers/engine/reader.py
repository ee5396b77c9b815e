"""The state of reading one message, complete or still being written."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Generator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeAlias, TypeVar

from torchrl_agentic.messages import JSON, Fields, ParsedCall, ParseResult
from torchrl_agentic.parsers.base import LIMITS, Limits
from torchrl_agentic.parsers.engine.json_text import decode, skip_whitespace
from torchrl_agentic.parsers.engine.partial_call import (
    CallIds,
    CallParseError,
    PartialCall,
    in_reasoning_error,
    over_limit_error,
)
from torchrl_agentic.parsers.streaming import Event, TextDelta, event_of

T = TypeVar("T")
Incremental: TypeAlias = Generator[None, None, T]
"""A generator that yields when it needs more text, and returns its result.

On a complete message it never yields, so `parse` and streams run the same code.
"""

SUSPECTS = 64
_FAR, _FEW = 1000, 8
_BRACKET_OR_QUOTE = re.compile(r'[\[{\]}"]')
_INSIDE_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)


def end_of(match: re.Match[str] | None, otherwise: int) -> int:
    """Return the end of a match, or another place without one.

    Keep no match objects: they prevent the text from growing in place, see `Reader.append`.

    Args:
        match: The match, or None.
        otherwise: The result without a match.
    """
    return otherwise if match is None else match.end()


def finish(steps: Incremental[T]) -> T:
    """Run a reading function to its result; the message must be complete."""
    try:
        next(steps)
    except StopIteration as done:
        return done.value
    raise AssertionError("reading waits for text although the message is complete")


@dataclass(slots=True, eq=False)
class Source:
    """Text that may still grow; methods that return `Incremental` wait for text that has not arrived.

    Attributes:
        text: Text so far; it only grows.
        is_whole: Whether the message is complete.
        limits: Bounds on what is read.
        exact: Places where a marker was sampled as a single token, by marker; elsewhere it is text.
    """

    text: str = ""
    _: KW_ONLY
    is_whole: bool = True
    limits: Limits = LIMITS
    exact: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    _known: dict[str, tuple[int, int, int]] = field(init=False)
    _signs: dict[str, tuple[int, int, int]] = field(init=False)

    def append(self, chunk: str) -> None:
        """Append a chunk of text."""
        # A string grows in place if only a local variable refers to it; `self.text += chunk` copies it.
        text, self.text = self.text, ""
        text += chunk
        self.text = text

    def end(self) -> None:
        """Mark the message as complete."""
        self.is_whole = True
        # Markers that were missing so far may be in the text by now.
        self._known = {marker: known for marker, known in self._known.items() if known[1] >= 0}

    def seek(self, marker: str, start: int) -> int:
        """Return the place of a marker in the text so far, or -1.

        Results are cached, so that reading takes linear time however often a marker is searched for.

        Args:
            marker: The string to find.
            start: Index where the search begins.
        """
        known = self._known.get(marker)
        begin = start
        if known is not None and start >= known[0]:
            _, found, until = known
            if found >= start or (found < 0 and self.is_whole and until > start):
                return found
            if found < 0 and until > start:
                begin = until
        length = len(self.text)
        if self.exact:
            found = self._find(marker, begin)
        else:
            found = self.text.find(marker, begin) if length - begin <= _FAR else self._seek_far(marker, begin)
        self._known[marker] = (
            start,
            found,
            length if self.is_whole else max(begin, length - len(marker) + 1),
        )
        return found

    def _seek_far(self, marker: str, start: int) -> int:
        """Return the place of a marker in a long text, or -1.

        The first character of a marker is rare in prose and values, and is found much faster.
        """
        sign = marker[0]
        for _ in range(_FEW):
            begin, found, length = self._signs.get(sign, (start + 1, 0, 0))
            if begin > start or (found < start if found >= 0 else length < len(self.text)):
                found = self.text.find(sign, start)
                if found < 0 or found - start > _FAR:  # cached for other markers
                    self._signs[sign] = (start, found, len(self.text))
            if found < 0 or self.text.startswith(marker, found):
                return found
            start = found + 1
        return self.text.find(marker, start)

    def seek_shape(self, shape: re.Pattern[str], part: re.Pattern[str], sign: str, start: int) -> int:
        """Return the place of the first match of a pattern, or -1; cached like `seek`.

        Args:
            shape: The pattern.
            part: Pattern of text at the end that may become a match when more text comes; its place is
                returned too.
            sign: First character of any match of either pattern; it occurs in them only there.
            start: Index where the search begins.
        """
        known = self._known.get(shape.pattern)
        begin = start
        if known is not None and start >= known[0]:
            _, found, until = known
            if found >= start:
                return found
            if found < 0:
                begin = max(start, until)
        first = self.text.find(sign, begin)
        match = None if first < 0 else shape.search(self.text, first)
        found = -1 if match is None else match.start()
        rest = -1
        if first >= 0 > found and not self.is_whole:
            rest = self.text.rfind(sign, begin)
            rest = rest if rest >= 0 and part.match(self.text, rest) else -1
        self._known[shape.pattern] = (start, found, rest if rest >= 0 else len(self.text))
        return max(found, rest)

    def _find(self, marker: str, start: int) -> int:
        places = self.exact.get(marker)
        if places is None:
            return self.text.find(marker, start)
        index = bisect_left(places, start)
        return places[index] if index < len(places) else -1

    def at(self, marker: str, place: int) -> bool:
        """Return whether a marker is at a place.

        Args:
            marker: The string to compare.
            place: Index in the text.
        """
        if not self.text.startswith(marker, place):
            return False
        places = self.exact.get(marker)
        return places is None or self._find(marker, place) == place

    def first(self, markers: Sequence[str], start: int) -> tuple[int, str]:
        """Return the place and text of the first of several markers in the text so far, or (-1, "").

        Args:
            markers: The strings to find.
            start: Index where the search begins.
        """
        place, which, known = -1, "", self._known
        for marker in markers:
            seen = known.get(marker)
            # Most markers are known not to occur any more; skip them at little cost.
            if seen is not None and seen[1] < 0 and self.is_whole and seen[0] <= start < seen[2]:
                continue
            found = self.seek(marker, start)
            if found >= 0 and (place < 0 or found < place):
                place, which = found, marker
        return place, which

    def find(self, marker: str, start: int) -> Incremental[int]:
        """Return the place of a marker, or -1 if the message ends without it.

        Args:
            marker: The string to find.
            start: Index where the search begins.
        """
        while (found := self.seek(marker, start)) < 0 and not self.is_whole:
            yield
        return found

    def find_first(self, markers: Sequence[str], start: int) -> Incremental[tuple[int, str]]:
        """Return the place and text of the first of several markers, (-1, "") if the message has none.

        Args:
            markers: The strings to find.
            start: Index where the search begins.
        """
        while (found := self.first(markers, start))[0] < 0 and not self.is_whole:
            yield
        return found

    def end_of_text(self) -> Incremental[int]:
        """Return the end of the message, once it is complete."""
        while not self.is_whole:
            yield
        return len(self.text)

    def line_end(self, start: int) -> Incremental[int]:
        """Return the end of the line: the place of its newline, or the end of the message."""
        end = yield from self.find("\n", start)
        return len(self.text) if end < 0 else end

    def which(self, markers: Sequence[str], place: int) -> Incremental[str]:
        """Return the marker at a place, or "".

        Args:
            markers: Markers to compare; the first that matches counts.
            place: Index in the text.
        """
        while True:
            for marker in markers:
                if self.at(marker, place):
                    return marker
            rest = len(self.text) - place
            if self.is_whole or not any(
                rest < len(marker) and marker.startswith(self.text[place:]) for marker in markers
            ):
                return ""
            yield

    def skip(self, place: int) -> Incremental[int]:
        """Return the place of the next character that is not white space, or the end of the message."""
        while (place := skip_whitespace(self.text, place)) == len(self.text) and not self.is_whole:
            yield
        return place

    def skip_inside(self, place: int) -> Incremental[int]:
        """Return the place of the next character of a call that is not white space.

        Raises:
            CallParseError: If the message ends there.
        """
        place = yield from self.skip(place)
        if place == len(self.text):
            raise CallParseError("unclosed", "the message ends inside the call", place)
        return place

    def json(self, place: int, closers: Sequence[str] | None = ()) -> Incremental[tuple[JSON, int]]:
        """Read the JSON value that begins at a place; return it and its end.

        Args:
            place: Index where the value begins.
            closers: Markers that end the block around it, to tell malformed JSON from a block that was cut
                off; if empty, its own brackets do. None skips the distinction, whose cost may be linear in
                the text.

        Raises:
            CallParseError: If there is no valid JSON, or it is beyond the limits.
        """
        if not self.is_whole:
            yield from self.balanced(place)
        try:
            return decode(self.text, place, self.limits)
        except CallParseError as unreadable:
            error = unreadable
        if (
            closers is not None
            and error.code == "invalid_json"
            and self.text[place : place + 1] in ("{", "[", "")
        ):
            if closers:
                found, _ = yield from self.find_first(closers, error.at or place)
            else:
                found = yield from self.balanced(place)
            if found < 0:
                raise CallParseError("unclosed", "the message ends inside the call", error.at)
        raise error

    def balanced(self, place: int) -> Incremental[int]:
        """Return the index after the brackets that open at a place, ignoring strings; -1 if they never close.

        Each character is read once, however small the chunks of a stream are.
        """
        depth, in_string = 0, False
        while place == len(self.text) and not self.is_whole:
            yield
        if self.text[place : place + 1] not in ("{", "["):
            return -1
        while True:
            end = len(self.text)
            while place < end:
                if in_string:
                    place = end_of(_INSIDE_STRING.match(self.text, place), place)
                    if place == end or self.text[place] == "\\":
                        break  # half an escape at the end of the text so far
                    in_string, place = False, place + 1
                    continue
                place = end_of(_BRACKET_OR_QUOTE.search(self.text, place), end + 1)
                if place > end:
                    place = end
                    break
                if self.text[place - 1] == '"':
                    in_string = True
                else:
                    depth += 1 if self.text[place - 1] in "[{" else -1
                    if not depth:
                        return place
            if self.is_whole:
                return -1
            yield


@dataclass(slots=True, eq=False)
class Reader(Source):
    """The state of reading a message: its text so far, and the calls found in it.

    Attributes:
        tools: JSON Schema by name of the tool; None if the tools are unknown.
        turn: Number of the turn, for ids of calls that have none.
        reasoning_open: Whether the message begins inside reasoning.
        calls: Calls that have been read, malformed ones included.
        reasoning: Texts of closed reasoning.
        notes: Notes of the message.
        events: Events for a stream that were not taken yet.
        is_live: Whether events are collected.
        opened_at: Place where the section opened whose first call comes next; None otherwise.
        in_section: Whether a section is open.
        header: Tool and id of the call that is being read, "" and None until they are known. They become
            those of an error.
        block: Place of the arguments and end of the call that is being read, once known; they become those of
            an error that has none.
        draft_policy: The `parse_reasoning` of the parser while calls in closed reasoning are read; else "".
        failed_searches: Number of long searches without a result, where a bound on them is needed.
        reasoning_end: Index where the last reasoning ended.
        unclosed: Places of brackets that never close; see `python_source.bracket_end`.
        unclosed_fences: Length of the shortest Markdown fence that never closes, by its first characters.
        suspects: Places of calls that count as text because of the prose before them, at most `SUSPECTS`.
    """

    tools: Mapping[str, Fields] | None = None
    turn: int = 0
    reasoning_open: bool = False
    calls: list[PartialCall] = field(init=False)
    reasoning: list[str] = field(init=False)
    notes: list[str] = field(init=False)
    events: list[Event] = field(init=False)
    is_live: bool = field(init=False)
    opened_at: int | None = field(default=None, init=False)
    in_section: bool = field(default=False, init=False)
    header: tuple[str, str | None] = field(default=("", None), init=False)
    block: tuple[int | None, int | None] = field(default=(None, None), init=False)
    draft_policy: str = field(default="", init=False)
    failed_searches: int = field(default=0, init=False)
    reasoning_end: int = field(default=0, init=False)
    unclosed: set[int] = field(init=False)
    unclosed_fences: dict[str, int] = field(init=False)
    suspects: list[int] = field(init=False)
    _emitted: int = field(default=0, init=False)
    _ids: CallIds = field(init=False)

    def __post_init__(self) -> None:
        """Begin without calls; collect events if the message is still being written."""
        self._known, self._signs = {}, {}
        self.calls, self.reasoning, self.notes, self.events = [], [], [], []
        self.unclosed, self.unclosed_fences, self.suspects = set(), {}, []
        self.is_live = not self.is_whole
        self._ids = CallIds(self.turn)

    def add(self, attempt: PartialCall, start: int, end: int) -> None:
        """Add a call, malformed or not.

        Args:
            attempt: The call.
            start: Index where its block begins.
            end: Index where its block ends.
        """
        index = len(self.calls)
        if self.opened_at is not None:
            start, self.opened_at = self.opened_at, None
        if attempt.error is None:
            self._judge(attempt, index)
        self.emit_text(start)
        attempt.span = (start, end)
        self._ids.assign(attempt, index)
        self.calls.append(attempt)
        self._emitted = end
        if self.is_live:
            self.events.append(event_of(attempt.parsed(index)))

    def _judge(self, attempt: PartialCall, index: int) -> None:
        if index >= self.limits.calls:
            attempt.args, attempt.error = {}, over_limit_error(index, self.limits.calls)
        elif self.draft_policy == "error":
            attempt.args, attempt.error = {}, in_reasoning_error(index)
        elif self.draft_policy:
            attempt.notes = (*attempt.notes, "call_in_reasoning")
        if self.tools is not None and attempt.tool not in self.tools:
            # Some models put a namespace before a tool's name.
            bare = attempt.tool.rpartition(".")[2]
            if bare in self.tools:
                attempt.tool, attempt.notes = bare, (*attempt.notes, "stripped_name")

    @property
    def covered(self) -> int:
        """Return the index after the last call, or 0 before the first call."""
        span = self.calls[-1].span if self.calls else None
        return 0 if span is None else span[1]

    def extend(self, end: int) -> None:
        """Extend the span of the last call to `end`, over the closer of its section."""
        call = self.calls[-1]
        assert call.span is not None
        call.span = (call.span[0], end)
        self._emitted = end

    def emit_text(self, end: int) -> None:
        """Emit as text what precedes `end` and was not emitted yet."""
        if self.is_live and end > self._emitted:
            self.events.append(TextDelta(self.text[self._emitted : end]))
            self._emitted = end

    def note(self, note: str) -> None:
        """Add a note to the message, once."""
        if note not in self.notes:
            self.notes.append(note)

    def suspect(self, place: int) -> None:
        """Store a place to check at the end of the message, unless a backtick marks it as an example."""
        if len(self.suspects) < SUSPECTS and not self.draft_policy and self.text[place - 1 : place] != "`":
            self.suspects.append(place)

    def knows(self, name: str) -> bool:
        """Return whether a tool has this name, with or without namespace; True if the tools are unknown."""
        return self.tools is None or name in self.tools or name.rpartition(".")[2] in self.tools

    def result(self, raw: str | Mapping[str, JSON]) -> ParseResult:
        """Return the result of parsing."""
        pieces: list[str] = []
        calls: list[ParsedCall] = []
        at = 0
        for index, call in enumerate(self.calls):
            assert call.span is not None
            calls.append(call.parsed(index))
            pieces.append(self.text[at : call.span[0]])
            at = call.span[1]
        text = "".join([*pieces, self.text[at:]]) if pieces else self.text
        reasoning, notes = "".join(self.reasoning), tuple(self.notes)
        return ParseResult(text, tuple(calls), raw, reasoning=reasoning, notes=notes)

    def is_outside_calls(self, marker: str) -> bool:
        """Return whether a marker occurs outside of all readable calls, without a search inside them."""
        text, at = self.text, 0
        for call in self.calls:
            if call.error is None and call.span is not None:
                if text.find(marker, at, call.span[0]) >= 0:
                    return True
                at = call.span[1]
        first = text.find(marker[0], at)
        return first >= 0 and text.find(marker, first) >= 0

    def is_line_start(self, place: int) -> bool:
        """Return whether only blanks precede a place on its line, or since the last call or reasoning."""
        covered = max(self.covered, self.reasoning_end)
        if place < covered:  # inside reasoning that has been read
            covered = self.covered
        while place > covered and self.text[place - 1] in " \t\r\ufeff":
            place -= 1
        return place == covered or self.text[place - 1] == "\n"

    def past_repeated(self, marker: str, place: int) -> Incremental[int]:
        """Skip repetitions of a marker and the white space before each; note that it was repeated.

        Args:
            marker: The marker.
            place: Index after its first occurrence.
        """
        while (yield from self.which((marker,), (after := (yield from self.skip(place))))):
            self.note("repeated_opener")
            place = after + len(marker)
        return place
