"""Truncate long tool results, with a marker inside the limit that says how much is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Side = Literal["left", "middle", "right"]
Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Clip:
    """Truncate text of tool results to a bound.

    Args:
        max_tokens: Upper bound in tokens, marker included; None: no bound.
        max_chars: Upper bound in characters, marker included; None: no bound.
        side: The part that is kept, as in verl up to 0.7: "left" keeps the head, "right" the tail, "middle"
            both ends.
        marker: Replaces what was left out; `{omitted}` becomes the number of characters.

    Raises:
        ValueError: If a bound is below 1, the side is unknown, or the marker alone exceeds the bound.
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
        longest = len(self.marker.format(omitted=10**9))
        if self.max_chars is not None and self.max_chars < longest:
            raise ValueError(
                f"max_chars={self.max_chars} leaves no room for the marker, which takes {longest}: "
                f"{self.marker!r}"
            )

    def __call__(self, text: str, count: Count) -> str:
        """Give the text, cut if it is too long. count: how many tokens a text has."""
        return self.together([text], count)[0]

    def together(self, texts: Sequence[str], count: Count) -> list[str]:
        """Give texts between which something else stands, cut as if they were one; some may become empty."""
        if self._fits(texts, count):
            return list(texts)
        size = sum(map(len, texts))
        most = size if self.max_chars is None else min(size, self.max_chars)
        low, high = 0, min(most, self.max_tokens or most)  # so many characters are kept; `low` fit
        while high < most and self._fits(self._cut(texts, high), count):
            low, high = high, min(most, 2 * high)
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(self._cut(texts, middle), count):
                low = middle
            else:
                high = middle - 1
        return self._cut(texts, low)

    def _fits(self, texts: Sequence[str], count: Count) -> bool:
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
        for text in texts:  # start and stop count from the beginning of this one
            is_here = bool(marker) and start <= len(text)
            made.append(text[: max(0, start)] + (marker if is_here else "") + text[max(0, stop) :])
            marker = "" if is_here else marker
            start, stop = start - len(text), stop - len(text)
        return made
