"""What a stream tells while a message is being written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from torchrl_agentic.messages import ParsedCall


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
