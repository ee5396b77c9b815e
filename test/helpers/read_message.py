"""Read a message with a parser in every way, which must agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_agentic.messages import ParseResult
from torchrl_agentic.parsers import TextDelta, get_parser


def read_message(
    name: str, text: str, *, tools: Any = None, sizes: Sequence[int] = (1, 3, 7), **options: Any
) -> ParseResult:
    """Return the result of a message, the same as a whole and as a stream, without lost text.

    Args:
        name: Name of the parser.
        text: The message.
        tools: Tools that may be called.
        sizes: Lengths of the chunks of streams, in characters.
        **options: Options of the parser.
    """
    parser = get_parser(name, **options)
    result = parser.parse(text, tools=tools)
    for size in sizes:
        stream, said = parser.stream(tools=tools), ""
        for start in range(0, len(text), size):
            events = stream.feed(text[start : start + size])
            said += "".join(event.text for event in events if isinstance(event, TextDelta))
        assert stream.close() == result
        said += "".join(event.text for event in stream.last_events if isinstance(event, TextDelta))
        assert said == result.text
    at, outside = 0, ""
    for call in result.calls:
        assert call.span is not None
        outside += text[at : call.span[0]]
        at = call.span[1]
    assert outside + text[at:] == result.text
    return result
