"""Truncate long tool results, with a marker inside the bound that says how much is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Side = Literal["left", "middle", "right"]
CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Truncation:
    """A bound on the text of a tool result, in tokens or characters.

    Args:
        max_tokens: Upper bound in tokens, marker included; None: no bound.
        max_chars: Upper bound in characters, marker included; None: no bound.
        side: The part that is kept, as in verl up to 0.7: "left" keeps the head, "right" the tail, "middle"
            both ends.
        marker: Replaces the omitted text; `{omitted}` becomes the number of omitted characters.

    Raises:
        ValueError: If a bound is below 1, the side is unknown, or the marker alone exceeds `max_chars`.
    """

    max_tokens: int | None = None
    max_chars: int | None = None
    side: Side = "middle"
    marker: str = "[… {omitted} characters left out …]"

    def __post_init__(self) -> None:
        if self.side not in ("left", "middle", "right"):
            raise ValueError(f"the side is left, middle or right; got {self.side!r}")
        for name, bound in (("max_tokens", self.max_tokens), ("max_chars", self.max_chars)):
            if bound is not None and bound < 1:
                raise ValueError(f"{name} must be 1 or more; got {bound}")
        longest = len(self.longest_marker)
        if self.max_chars is not None and self.max_chars < longest:
            raise ValueError(
                f"max_chars={self.max_chars} leaves no room for the marker, which takes {longest}: "
                f"{self.marker!r}"
            )

    @property
    def longest_marker(self) -> str:
        """Return the marker of a billion omitted characters, which must fit into a bound."""
        return self.marker.format(omitted=10**9)

    def apply(self, text: str, count: CountTokens) -> str:
        """Return a text, truncated if it exceeds a bound.

        Args:
            text: The text of a tool result.
            count: Returns the number of tokens of a text.
        """
        return self.apply_together([text], count)[0]

    def apply_together(self, texts: Sequence[str], count: CountTokens) -> list[str]:
        """Return texts that are truncated as if they were one, such as the texts between images.

        Args:
            texts: Texts of one tool result, in order.
            count: Returns the number of tokens of a text.

        Returns:
            As many texts; some may be empty.
        """
        if self._fits(texts, count):
            return list(texts)
        size = sum(map(len, texts))
        most = size if self.max_chars is None else min(size, self.max_chars)
        low, high = 0, min(most, self.max_tokens or most)  # numbers of characters to keep; `low` fits
        while high < most and self._fits(self._cut(texts, high), count):
            low, high = high, min(most, 2 * high)
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(self._cut(texts, middle), count):
                low = middle
            else:
                high = middle - 1
        return self._cut(texts, low)

    def _fits(self, texts: Sequence[str], count: CountTokens) -> bool:
        if self.max_chars is not None and sum(map(len, texts)) > self.max_chars:
            return False
        if self.max_tokens is None:
            return True
        if sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) <= self.max_tokens:
            return True  # no tokenizer makes more tokens than there are bytes
        return sum(map(count, texts)) <= self.max_tokens

    def _cut(self, texts: Sequence[str], kept: int) -> list[str]:
        omitted = sum(map(len, texts)) - kept
        start = {"left": kept, "middle": (kept + 1) // 2, "right": 0}[self.side]
        stop, marker = start + omitted, self.marker.format(omitted=omitted)
        made: list[str] = []
        for text in texts:  # start and stop count from the beginning of this text
            is_here = bool(marker) and start <= len(text)
            made.append(text[: max(0, start)] + (marker if is_here else "") + text[max(0, stop) :])
            marker = "" if is_here else marker
            start, stop = start - len(text), stop - len(text)
        return made
