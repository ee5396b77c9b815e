"""The pass over a message: find where calls begin, and skip reasoning, examples and invented turns."""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, TypeAlias

from torchrl_agentic.parsers.base import LIMITS, Limits, ToolCallParser
from torchrl_agentic.parsers.control_tokens import AddedTokens
from torchrl_agentic.parsers.engine.markdown import FENCES, closed_fence
from torchrl_agentic.parsers.engine.partial_call import (
    CallParseError,
    PartialCall,
    call_error,
    over_limit_error,
)
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.reasoning import opens_thought

_SHORT = 4096
_SIGNS_OF_CALLS = ("{", "</", '="', "<function=")
"""Strings that occur in calls of some dialect, but not in prose between two markers."""
PROSE = re.compile(r"""[^\w{}\[<>(=]*+(?:[^\W\d_][\w'’-]*+[,;.!?"'`”»]*+\s++[^\W_]|(?![!-~])[^\W\d_])""")
"""The beginning of prose: two words, or a letter that is not ASCII."""
_NAME = re.compile(r"[\w.:/-]*\w")
ReasoningPolicy: TypeAlias = Literal["text", "error", "execute"]


def any_of(markers: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the first of some markers, of those at one place the longest."""
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


class TextScanner(ToolCallParser):
    """The part of a `TextParser` that goes over a message.

    Args:
        parse_reasoning: What to do with calls inside closed reasoning: leave them as "text", answer them with
            an "error", or "execute" them. Calls in reasoning that never closes are calls in any case, because
            models in training write such messages.
        reasoning_open: Whether the prompt has opened the reasoning; None means False until `with_tokenizer`
            has read the chat template.
        tolerance: "lenient" allows a fixed list of repairs without loss (`json_text.repair_json`), each noted
            on its call.
        limits: Bounds on what is read from one message.

    Attributes:
        openers: Markers that begin a call.
        shapes: For openers that are a bracket, which is frequent in data and prose: the patterns of a bracket
            that begins a call, and of text that may become one when more text comes.
        closer: Marker that ends a block; "" if the format has none.
        section: Markers around all calls of a message; ("", "") if the format has none.
        think: Tags that open and end reasoning.
        think_end_proves: Whether an end of reasoning without a beginning proves that the prompt opened it;
            False if the tag also ends other things.
        other_thinks: Further pairs of such tags, of other models of the family.
        turn_end: Tokens that end the message.
        result_tags: Tags around results; if the model writes them itself, nothing between them is a call.
        other_openers: Openers of another dialect of the family, handled by `read_other_opener`.
        more_markers: Further strings that results must not contain.
        fences_are_text: Whether a call in a Markdown fence is an example.
        openers_may_be_words: Whether prose after an opener makes it a word of the text; False if a call may
            consist of prose.
        shape: A correct call, shown in error messages to the model.
    """

    openers: tuple[str, ...] = ()
    shapes: ClassVar[Mapping[str, tuple[re.Pattern[str], re.Pattern[str]]]] = {}
    closer: ClassVar[str] = ""
    section: ClassVar[tuple[str, str]] = ("", "")
    think: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    think_end_proves: ClassVar[bool] = True
    other_thinks: ClassVar[tuple[tuple[str, str], ...]] = ()
    turn_end: ClassVar[tuple[str, ...]] = ()
    result_tags: tuple[str, str] = ("", "")
    other_openers: ClassVar[tuple[str, ...]] = ()
    more_markers: ClassVar[tuple[str, ...]] = ()
    fences_are_text: ClassVar[bool] = True
    openers_may_be_words: ClassVar[bool] = True
    shape: str = ""

    def __init__(
        self,
        *,
        parse_reasoning: ReasoningPolicy = "text",
        reasoning_open: bool | None = None,
        tolerance: Literal["strict", "lenient"] = "strict",
        limits: Limits = LIMITS,
    ) -> None:
        if parse_reasoning not in ("text", "error", "execute"):
            raise ValueError(f'parse_reasoning is "text", "error" or "execute"; got {parse_reasoning!r}')
        if tolerance not in ("strict", "lenient"):
            raise ValueError(f'tolerance is "strict" or "lenient"; got {tolerance!r}')
        self.parse_reasoning: ReasoningPolicy = parse_reasoning
        self.reasoning_open = bool(reasoning_open)
        self._learns_reasoning = reasoning_open is None
        self.tolerance = tolerance
        self.limits = limits

    def with_tokenizer(self, tokenizer: AddedTokens, **template_kwargs: Any) -> Self:
        """Return a copy that knows a tokenizer's control tokens and whether its prompts open the reasoning.

        Args:
            tokenizer: The model's tokenizer. Without a chat template `reasoning_open` stays False.
            **template_kwargs: Options of the chat template, such as `enable_thinking`.
        """
        made = super().with_tokenizer(tokenizer, **template_kwargs)
        if made._learns_reasoning:
            made.reasoning_open = made.opens_thought(tokenizer, **template_kwargs)
        return made

    def opens_thought(self, tokenizer: Any, **template_kwargs: Any) -> bool:
        """Return whether the prompt of a tokenizer's chat template opens the model's reasoning.

        Args:
            tokenizer: The model's tokenizer.
            **template_kwargs: Options of the chat template.
        """
        return any(opens_thought(tokenizer, pair, **template_kwargs) for pair in self.reasoning_tags.items())

    def closes_unopened_thought(self, reader: Reader) -> bool:
        """Return whether a message ends reasoning that only the prompt can have opened.

        An end tag inside the arguments of a call proves nothing.
        """
        if reader.reasoning_open or not self.think_end_proves:
            return False
        for think in self.reasoning_tags:
            if reader.at(think, 0):
                return False
        for end in self._think_ends:
            if reader.is_outside_calls(end):
                break
        else:
            return False
        closed, _ = reader.first(self._think_ends, 0)
        if closed < 0 or any(0 <= reader.seek(think, 0) < closed for think in self.reasoning_tags):
            return False
        spans = [call.span for call in reader.calls if call.error is None and call.span is not None]
        return not any(begin <= closed < end for begin, end in spans)

    # Methods for subclasses

    @abstractmethod
    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read the block whose opener is at `start`, add its calls to the reader and return its end.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.

        Raises:
            CallParseError: If the block is malformed; `end_of_malformed` finds its end.
        """

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether the opener at `start` begins a call.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        del reader, start
        return True
        yield

    def read_other_opener(self, reader: Reader, place: int, marker: str) -> Incremental[int]:
        """Handle one of `other_openers` and return where to continue; by default it is text.

        Args:
            reader: The message as read so far.
            place: Index of the opener.
            marker: The opener.
        """
        del reader
        return place + len(marker)
        yield

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed block at `start`: its closer, or the end of the message.

        The search begins where reading failed; openers before its result are data.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        if not self.closer:
            return (yield from self.end_of_text(reader))
        closer = yield from reader.find(self.closer, max(start, broke))
        return len(reader.text) if closer < 0 else closer + len(self.closer)

    # One pass over the message

    def scan(self, reader: Reader) -> Incremental[None]:
        """Read the message."""
        at = 0
        longest = self._longest
        if reader.reasoning_open:
            at = yield from self._read_reasoning(reader, 0)
        while True:
            place, marker = self._next_marker(reader, at)
            if place < 0:
                if reader.is_whole:
                    reader.emit_text(len(reader.text))
                    if reader.suspects and self.has_call_behind_prose(reader):
                        reader.note("call_behind_prose")
                    return
                at = max(at, len(reader.text) - longest + 1)
                if not self._may_belong(reader, at):
                    reader.emit_text(at)
                yield
                continue
            if not (marker == self.section[1] and self._may_belong(reader, place)):
                reader.emit_text(place)
            at = yield from self._handle_marker(reader, place, marker)

    def has_call_behind_prose(self, reader: Reader) -> bool:
        """Return whether one of `reader.suspects` would be a call on a line of its own."""
        del reader
        return False

    @cached_property
    def _watched(self) -> tuple[str, ...]:
        """Return the markers at which `scan` stops."""
        fences = FENCES if self.fences_are_text else ()
        markers = [
            *self.openers,
            *self.other_openers,
            *self.section,
            *self.reasoning_tags,
            self.result_tags[0],
            *fences,
        ]
        markers += self.turn_end
        return tuple(marker for marker in markers if marker and marker not in self.shapes)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._watched))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return any_of(self._watched)

    def _next_marker(self, reader: Reader, at: int) -> tuple[int, str]:
        """Return the place and text of the next marker, possibly incomplete; short texts take one search."""
        if len(reader.text) > _SHORT or reader.exact:
            place, marker = reader.first(self._watched, at)
            return self._or_shape(reader, at, place, marker) if self.shapes else (place, marker)
        if not self.shapes:
            match = self._pattern.search(reader.text, at)
            return (-1, "") if match is None else (match.start(), match[0])
        bracket, sign = -1, ""
        for shaped in self.shapes:
            if reader.text.find(shaped, at) >= 0:
                bracket, sign = self._or_shape(reader, at, -1, "")
                break
        # Stop at the bracket; otherwise a list of short calls would be searched once per call.
        match = self._pattern.search(
            reader.text, at, bracket + self._longest if bracket >= 0 else sys.maxsize
        )
        if match is None or 0 <= bracket < match.start():
            return bracket, sign
        return match.start(), match[0]

    def _or_shape(self, reader: Reader, at: int, place: int, marker: str) -> tuple[int, str]:
        """Return a marker and its place, or those of a bracket before it that opens a call."""
        for sign, (shape, part) in self.shapes.items():
            bracket = reader.seek_shape(shape, part, sign, at)
            if 0 <= bracket < place or place < 0 <= bracket:
                place, marker = bracket, sign
        return place, marker

    def has_shape(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether the bracket at `start` looks like the opener of a call.

        Args:
            reader: The message as read so far.
            start: Index of the bracket.
        """
        shape, part = self.shapes[reader.text[start]]
        while not shape.match(reader.text, start):
            if reader.is_whole or not part.match(reader.text, start):
                return False
            yield
        return True

    def _handle_marker(self, reader: Reader, place: int, marker: str) -> Incremental[int]:
        """Handle a marker and return where to continue."""
        if marker in self.openers:
            if (yield from self.opens(reader, place)):
                if reader.in_section and reader.text[reader.covered : place].strip():
                    reader.note("text_in_section")
                return max(place + 1, (yield from self.attempt(reader, place)))
            return place + 1
        if marker in self.other_openers:
            return (yield from self.read_other_opener(reader, place, marker))
        if marker == self.section[0]:
            return (yield from self._open_section(reader, place))
        if marker == self.section[1]:
            return self._close_section(reader, place)
        if marker in self.reasoning_tags:
            return (yield from self._read_reasoning(reader, place + len(marker)))
        if marker in FENCES:
            return (yield from self._read_fence(reader, place, marker))
        return (yield from self._read_forgery(reader, place, marker))

    def attempt(
        self, reader: Reader, start: int, read: Callable[[Reader, int], Incremental[int]] | None = None
    ) -> Incremental[int]:
        """Read the block whose opener is at `start`, or add an error entry; return its end.

        Args:
            reader: The message as read so far.
            start: Index of the opener.
            read: Method that reads the block; `self.read` by default.
        """
        index = len(reader.calls)
        if index >= reader.limits.calls:
            end = yield from self.end_of_malformed(reader, start, start)
            reader.add(PartialCall(error=over_limit_error(index, reader.limits.calls)), start, end)
            return end
        try:
            return (yield from (read or self.read)(reader, start))
        except CallParseError as unreadable:
            error = unreadable
        is_content = read == self.read_other_content
        if self.openers_may_be_words and len(reader.calls) == index and (read is None or is_content):
            inside = yield from self.past_word(reader, start, is_content=is_content)
            if inside >= 0:
                return inside
        end = error.end
        if end is None:
            find_end = self.end_of_other_content if read == self.read_other_content else self.end_of_malformed
            end = yield from find_end(reader, start, start if error.at is None else error.at)
        if len(reader.calls) > index:  # the block held good calls before it broke
            start = reader.covered
        why = call_error(len(reader.calls), error, reader.text, self.shape, end)
        reader.add(PartialCall(error.tool, error=why, call_id=error.call_id), start, end)
        return end

    def past_word(self, reader: Reader, start: int, *, is_content: bool = False) -> Incremental[int]:
        """Return the index after an opener that is a word of the text, or -1.

        Prose must follow it, up to another opener before the closer.

        Args:
            reader: The message as read so far.
            start: Index of the opener; of the text after it if `is_content`.
            is_content: Whether the opener is that of a section.
        """
        opener = "" if is_content else (yield from reader.which(self.openers, start))
        if not opener and not is_content:
            return -1
        inside = start + len(opener)
        begin = yield from reader.skip(inside)
        if reader.text[begin : begin + 1] in ("", "{", "[", "<"):
            return -1
        place, marker = yield from reader.find_first(self._ends_word, inside)
        if place < 0 and self.shapes:
            place, marker = self._or_shape(reader, inside, place, marker)
            if not reader.is_line_start(place):
                return -1
        if marker not in self._calling or not self._is_prose(reader, inside, place):
            return -1
        reader.note("opener_in_text")
        reader.opened_at = None
        reader.in_section = reader.in_section and not is_content
        return inside

    @cached_property
    def _ends_word(self) -> tuple[str, ...]:
        """Return the markers that end the text after an opener."""
        closers = (self.closer, self.section[1], *self.turn_end)
        return tuple(filter(None, (*self._calling_alone, *closers)))

    def _is_prose(self, reader: Reader, start: int, end: int) -> bool:
        """Return whether the text after an opener is prose rather than a malformed call."""
        text = reader.text[start:end]
        if PROSE.match(text) is not None:
            return True
        if any(sign in text for sign in "{}[]<>=()"):
            return False
        word = text.strip()
        return _NAME.fullmatch(word) is None or (reader.tools is not None and not reader.knows(word))

    def named_call(
        self, reader: Reader, start: int, name: str, read: Incremental[tuple[PartialCall, int]]
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
        try:
            attempt, end = yield from read
        except CallParseError as error:
            error.tool = name
            raise
        attempt.tool = name
        reader.add(attempt, start, end)
        return end

    # Text that contains no calls

    @cached_property
    def reasoning_tags(self) -> Mapping[str, str]:
        """Return the end tag of reasoning by opening tag."""
        return dict(pair for pair in (self.think, *self.other_thinks) if all(pair))

    @cached_property
    def _think_ends(self) -> tuple[str, ...]:
        return tuple(self.reasoning_tags.values())

    def closing(
        self, reader: Reader, markers: str | Sequence[str], start: int, since: int
    ) -> Incremental[int]:
        """Return the place of the first of some markers, or -1 if the message ends without one.

        Unlike `Reader.find_first`, it emits the text up to the first opener while it waits: if no marker
        comes, that opener begins a call.

        Args:
            reader: The message as read so far.
            markers: Marker or markers to find.
            start: Index where the search begins.
            since: Index where the search for openers begins.
        """
        markers = (markers,) if isinstance(markers, str) else markers
        found = reader.first(markers, start)[0]
        if found >= 0 or reader.is_whole:
            return found
        opener, searched, longest = -1, since, max(map(len, self._calling))
        while (found := reader.first(markers, start)[0]) < 0 and not reader.is_whole:
            end = len(reader.text) - longest + 1
            if opener < 0:
                opener = self._next_calling(reader, searched)
                searched = max(searched, end)
            reader.emit_text(opener if opener >= 0 else end)
            yield
        return found

    def _next_calling(self, reader: Reader, at: int) -> int:
        """Return the place of the next opener or section, or -1, by one search over the rest of the text."""
        if reader.exact:
            return reader.first(self._calling, at)[0]
        match = self._calling_pattern.search(reader.text, at)
        return -1 if match is None else match.start()

    def _first_call(self, reader: Reader, at: int) -> tuple[int, str]:
        """Return the place of the first opener or section, and the marker; brackets must match `shapes`."""
        place, marker = reader.first(self._calling_alone, at)
        return self._or_shape(reader, at, place, marker) if self.shapes else (place, marker)

    @cached_property
    def _calling_alone(self) -> tuple[str, ...]:
        """Return the markers that begin calls and have no entry in `shapes`."""
        return tuple(one for one in self._calling if one not in self.shapes)

    @cached_property
    def _calling_pattern(self) -> re.Pattern[str]:
        return any_of(self._calling)

    @cached_property
    def _calling(self) -> tuple[str, ...]:
        """Return the markers that begin calls or sections."""
        return tuple(filter(None, (*self.openers, *self.other_openers, self.section[0])))

    def _read_reasoning(self, reader: Reader, inside: int) -> Incremental[int]:
        """Read the reasoning that begins at `inside` and return where to continue."""
        closers = self._thought_ends(reader, inside)
        closed = yield from self.closing(reader, closers, inside, inside)
        if closed >= 0 and len(closers) == 1 and self._is_plain(reader.text, inside, closed):
            reader.reasoning.append(reader.text[inside:closed])
            reader.reasoning_end = closed + len(closers[0])
            return reader.reasoning_end
        opener, _ = self._first_call(reader, inside)
        if closed < 0:
            if opener >= 0:
                reader.note("unclosed_reasoning")
            return inside
        forged = yield from self.find_invented_turn(reader, inside, closed)
        if forged >= 0:
            return (yield from self._read_forgery(reader, forged, reader.first(self.turn_end, forged)[1]))
        reader.reasoning.append(reader.text[inside:closed])
        at = reader.reasoning_end = closed + len(reader.first(closers, inside)[1])
        if 0 <= opener < closed:
            reader.note("call_in_reasoning")
            if self.parse_reasoning != "text":
                at = max(at, (yield from self._read_drafts(reader, inside, closed)))
        return at

    def _is_plain(self, text: str, start: int, end: int) -> bool:
        """Return whether a part of reasoning lacks the first characters of all markers, as is usual."""
        return all(text.find(sign, start, end) < 0 for sign in self._signs_in_thoughts)

    @cached_property
    def _signs_in_thoughts(self) -> frozenset[str]:
        """Return the first characters of markers that count inside reasoning."""
        return frozenset(marker[0] for marker in (*self._calling, *self.turn_end))

    def _thought_ends(self, reader: Reader, inside: int) -> tuple[str, ...]:
        """Return the tags that may end the reasoning: that of its opener, any if the prompt opened it."""
        for think, think_end in self.reasoning_tags.items():
            if reader.text.endswith(think, 0, inside):
                return (think_end,)
        return self._think_ends

    def _read_drafts(self, reader: Reader, at: int, closed: int) -> Incremental[int]:
        """Read the calls inside closed reasoning and return the end of the last one."""
        reader.draft_policy = self.parse_reasoning
        while True:
            place, marker = self._first_call(reader, at)
            if not 0 <= place < closed:
                break
            at = yield from self._handle_marker(reader, place, marker)
        reader.draft_policy = ""
        return at

    def find_invented_turn(self, reader: Reader, at: int, before: int) -> Incremental[int]:
        """Return the place of a turn's end before `before` that another turn or nothing follows, or -1.

        Args:
            reader: The message as read so far.
            at: Index where the search begins.
            before: Index where it ends; -1 for the end of the text so far.
        """
        while True:
            place, marker = reader.first(self.turn_end, at)
            if place < 0 or 0 <= before < place:
                return -1
            at = place + len(marker)
            after = yield from reader.skip(at)
            if after == len(reader.text) or reader.text[after] in "<[]":
                return place

    def _read_fence(self, reader: Reader, place: int, marker: str) -> Incremental[int]:
        """Read a Markdown fence, whose content is text."""
        end = yield from closed_fence(reader, place, marker, self.closing)
        inside = place + len(marker)
        if end >= 0 and 0 <= self._first_call(reader, inside)[0] < end:
            reader.note("call_in_fence")
        return inside if end < 0 else end

    def _read_forgery(self, reader: Reader, place: int, marker: str) -> Incremental[int]:
        """Read a result, or an end of the turn, that the model wrote itself."""
        inside = place + len(marker)
        if marker == self.result_tags[0]:
            reader.note("forged_result")
            closed = yield from reader.find(self.result_tags[1], inside)
            if closed >= 0:
                return closed + len(self.result_tags[1])
        elif (yield from reader.skip(inside)) < len(reader.text):
            reader.note("forged_turn")
        return (yield from self.end_of_text(reader))

    def end_of_text(self, reader: Reader) -> Incremental[int]:
        """Return the end of the message, once it is complete."""
        while not reader.is_whole:
            yield
        return len(reader.text)

    def _open_section(self, reader: Reader, place: int) -> Incremental[int]:
        """Read the opener of a section and the first call in it."""
        inside = yield from reader.past_repeated(self.section[0], place + len(self.section[0]))
        after = yield from reader.skip(inside)
        reader.opened_at, reader.in_section = place, True
        opener = yield from reader.which(self.openers, after)
        if opener and (yield from self.opens(reader, after)):
            return (yield from self.attempt(reader, after))
        opened, is_prose = yield from self._first_in_section(reader, after)
        if not is_prose:
            return (yield from self.attempt(reader, after, self.read_other_content))
        reader.note("text_in_section")
        reader.opened_at = None
        return (yield from self.attempt(reader, opened))

    def _first_in_section(self, reader: Reader, start: int) -> Incremental[tuple[int, bool]]:
        """Return the place of the first call of a section, or -1, and whether prose precedes it.

        The text may also be a call in another dialect that contains an opener as data. In that case a call
        must begin a line or follow a closer.
        """
        closers = tuple(filter(None, (self.closer,)))
        at, is_prose = start, False
        while True:
            place, marker = yield from reader.find_first(self._ends_prose, at)
            text = reader.text
            if marker not in self.openers:
                return -1, False
            if at == start:
                signs = (*_SIGNS_OF_CALLS, *closers)
                is_prose = text[start] != "[" and all(text.find(sign, start, place) < 0 for sign in signs)
            if is_prose or text[max(start, place - 32) : place].rstrip(" \t\r").endswith(("\n", *closers)):
                return place, is_prose
            at = place + len(marker)

    @cached_property
    def _ends_prose(self) -> tuple[str, ...]:
        """Return the markers that end text in a section, including those of reasoning and turns."""
        markers = (*self._watched, *self._think_ends)
        return tuple(marker for marker in markers if marker and marker not in FENCES)

    def read_other_content(self, reader: Reader, start: int) -> Incremental[int]:
        """Raise the error for a section that contains no call at `start`.

        Args:
            reader: The message as read so far.
            start: Index of the content.

        Raises:
            CallParseError: Always.
        """
        if start == len(reader.text):
            raise CallParseError("unclosed", "the message ends inside the call", start)
        if (yield from reader.which(self.section[1:], start)):
            raise CallParseError("empty", f"there is nothing between {self.section[0]} and its closer", start)
        raise CallParseError("wrong_dialect", "this is not a call of this format", start)
        yield

    def end_of_other_content(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of other content in a section: the first call, the closer, or the next section.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        at = max(start, broke)
        opened, _ = yield from self._first_in_section(reader, at)
        if opened >= 0:
            return opened
        place, marker = yield from reader.find_first(self.section, at)
        reader.in_section = False
        if place < 0:
            return len(reader.text)
        return place + len(marker) if marker == self.section[1] else place

    def _may_belong(self, reader: Reader, place: int) -> bool:
        """Return whether a section's closer at `place` follows the last call, with only blanks between."""
        covered = reader.covered
        if not self.section[1] or not reader.calls or place - covered > 16:
            return False
        return not reader.text[covered:place].strip()

    def _close_section(self, reader: Reader, place: int) -> int:
        end = place + len(self.section[1])
        reader.in_section = False
        if self._may_belong(reader, place):
            reader.extend(end)
        return end
