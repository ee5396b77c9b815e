"""Read a message while the model is still writing it: streams and the events they emit."""

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
    """The next piece of text outside of calls.

    Attributes:
        text: The new characters.
    """

    text: str


@dataclass(frozen=True, slots=True)
class CallReady:
    """A complete call, which may start.

    The final `ParseResult` may extend its span (over the closer of its section, say) and add notes.

    Attributes:
        call: The call, without an error.
    """

    call: ParsedCall


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call that has ended and cannot be read.

    Attributes:
        call: The call; `call.error` holds the reason.
    """

    call: ParsedCall


Event: TypeAlias = TextDelta | CallReady | CallFailed


def event_of(call: ParsedCall) -> Event:
    """Return the event for a finished call."""
    return CallReady(call) if call.error is None else CallFailed(call)


def events_of(calls: Iterable[ParsedCall]) -> list[Event]:
    """Return the events for finished calls."""
    return list(map(event_of, calls))


class Stream(ABC):
    """A message that is still being written: `feed` each chunk, act on the events, then `close`.

    Attributes:
        last_events: After `close`, the events that only the end of the message made certain.
    """

    @abstractmethod
    def feed(self, chunk: str) -> list[Event]:
        """Append a chunk of text of any size and return the events that it makes certain.

        Each call is one event, emitted when its block has closed.
        """

    @abstractmethod
    def close(self) -> ParseResult:
        """End the message and return the same result as `parse` on the whole text.

        Events that only the end made certain are in `last_events`.
        """

    last_events: Sequence[Event] = ()


class WholeStream(Stream):
    """A stream that reads the whole message at its end, for formats that cannot be read in part.

    Args:
        parser: Parser of the message.
        tools: Tools that may be called.
        turn: Number of the turn, for ids of calls that have none.
    """

    def __init__(self, parser: ToolCallParser, tools: Tools | None, turn: int) -> None:
        self._parser, self._tools, self._turn = parser, tools, turn
        self._chunks: list[str] = []

    def feed(self, chunk: str) -> list[Event]:
        """Store the chunk and return no events."""
        self._chunks.append(chunk)
        return []

    def close(self) -> ParseResult:
        """Parse the stored text; all events are in `last_events`."""
        result = self._parser.parse("".join(self._chunks), tools=self._tools, turn=self._turn)
        text: list[Event] = [TextDelta(result.text)] if result.text else []
        self.last_events = [*text, *events_of(result.calls)]
        return result
