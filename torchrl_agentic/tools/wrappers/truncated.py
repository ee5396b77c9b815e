"""`Truncated`, a tool whose text has a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchrl_agentic.messages import JSON, JsonPart, TextPart, ToolResult, ToolResultPart
from torchrl_agentic.text import Side, truncate
from torchrl_agentic.tools.base import ToolContext
from torchrl_agentic.tools.wrappers.base import Wrapped

MARKS: Mapping[str, str] = {
    "left": "(truncated)...",
    "right": "...(truncated)",
    "middle": "...(truncated)...",
}


_TEXTUAL = (TextPart, JsonPart)


class Truncated(Wrapped):
    """A tool whose text is truncated to `max_chars` characters, the mark of the cut included.

    All text and JSON parts of a longer result become one text; images, videos and files stay. Its `meta` has
    "truncated" and "original_chars". Errors that the model reads are truncated too.

    Args:
        tool: The tool.
        max_chars: Number of characters at most.
        side: Which part is dropped: the "left" end, the "right" end or the "middle".

    Raises:
        ValueError: If the side is unknown, or the bound leaves no room for the mark.
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
        """Run the tool, and truncate the text of its result."""
        result = await self.result(args, ctx)
        texts = [str(part) for part in result.parts if isinstance(part, _TEXTUAL)]
        length = sum(map(len, texts)) + max(0, len(texts) - 1)
        if length <= self.max_chars:
            return result
        text = truncate("\n".join(texts), self.max_chars, side=self.side, mark=MARKS[self.side])
        parts = one_text(result.parts, text)
        meta = {**(result.meta or {}), "truncated": True, "original_chars": length}
        return replace(result, parts=parts, meta=meta)


def one_text(parts: Sequence[ToolResultPart], text: str) -> tuple[ToolResultPart, ...]:
    """Replace all text and JSON parts by one text, at the place of the first of them.

    Args:
        parts: Parts of a result.
        text: The text.

    Returns:
        The new parts.
    """
    kept: list[ToolResultPart] = []
    place: int | None = None
    for part in parts:
        if not isinstance(part, _TEXTUAL):
            kept.append(part)
        elif place is None:
            place = len(kept)
    kept.insert(place or 0, TextPart(text))
    return tuple(kept)
