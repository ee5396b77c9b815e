"""One message while it is read, whether it has come as a whole or is still being written."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
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
"""A part of reading: it yields where it needs more text to go on, and returns what it read.

With the whole message at hand it never yields, so that `parse` and a stream run the same code.
"""

SUSPECTS = 64
_FAR, _FEW = 1000, 8
_BRACKET_OR_QUOTE = re.compile(r'[\[{\]}"]')
_INSIDE_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)


def end_of(match: re.Match[str] | None, otherwise: int) -> int:
    """Where a match ends. A match that is kept keeps its text from growing in place, see `Reader.append`."""
    return otherwise if match is None else match.end()


def finish(steps: Incremental[T]) -> T:
    """Run a part of reading for which the whole message is at hand."""
    try:
        next(steps)
    except StopIteration as done:
        return done.value
    raise AssertionError("reading waits for text, though all of it is there")


class Reader:
    """The text so far, what was found in it, and waiting for more.

    text: it only grows. is_whole: whether nothing more comes. tools: name → JSON Schema, None if unknown.
    exact: marker → the places where it was sampled as a token of its own; elsewhere it is text. opened_at:
    where the section was opened that the next attempt is the first of. in_section: whether a section is open.
    drafts: what to do with calls while those of a closed thought are read. failed_searches: how often something was
    looked for in vain, where that has to end. margin: where the last thought ended. unclosed: see
    `python_text.bracket_end`. unclosed_fences: see `fences`. reasoning_open: whether the message begins inside a
    thought. suspects: places of what would be calls but for the prose before them, up to `SUSPECTS`.
    """

    __slots__ = (
        "_emitted",
        "_known",
        "_numbering",
        "_signs",
        "calls",
        "draft_policy",
        "events",
        "exact",
        "failed_searches",
        "in_section",
        "is_live",
        "is_whole",
        "limits",
        "notes",
        "opened_at",
        "reasoning",
        "reasoning_end",
        "reasoning_open",
        "suspects",
        "text",
        "tools",
        "turn",
        "unclosed",
        "unclosed_fences",
    )  # fmt: skip

    def __init__(
        self,
        text: str = "",
        *,
        is_whole: bool = True,
        tools: Mapping[str, Fields] | None = None,
        turn: int = 0,
        limits: Limits = LIMITS,
        exact: Mapping[str, Sequence[int]] | None = None,
        reasoning_open: bool = False,
    ) -> None:
        self.text = text
        self.turn = turn
        self.reasoning_open = reasoning_open
        self.is_whole = is_whole
        self.is_live = not is_whole
        self.tools = tools
        self.limits = limits
        self.exact = exact or {}
        self.calls: list[ParsedCall] = []
        self.reasoning: list[str] = []
        self.notes: list[str] = []
        self.events: list[Event] = []
        self.opened_at: int | None = None
        self.in_section = False
        self.draft_policy: str = ""
        self.failed_searches = 0
        self.reasoning_end = 0
        self.unclosed: set[int] = set()
        self.unclosed_fences: dict[str, int] = {}
        self.suspects: list[int] = []
        self._emitted = 0
        self._numbering = CallIds(turn)
        self._known: dict[str, tuple[int, int, int]] = {}
        self._signs: dict[str, tuple[int, int, int]] = {}

    def append(self, chunk: str) -> None:
        """Take more text."""
        # A string that only a local variable holds grows in place; `self.text += chunk` would copy it.
        text, self.text = self.text, ""
        text += chunk
        self.text = text

    def end(self) -> None:
        """Know that nothing more comes."""
        self.is_whole = True
        # What had not come by some point may have come since.
        self._known = {marker: known for marker, known in self._known.items() if known[1] >= 0}

    # What is found

    def add(self, attempt: PartialCall, start: int, end: int) -> None:
        """Take an attempt, readable or not, that stands from `start` to `end`."""
        index = len(self.calls)
        if self.opened_at is not None:
            start, self.opened_at = self.opened_at, None
        if attempt.error is None:
            self._judge(attempt, index)
        self.emit_text(start)
        attempt.span = (start, end)
        call = self._numbering.call(attempt, index)
        self.calls.append(call)
        self._emitted = end
        if self.is_live:
            self.events.append(event_of(call))

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
        """Where the last attempt ends; 0 without any."""
        span = self.calls[-1].span if self.calls else None
        return 0 if span is None else span[1]

    def extend(self, end: int) -> None:
        """Let the last call reach to `end`, over the closer of a section around it."""
        call = self.calls[-1]
        assert call.span is not None
        self.calls[-1] = replace(call, span=(call.span[0], end))
        self._emitted = end

    def emit_text(self, end: int) -> None:
        """Take it as certain that what comes before `end`, and in no call, is text."""
        if self.is_live and end > self._emitted:
            self.events.append(TextDelta(self.text[self._emitted : end]))
            self._emitted = end

    def note(self, note: str) -> None:
        """Note something about the message, once."""
        if note not in self.notes:
            self.notes.append(note)

    def suspect(self, place: int) -> None:
        """Remember a place to look at when all of the message has come; one in an example is passed over."""
        if len(self.suspects) < SUSPECTS and not self.draft_policy and self.text[place - 1 : place] != "`":
            self.suspects.append(place)

    def knows(self, name: str) -> bool:
        """Return whether a tool has this name, its namespace aside; True if the tools are unknown."""
        return self.tools is None or name in self.tools or name.rpartition(".")[2] in self.tools

    def result(self, raw: str | Mapping[str, JSON]) -> ParseResult:
        """Give what was read."""
        pieces: list[str] = []
        at = 0
        for call in self.calls:
            assert call.span is not None
            pieces.append(self.text[at : call.span[0]])
            at = call.span[1]
        text = "".join([*pieces, self.text[at:]]) if pieces else self.text
        reasoning, notes = "".join(self.reasoning), tuple(self.notes)
        return ParseResult(text, tuple(self.calls), raw, reasoning=reasoning, notes=notes)

    # Looking into the text; what is called a step waits for text that has not come yet

    def seek(self, marker: str, start: int) -> int:
        """Give the place of a marker from `start` on, as far as the text has come, or -1.

        What is known of a marker is looked for once, which keeps reading linear however often it is asked.
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

        Prose and values mostly lack even the first character of markers, which is found much faster.
        """
        sign = marker[0]
        for _ in range(_FEW):
            begin, found, length = self._signs.get(sign, (start + 1, 0, 0))
            if begin > start or (found < start if found >= 0 else length < len(self.text)):
                found = self.text.find(sign, start)
                if found < 0 or found - start > _FAR:  # worth to be known when another marker is looked for
                    self._signs[sign] = (start, found, len(self.text))
            if found < 0 or self.text.startswith(marker, found):
                return found
            start = found + 1
        return self.text.find(marker, start)

    def seek_shape(self, shape: re.Pattern[str], part: re.Pattern[str], sign: str, start: int) -> int:
        """Return the place of the first match of a pattern from `start` on, or -1.

        As in `seek` it is looked for once.

        part: matches what may still become one when more text comes, whose place is given too. sign: the
        first character of either, and no other of them.
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

    def is_outside_calls(self, marker: str) -> bool:
        """Whether a marker stands outside of all readable calls; arguments of a megabyte are passed over."""
        text, at = self.text, 0
        for call in self.calls:
            if call.error is None and call.span is not None:
                if text.find(marker, at, call.span[0]) >= 0:
                    return True
                at = call.span[1]
        first = text.find(marker[0], at)
        return first >= 0 and text.find(marker, first) >= 0

    def _find(self, marker: str, start: int) -> int:
        places = self.exact.get(marker)
        if places is None:
            return self.text.find(marker, start)
        index = bisect_left(places, start)
        return places[index] if index < len(places) else -1

    def at(self, marker: str, place: int) -> bool:
        """Whether a marker stands at a place."""
        if not self.text.startswith(marker, place):
            return False
        places = self.exact.get(marker)
        return places is None or self._find(marker, place) == place

    def is_line_start(self, place: int) -> bool:
        """Whether only blanks stand before a place on its line, or behind the last attempt or thought."""
        covered = max(self.covered, self.reasoning_end)
        if place < covered:  # in a thought that has been read
            covered = self.covered
        while place > covered and self.text[place - 1] in " \t\r\ufeff":
            place -= 1
        return place == covered or self.text[place - 1] == "\n"

    def first(self, markers: Sequence[str], start: int) -> tuple[int, str]:
        """Give the place of the first of several markers, and which it is, as far as the text has come."""
        place, which, known = -1, "", self._known
        for marker in markers:
            seen = known.get(marker)
            # What is known not to come any more, which most markers do not, is passed over at little cost.
            if seen is not None and seen[1] < 0 and self.is_whole and seen[0] <= start < seen[2]:
                continue
            found = self.seek(marker, start)
            if found >= 0 and (place < 0 or found < place):
                place, which = found, marker
        return place, which

    def find(self, marker: str, start: int) -> Incremental[int]:
        """Step: give the place of a marker from `start` on, or -1."""
        while (found := self.seek(marker, start)) < 0 and not self.is_whole:
            yield
        return found

    def find_first(self, markers: Sequence[str], start: int) -> Incremental[tuple[int, str]]:
        """Step: give the place of the first of several markers, and which it is; (-1, "") if none comes."""
        while (found := self.first(markers, start))[0] < 0 and not self.is_whole:
            yield
        return found

    def line_end(self, start: int) -> Incremental[int]:
        """Step: give where the line ends that a place is on: at a newline, or with the text."""
        end = yield from self.find("\n", start)
        return len(self.text) if end < 0 else end

    def past_repeated(self, marker: str, place: int) -> Incremental[int]:
        """Step: pass over a marker that is written again, and white space before each; note that it was."""
        while (yield from self.which((marker,), (after := (yield from self.skip(place))))):
            self.note("repeated_opener")
            place = after + len(marker)
        return place

    def which(self, markers: Sequence[str], place: int) -> Incremental[str]:
        """Step: give the marker that stands at a place, or ""."""
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
        """Step: give the place of the next character that is no white space, or the end."""
        while (place := skip_whitespace(self.text, place)) == len(self.text) and not self.is_whole:
            yield
        return place

    def json(self, place: int, closers: Sequence[str] | None = ()) -> Incremental[tuple[JSON, int]]:
        """Step: read the JSON value that begins at a place; give it and where it ends.

        closers: what ends the block around it; without any, its own brackets do. Broken JSON in a block that
        never ends was cut off. None: that is not looked into, which may take as long as the text.

        Raises:
            CallParseError: there is none, or it is beyond the limits.
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
        """Step: give where the brackets that open at a place have closed, strings aside; -1 if they never do.

        What has come is counted once, however small the pieces.
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
                        break  # half an escape at the end of what has come
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
