"""Where a message thinks aloud: between the tags that models write around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_OPENER = re.compile(r"<(?:(?:seed:)?think(?:ing)?|reasoning)>|\[THINK\]")
_CLOSER = re.compile(r"</(?:(?:seed:)?think(?:ing)?|reasoning)>|\[/THINK\]")


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
    closer, opener = _CLOSER.search(text), _OPENER.search(text)
    if closer is not None and (opener is None or closer.start() < opener.start()):
        yield Thought(0, closer.end(), text[: closer.start()], is_closed=True)
        opener = _OPENER.search(text, closer.end())
    while opener is not None:
        (start, begin), tag = opener.span(), opener[0]
        end = text.find(f"{tag[0]}/{tag[1:]}", begin)
        if end < 0:
            yield Thought(start, len(text), text[begin:], is_closed=False)
            return
        stop = end + len(tag) + 1
        yield Thought(start, stop, text[begin:end], is_closed=True)
        opener = _OPENER.search(text, stop)
