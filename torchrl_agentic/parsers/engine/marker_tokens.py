"""Decode sampled tokens, keeping markers that are tokens apart from the same characters."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torchrl_agentic.messages import ParseResult
from torchrl_agentic.parsers.base import Tokenizer


class MarkerTokens:
    """The text of sampled tokens, and the places of markers in it.

    Args:
        ids: Sampled token ids.
        tokenizer: The tokenizer of the model.
        markers: Markers of the format.

    Attributes:
        text: The decoded text.
        exact: Places where a marker is one token, or contains one that is a marker, by marker. Markers
            without a token in the vocabulary are missing: their characters count.
    """

    def __init__(self, ids: Sequence[int], tokenizer: Tokenizer, markers: Sequence[str]) -> None:
        self._ids = [int(token) for token in ids]
        self._tokenizer = tokenizer
        self.text = tokenizer.decode(self._ids, skip_special_tokens=False)
        known = {token: marker for marker in markers if (token := _token(tokenizer, marker)) is not None}
        # The beginnings and ends of markers as (index in the text, index of the token).
        self._anchors: list[tuple[int, int]] = [(0, 0)]
        self.exact: dict[str, list[int]] = {marker: [] for marker in known.values()}
        if not self._place(known):
            self.exact, self._anchors = {}, [(0, 0)]
        others = [marker for marker in markers if marker not in self.exact]
        parts = {marker: part for marker in others for part in self.exact if part in marker}
        self.exact |= {marker: self._around(marker, part) for marker, part in parts.items()}
        self._anchors.append((len(self.text), len(self._ids)))

    def _place(self, known: Mapping[int, str]) -> bool:
        """Find the places of the marker tokens in the text; return False if the tokenizer rewrites text.

        Tokenizers may drop a space if a piece is decoded alone. A piece therefore only shows how often the
        marker is spelled out before the next token; its place is taken from the whole text.
        """
        at = start = 0
        for index, token in enumerate(self._ids):
            if token not in known:
                continue
            marker, piece = known[token], self._decoded(start, index)
            place = self.text.find(marker, at)
            for _ in range(piece.count(marker)):
                place = self.text.find(marker, place + len(marker))
            if place < 0:
                return False  # this tokenizer rewrites the text that it decodes
            at = place + len(marker)
            self.exact[marker].append(place)
            self._anchors += [(place, index), (at, index + 1)]
            start = index + 1
        return True

    def _around(self, marker: str, part: str) -> list[int]:
        """Return the places of a marker that contains a part which is one token there."""
        offset = marker.index(part)
        places = (place - offset for place in self.exact[part])
        return [place for place in places if place >= 0 and self.text.startswith(marker, place)]

    def _decoded(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=False)

    def with_token_spans(self, result: ParseResult) -> ParseResult:
        """Return the result with token spans; a token that is partly inside a call belongs to it."""
        calls = [
            replace(call, token_span=(self._token_at(call.span[0]), self._tokens_before(call.span[1])))
            for call in result.calls
            if call.span is not None
        ]
        return replace(result, calls=tuple(calls))

    def _token_at(self, place: int) -> int:
        """Return the index of the token with the character at a place."""
        begin, end, length = self._stretch(place)
        return (
            begin
            if begin == end
            else max(begin, bisect_right(range(begin, end), place, key=length) + begin - 1)
        )

    def _tokens_before(self, place: int) -> int:
        """Return the number of tokens needed to reach a place."""
        begin, end, length = self._stretch(place)
        return bisect_left(range(begin, end), place, key=length) + begin

    def _stretch(self, place: int) -> tuple[int, int, Callable[[int], int]]:
        """Return the known tokens around a place, and a function of the text length before a token."""
        index = bisect_right(self._anchors, (place, len(self._ids)))
        offset, begin = self._anchors[index - 1]
        if offset == place or index == len(self._anchors):
            return begin, begin, lambda token: token
        # Decode the token before as well: the first token of a piece may lose its space.
        before = max(0, begin - 1)
        skipped = len(self._decoded(before, begin))

        def length(token: int) -> int:
            return offset + len(self._decoded(before, token)) - skipped

        return begin, self._anchors[index][1], length


def _token(tokenizer: Tokenizer, marker: str) -> int | None:
    token = tokenizer.convert_tokens_to_ids(marker)
    return token if isinstance(token, int) and tokenizer.convert_ids_to_tokens(token) == marker else None
