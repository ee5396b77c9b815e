"""What a stream tells while a message is being written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torchrl_agentic.messages import ParsedCall, ParseResult

if TYPE_CHECKING:
    from torchrl_agentic.parsers.base import ToolCallParser, Tools


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallReady:
    """A call has been written to its end, and may start.

    Of its span and notes the `ParseResult` may say more, such as the closer of a section around it.
    """

    call: ParsedCall


@dataclass(frozen=True, slots=True)
class CallFailed:
    """An attempt to call has ended that cannot be read; `call.error` says why."""

    call: ParsedCall


Event: TypeAlias = TextDelta | CallReady | CallFailed


def event_of(call: ParsedCall) -> Event:
    """Give the event that tells of a call."""
    return CallReady(call) if call.error is None else CallFailed(call)


def events_of(calls: Iterable[ParsedCall]) -> list[Event]:
    """Give the events that tell of some calls."""
    return list(map(event_of, calls))


class Stream(ABC):
    """A message that is being written: `feed` what arrives, act on the events, then `close`."""

    @abstractmethod
    def feed(self, chunk: str) -> list[Event]:
        """Take the next piece of text, of any size; give what is certain by now.

        A call comes as one event, when its block has closed; never a part of one.
        """

    @abstractmethod
    def close(self) -> ParseResult:
        """Say that nothing more comes. The result is that of `parse` on all the text.

        What became certain only by the end is not among the events: `last_events` has it.
        """

    last_events: Sequence[Event] = ()
    """After `close`: what became certain by the end alone."""


class WholeStream(Stream):
    """The stream of a format that can only be read as a whole."""

    def __init__(self, parser: ToolCallParser, tools: Tools | None, turn: int) -> None:
        self._parser, self._tools, self._turn = parser, tools, turn
        self._chunks: list[str] = []

    def feed(self, chunk: str) -> list[Event]:
        """Keep it."""
        self._chunks.append(chunk)
        return []

    def close(self) -> ParseResult:
        """Read it."""
        result = self._parser.parse("".join(self._chunks), tools=self._tools, turn=self._turn)
        text: list[Event] = [TextDelta(result.text)] if result.text else []
        self.last_events = [*text, *events_of(result.calls)]
        return result
