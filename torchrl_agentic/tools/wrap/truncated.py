"""A tool whose text is never longer than a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torchrl_agentic.messages import JSON, JsonPart, TextPart, ToolResult, ToolResultPart
from torchrl_agentic.tools.base import ToolContext
from torchrl_agentic.tools.wrap.base import Wrapped

Side = Literal["left", "right", "middle"]
MARKS: Mapping[str, str] = {
    "left": "(truncated)...",
    "right": "...(truncated)",
    "middle": "...(truncated)...",
}


_TEXTUAL = (TextPart, JsonPart)


class Truncated(Wrapped):
    """A tool whose text is cut where it is longer than `max_chars` characters, the mark of the cut included.

    side: what is lost: the "left" end, the "right" one, or the "middle". The text is that of all text and
    JSON parts, which become one; images, videos and files stay. What was cut says so in its `meta`:
    "truncated" and "original_chars". Errors that the model reads are cut as well.

    Raises:
        ValueError: no such side, or a bound without room for the mark.
    """

    def __init__(self, tool: Any, max_chars: int = 8192, side: Side = "middle") -> None:
        super().__init__(tool)
        if side not in MARKS:
            raise ValueError(f"side must be one of {', '.join(MARKS)}; got {side!r}")
        if max_chars < len(MARKS[side]):
            raise ValueError(
                f"max_chars must be {len(MARKS[side])} or more, the length of the mark; got {max_chars}"
            )
        self.max_chars = max_chars
        self.side: Side = side

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run it, and cut what is too long."""
        result = await self.result(args, ctx)
        texts = [str(part) for part in result.parts if isinstance(part, _TEXTUAL)]
        length = sum(map(len, texts)) + max(0, len(texts) - 1)
        if length <= self.max_chars:
            return result
        parts = one_text(result.parts, cut("\n".join(texts), self.max_chars, self.side))
        meta = {**(result.meta or {}), "truncated": True, "original_chars": length}
        return replace(result, parts=parts, meta=meta)


def cut(text: str, max_chars: int, side: Side) -> str:
    """Cut a text that is longer than a bound; what is left is as long as the bound, with the mark."""
    if len(text) <= max_chars:
        return text
    mark = MARKS[side]
    kept = max_chars - len(mark)
    head = {"left": 0, "right": kept, "middle": (kept + 1) // 2}[side]
    return text[:head] + mark + text[len(text) - (kept - head) :]


def one_text(parts: Sequence[ToolResultPart], text: str) -> tuple[ToolResultPart, ...]:
    """Put one text in the place of all text and JSON parts, where the first of them was."""
    kept: list[ToolResultPart] = []
    place: int | None = None
    for part in parts:
        if not isinstance(part, _TEXTUAL):
            kept.append(part)
        elif place is None:
            place = len(kept)
    kept.insert(place or 0, TextPart(text))
    return tuple(kept)
