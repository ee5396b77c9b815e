"""One pass over a message: where its calls begin, and what only looks like one."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias

from torchrl_agentic.parsers.base import LIMITS, Limits, ToolCallParser
from torchrl_agentic.parsers.engine.attempts import Attempt, Unreadable, explain, over_limit
from torchrl_agentic.parsers.engine.fences import FENCES, closed_fence
from torchrl_agentic.parsers.engine.reader import Reader, Steps

_SHORT = 4096
ReasoningPolicy: TypeAlias = Literal["text", "error", "execute"]


class TextScanner(ToolCallParser):
    """The part of a `TextParser` that goes over a message.

    openers: what begins an attempt. closer: what ends a block; empty: nothing does. section: what stands
    around all calls of a message in some formats. think: the tags of reasoning. other_thoughts: those that
    a prompt may open instead. turn_end: tokens that end the message. forged: the tags of results, which a
    model may write too; nothing between them is a call. fences_are_text: whether a call in a Markdown fence
    is an example. shape: what a right call looks like, for error messages.

    parse_reasoning: what to do with a call inside a closed thought: leave it as "text", answer it with an
    "error", or "execute" it. After one that never closes a call is a call, as models in training write it.
    reasoning_open: whether the prompt has opened the thinking already. tolerance: "lenient" allows a closed
    list of fixes that lose nothing, each noted on the call (`parsers.lenient`).
    """

    openers: tuple[str, ...] = ()
    closer: ClassVar[str] = ""
    section: ClassVar[tuple[str, str]] = ("", "")
    think: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    other_thoughts: ClassVar[tuple[tuple[str, str], ...]] = ()
    turn_end: ClassVar[tuple[str, ...]] = ()
    forged: tuple[str, str] = ("", "")
    fences_are_text: ClassVar[bool] = True
    shape: str = ""

    def __init__(
        self,
        *,
        parse_reasoning: ReasoningPolicy = "text",
        reasoning_open: bool = False,
        tolerance: Literal["strict", "lenient"] = "strict",
        limits: Limits = LIMITS,
    ) -> None:
        if parse_reasoning not in ("text", "error", "execute"):
            raise ValueError(f'parse_reasoning is "text", "error" or "execute"; got {parse_reasoning!r}')
        if tolerance not in ("strict", "lenient"):
            raise ValueError(f'tolerance is "strict" or "lenient"; got {tolerance!r}')
        self.parse_reasoning: ReasoningPolicy = parse_reasoning
        self.reasoning_open = reasoning_open
        self.tolerance = tolerance
        self.limits = limits

    # What a subclass supplies

    @abstractmethod
    def read(self, reader: Reader, start: int) -> Steps[int]:
        """Read the block whose opener stands at `start`: `reader.add` what it holds, give where it ends.

        Raises:
            Unreadable: the block is no call; it ends where `end_of_bad` says.
        """

    def opens(self, reader: Reader, start: int) -> Steps[bool]:
        """Step: whether what looks like an opener at `start` begins an attempt."""
        del reader, start
        return True
        yield

    def end_of_bad(self, reader: Reader, start: int, broke: int) -> Steps[int]:
        """Step: give the end of the unreadable block at `start`: its closer, or the end of the text.

        Looked for from where it broke; nothing inside is taken for an opener.
        """
        if not self.closer:
            return (yield from self.end_of_text(reader))
        closer = yield from reader.find(self.closer, max(start, broke))
        return len(reader.text) if closer < 0 else closer + len(self.closer)

    # One pass over the message

    def scan(self, reader: Reader) -> Steps[None]:
        """Step: read the message."""
        at = 0
        longest = max(map(len, self._watched))
        if self.reasoning_open:
            at = yield from self._reason(reader, 0)
        while True:
            place, marker = self._next_marker(reader, at)
            if place < 0:
                if reader.is_whole:
                    reader.say(len(reader.text))
                    return
                at = max(at, len(reader.text) - longest + 1)
                if not self._may_belong(reader, at):
                    reader.say(at)
                yield
                continue
            if not (marker == self.section[1] and self._may_belong(reader, place)):
                reader.say(place)
            at = yield from self._at_marker(reader, place, marker)

    @cached_property
    def _watched(self) -> tuple[str, ...]:
        """What `scan` stops at."""
        fences = FENCES if self.fences_are_text else ()
        markers = (*self.openers, *self.section, self.think[0], self.forged[0], *fences, *self.turn_end)
        return tuple(filter(None, markers))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self._watched, key=len, reverse=True))))

    def _next_marker(self, reader: Reader, at: int) -> tuple[int, str]:
        """Give the place of the next marker, and which it is; short texts are searched once for all."""
        if len(reader.text) > _SHORT or reader.exact:
            return reader.first(self._watched, at)
        match = self._pattern.search(reader.text, at)
        return (-1, "") if match is None else (match.start(), match[0])

    def _at_marker(self, reader: Reader, place: int, marker: str) -> Steps[int]:
        """Step: do what a marker asks for; give where to go on."""
        if marker in self.openers:
            if (yield from self.opens(reader, place)):
                return max(place + 1, (yield from self.attempt(reader, place)))
            return place + 1
        if marker == self.section[0]:
            return (yield from self._open_section(reader, place))
        if marker == self.section[1]:
            return self._close_section(reader, place)
        if marker == self.think[0]:
            return (yield from self._reason(reader, place + len(marker)))
        if marker in FENCES:
            return (yield from self._fence(reader, place, marker))
        return (yield from self._forgery(reader, place, marker))

    def attempt(
        self, reader: Reader, start: int, read: Callable[[Reader, int], Steps[int]] | None = None
    ) -> Steps[int]:
        """Step: read the block whose opener stands at `start`, with `read` if it needs another one."""
        index = len(reader.calls)
        if index >= reader.limits.calls:
            end = yield from self.end_of_bad(reader, start, start)
            reader.add(Attempt(error=over_limit(index, reader.limits.calls)), start, end)
            return end
        try:
            return (yield from (read or self.read)(reader, start))
        except Unreadable as unreadable:
            error = unreadable
        end = error.end
        if end is None:
            find_end = self.end_of_odd if read == self.read_odd_section else self.end_of_bad
            end = yield from find_end(reader, start, start if error.at is None else error.at)
        if len(reader.calls) > index:  # the block held good calls before it broke
            start = reader.covered
        why = explain(len(reader.calls), error, reader.text, self.shape, end)
        reader.add(Attempt(error.tool, error=why, call_id=error.call_id), start, end)
        return end

    def named_call(
        self, reader: Reader, start: int, name: str, read: Steps[tuple[Attempt, int]]
    ) -> Steps[int]:
        """Step: add the call whose name is known and whose arguments `read` reads; give where it ends.

        Raises:
            Unreadable: the arguments cannot be read; it says whose they are.
        """
        try:
            attempt, end = yield from read
        except Unreadable as error:
            error.tool = name
            raise
        attempt.tool = name
        reader.add(attempt, start, end)
        return end

    # What is no call

    def closing(self, reader: Reader, marker: str, start: int, since: int) -> Steps[int]:
        """Step: like `Reader.find`; text up to the first opener from `since` on is certain meanwhile.

        Should the marker never come, that opener begins a call.
        """
        while (found := reader.seek(marker, start)) < 0 and not reader.is_whole:
            opener, _ = reader.first(self._calling, since)
            reader.say(opener if opener >= 0 else len(reader.text) - max(map(len, self._calling)) + 1)
            yield
        return found

    @cached_property
    def _calling(self) -> tuple[str, ...]:
        """What begins calls."""
        return tuple(filter(None, (*self.openers, self.section[0])))

    def _reason(self, reader: Reader, inside: int) -> Steps[int]:
        """Step: read what the model thinks, from `inside` on."""
        closed = yield from self.closing(reader, self.think[1], inside, inside)
        opener, _ = reader.first(self._calling, inside)
        if closed < 0:
            if opener >= 0:
                reader.note("unclosed_reasoning")
            return inside
        forged = yield from self.invented_turn(reader, inside, closed)
        if forged >= 0:
            return (yield from self._forgery(reader, forged, reader.first(self.turn_end, forged)[1]))
        reader.reasoning.append(reader.text[inside:closed])
        reader.margin = closed + len(self.think[1])
        at = closed + len(self.think[1])
        if 0 <= opener < closed:
            reader.note("call_in_reasoning")
            if self.parse_reasoning != "text":
                at = max(at, (yield from self._drafts(reader, inside, closed)))
        return at

    def _drafts(self, reader: Reader, at: int, closed: int) -> Steps[int]:
        """Step: read the calls inside a closed thought; give where the last of them ends."""
        reader.drafts = self.parse_reasoning
        while True:
            place, marker = reader.first(self._calling, at)
            if not 0 <= place < closed:
                break
            at = yield from self._at_marker(reader, place, marker)
        reader.drafts = ""
        return at

    def invented_turn(self, reader: Reader, at: int, before: int) -> Steps[int]:
        """Step: give where, before `before`, the turn ends and another one or nothing follows; or -1."""
        while True:
            place, marker = reader.first(self.turn_end, at)
            if place < 0 or 0 <= before < place:
                return -1
            at = place + len(marker)
            after = yield from reader.skip(at)
            if after == len(reader.text) or reader.text[after] in "<[]":
                return place

    def _fence(self, reader: Reader, place: int, marker: str) -> Steps[int]:
        """Step: read a Markdown fence; what it holds is text."""
        end = yield from closed_fence(reader, place, marker, self.closing)
        inside = place + len(marker)
        if end >= 0 and 0 <= reader.first(self._calling, inside)[0] < end:
            reader.note("call_in_fence")
        return inside if end < 0 else end

    def _forgery(self, reader: Reader, place: int, marker: str) -> Steps[int]:
        """Step: read a result, or an end of the turn, that the model wrote itself."""
        inside = place + len(marker)
        if marker == self.forged[0]:
            reader.note("forged_result")
            closed = yield from reader.find(self.forged[1], inside)
            if closed >= 0:
                return closed + len(self.forged[1])
        elif (yield from reader.skip(inside)) < len(reader.text):
            reader.note("forged_turn")
        return (yield from self.end_of_text(reader))

    def end_of_text(self, reader: Reader) -> Steps[int]:
        """Step: give the end of the text, when all of it has come."""
        while not reader.is_whole:
            yield
        return len(reader.text)

    def _open_section(self, reader: Reader, place: int) -> Steps[int]:
        """Step: read what opens a section of calls, and the first call in it."""
        inside = yield from reader.past_repeated(self.section[0], place + len(self.section[0]))
        after = yield from reader.skip(inside)
        reader.opened_at = place
        opener = yield from reader.which(self.openers, after)
        if opener and (yield from self.opens(reader, after)):
            return (yield from self.attempt(reader, after))
        return (yield from self.attempt(reader, after, self.read_odd_section))

    def read_odd_section(self, reader: Reader, start: int) -> Steps[int]:
        """Say what stands in a section at `start` in place of a call.

        Raises:
            Unreadable: always.
        """
        if start == len(reader.text):
            raise Unreadable("unclosed", "the message ends inside the call", start)
        if (yield from reader.which(self.section[1:], start)):
            raise Unreadable("empty", f"there is nothing between {self.section[0]} and its closer", start)
        raise Unreadable("wrong_dialect", "this is not how calls are written here", start)
        yield

    def end_of_odd(self, reader: Reader, start: int, broke: int) -> Steps[int]:
        """Step: give the end of a section without calls: its closer, or the next section."""
        place, marker = yield from reader.find_first(self.section, max(start, broke))
        if place < 0:
            return len(reader.text)
        return place + len(marker) if marker == self.section[1] else place

    def _may_belong(self, reader: Reader, place: int) -> bool:
        """Whether a section's closer at `place` is that of the last call: only blanks between."""
        covered = reader.covered
        if not self.section[1] or not reader.calls or place - covered > 16:
            return False
        return not reader.text[covered:place].strip()

    def _close_section(self, reader: Reader, place: int) -> int:
        end = place + len(self.section[1])
        if self._may_belong(reader, place):
            reader.extend(end)
        return end
