"""Where a message thinks aloud: between the tags that models write around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_NAME = "(?:seed:)?think(?:ing)?|reasoning"
_OPENER = re.compile(rf"<(?:{_NAME})>|\[THINK\]")
_CLOSER = re.compile(rf"</(?:{_NAME})>|\[/THINK\]")
_THOUGHT = re.compile(
    rf"<({_NAME})>(?P<tagged>.*?)(?P<end></\1>|\Z)|\[THINK\](?P<bracketed>.*?)(?P<stop>\[/THINK\]|\Z)",
    re.DOTALL,
)


class Thought(NamedTuple):
    """Part of a message. start, stop: where it stands, with its tags. is_closed: whether it has an end."""

    start: int
    stop: int
    text: str
    is_closed: bool


def thoughts(text: str) -> Iterator[Thought]:
    """Give what stands between tags, to the end of the message where a tag is not closed.

    Where a prompt opened the tag, a message only closes it: then it thinks from its beginning.
    """
    closer, opener, begin = _CLOSER.search(text), _OPENER.search(text), 0
    if closer is not None and (opener is None or closer.start() < opener.start()):
        begin = closer.end()
        yield Thought(0, begin, text[: closer.start()], is_closed=True)
    for found in _THOUGHT.finditer(text, begin):
        inside, end = found["tagged"], found["end"]
        if inside is None:
            inside, end = found["bracketed"], found["stop"]
        yield Thought(*found.span(), inside, is_closed=bool(end))
