"""A message of the model in pieces: what it said, what it thought, where its calls stood."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchrl_agentic.messages import Turn
from torchrl_agentic.viewer.thoughts import thoughts


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a message. call: for a call, its number within the turn."""

    kind: Literal["text", "thought", "call"]
    text: str
    call: int | None = None


def pieces(turn: Turn) -> Iterator[Piece]:
    """Split the message of a turn; all pieces together are the message, but for the tags around thoughts.

    A thought that is not closed ends with the next call, or with the message. One that the prompt has opened
    begins with the message.
    """
    text, at = turn.message.text, 0
    for number, call in enumerate(turn.outcome.calls):
        if call.span is None or not at <= call.span[0] < call.span[1] <= len(text):
            continue
        start, stop = call.span
        yield from _said(text[at:start])
        yield Piece("call", text[start:stop], number)
        at = stop
    yield from _said(text[at:])


def said_text(turn: Turn) -> str:
    """Give what the model said in a turn, without thoughts and calls."""
    return "".join(piece.text for piece in pieces(turn) if piece.kind == "text")


def _said(text: str) -> Iterator[Piece]:
    at = 0
    for thought in thoughts(text):
        if at < thought.start:
            yield Piece("text", text[at : thought.start])
        yield Piece("thought", thought.text)
        at = thought.stop
    if at < len(text):
        yield Piece("text", text[at:])
