"""A message of the model in pieces: what it said, what it thought, where its calls stood."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchrl_agentic.messages import Turn

_THOUGHT = re.compile(r"<((?:seed:)?think(?:ing)?|reasoning)>(.*?)(?:</\1>|\Z)", re.DOTALL)
_CLOSER = re.compile(r"</(?:(?:seed:)?think(?:ing)?|reasoning)>")
_OPENER = re.compile(r"<(?:(?:seed:)?think(?:ing)?|reasoning)>")


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
        yield from _thoughts(text[at:start])
        yield Piece("call", text[start:stop], number)
        at = stop
    yield from _thoughts(text[at:])


def said_text(turn: Turn) -> str:
    """Give what the model said in a turn, without thoughts and calls."""
    return "".join(piece.text for piece in pieces(turn) if piece.kind == "text")


def _thoughts(text: str) -> Iterator[Piece]:
    closer, opener = _CLOSER.search(text), _OPENER.search(text)
    if closer is not None and (opener is None or closer.start() < opener.start()):
        yield Piece("thought", text[: closer.start()])
        text = text[closer.end() :]
    at = 0
    for thought in _THOUGHT.finditer(text):
        if at < thought.start():
            yield Piece("text", text[at : thought.start()])
        yield Piece("thought", thought[2])
        at = thought.end()
    if at < len(text):
        yield Piece("text", text[at:])
