"""Formats in which calls stand in the text, each behind an opener: what they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, cast

from torchrl_agentic.messages import JSON, CallError, Content, ParseResult, content_text
from torchrl_agentic.parsers.base import (
    MAX_CALLS,
    Attempt,
    ToolCallParser,
    Unreadable,
    explain,
    number,
    over_limit,
)
from torchrl_agentic.parsers.structured import structured_attempts

THINK, THINK_END = "<think>", "</think>"


class Cursor:
    """A text that is being parsed, and what need not be looked for in it again."""

    __slots__ = ("_none_from", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._none_from: dict[str, int] = {}

    def find(self, marker: str, start: int) -> int:
        """Like `str.find`.

        That a marker does not come any more is found out once, which keeps parsing linear.
        """
        none_from = self._none_from.get(marker)
        if none_from is not None and start >= none_from:
            return -1
        found = self.text.find(marker, start)
        if found < 0:
            self._none_from[marker] = start
        return found


class TextParser(ToolCallParser):
    """A format with an opener. A subclass finds the next opener and reads the attempt behind it.

    A call inside a closed `<think>…</think>` is a draft and stays text; after a `<think>` that never closes
    it is a call, as models in training write it. Calls of a message mapping ("tool_calls") count where its
    text has none.
    """

    shape: str = ""
    """What a right call looks like, for error messages."""
    closer: ClassVar[str] = ""
    """What ends a block; empty: nothing does."""

    @abstractmethod
    def find_opener(self, cursor: Cursor, start: int) -> int:
        """Give the place of the next opener from `start` on, or -1."""

    @abstractmethod
    def read(self, cursor: Cursor, start: int) -> tuple[list[Attempt], int]:
        """Read the block whose opener stands at `start`: its attempts, at least one, and where it ends.

        Raises:
            Unreadable: the block is no call; it ends where `end_of_bad` says.
        """

    def end_of_bad(self, cursor: Cursor, start: int) -> int:
        """Give the end of the unreadable block at `start`: its closer, or the end of the text.

        Nothing inside it is taken for an opener.
        """
        closer = cursor.find(self.closer, start) if self.closer else -1
        return len(cursor.text) if closer < 0 else closer + len(self.closer)

    def parse(self, response: str | Mapping[str, JSON], *, turn: int = 0) -> ParseResult:
        """Read one assistant message."""
        if isinstance(response, str):
            return self._parse_text(response, response, [], turn)
        content = cast("Content", response.get("content"))
        return self._parse_text(content_text(content), response, structured_attempts(response), turn)

    def _parse_text(
        self, text: str, raw: str | Mapping[str, JSON], structured: list[Attempt], turn: int
    ) -> ParseResult:
        attempts, reasoning, notes = self._scan(text)
        if structured and not attempts:
            attempts = structured
        return ParseResult(
            _outside(text, attempts), number(attempts, turn), raw, reasoning="".join(reasoning), notes=notes
        )

    def _scan(self, text: str) -> tuple[list[Attempt], list[str], tuple[str, ...]]:
        cursor, attempts, reasoning = Cursor(text), list[Attempt](), list[str]()
        notes: tuple[str, ...] = ()
        at = 0
        thought = text.find(THINK)
        while (opener := self.find_opener(cursor, at)) >= 0 or thought >= 0:
            if 0 <= thought < at:
                thought = text.find(THINK, at)
                continue
            if thought >= 0 and (opener < 0 or thought < opener):
                closed = text.find(THINK_END, thought)
                if closed < 0:
                    notes = ("unclosed_reasoning",) if opener >= 0 else notes
                    thought = -1
                    continue
                reasoning.append(text[thought + len(THINK) : closed])
                if 0 <= opener < closed:
                    notes = ("call_in_reasoning",)
                at = closed + len(THINK_END)
                thought = text.find(THINK, at)
                continue
            found, at = self._read(cursor, opener, len(attempts))
            attempts += found
        return attempts, reasoning, notes

    def _read(self, cursor: Cursor, start: int, index: int) -> tuple[list[Attempt], int]:
        error: CallError
        if index >= MAX_CALLS:
            error = over_limit(index)
        else:
            try:
                found, end = self.read(cursor, start)
                # A block with several calls is the span of the first; the others stand at its end.
                for offset, item in enumerate(found):
                    item.span = (start, end)
                    start = end
                    if index + offset >= MAX_CALLS and item.error is None:
                        item.args, item.error = {}, over_limit(index + offset)
                return found, end
            except Unreadable as unreadable:
                error = explain(index, unreadable, cursor.text, self.shape)
        end = self.end_of_bad(cursor, start)
        return [Attempt(error=error, span=(start, end))], end


def _outside(text: str, attempts: list[Attempt]) -> str:
    """The text without the spans of the attempts."""
    pieces: list[str] = []
    at = 0
    for attempt in attempts:
        if attempt.span is not None:
            pieces.append(text[at : attempt.span[0]])
            at = attempt.span[1]
    return "".join([*pieces, text[at:]]) if pieces else text
