"""Read a message while the model is still writing it: streams and the events they emit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torchrl_agentic.messages import ParsedCall, ParseResult


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
