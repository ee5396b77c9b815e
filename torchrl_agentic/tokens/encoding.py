"""Encode text as token ids, so that text of tools never becomes control tokens; decode ids."""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torchrl_agentic.parsers.control_tokens import Escaper, control_tokens_of


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text that comes from one source.

    Attributes:
        text: The text.
        source: Source of its tokens, as in `TokenLedger`.
        is_trusted: The text may contain control tokens.
    """

    text: str
    source: int
    is_trusted: bool = False


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded text.

    Attributes:
        ids: Token ids, [T].
        sources: Source of each token, as in `TokenLedger`, [T].
        starts: Index of the first character of each token in the text, [T].
    """

    ids: list[int]
    sources: list[int]
    starts: list[int]

    def after(self, start: int) -> Encoded:
        """Return the tokens that begin at the character with index `start`, or later."""
        first = bisect.bisect_left(self.starts, start)
        return Encoded(self.ids[first:], self.sources[first:], self.starts[first:])


Expansions = Mapping[str, Sequence[str]]
"""Placeholder, such as that of an image → the texts that replace its first occurrence, its second, ..."""


class Encoder:
    """Encodes texts whose parts come from several sources.

    A text of trusted parts has the ids that the tokenizer gives it. A control token that would arise in an
    untrusted part, or across its edge, is split: its characters are encoded as plain text.

    Args:
        tokenizer: A fast tokenizer of transformers.

    Raises:
        TypeError: If the tokenizer is a slow one, which does not return the offsets of tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TypeError(f"a fast tokenizer is needed (tokenizers); got {type(tokenizer).__name__}")
        self._backend = copy.deepcopy(backend)  # other users of the tokenizer set its truncation
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        self.control = frozenset(control_tokens_of(tokenizer))
        """Ids of the control tokens."""

    def encode(self, pieces: Iterable[Piece], expansions: Expansions | None = None) -> Encoded:
        """Encode the concatenated text of the pieces, without special tokens at its beginning and end.

        Args:
            pieces: Parts of the text, in order.
            expansions: Replacements of placeholders in trusted pieces. They are encoded together with the
                text around them, as processors do; `starts` index the expanded text.

        Raises:
            ValueError: If there are more or fewer placeholders than expansions.
        """
        pieces = [piece for piece in (_expanded(pieces, expansions) if expansions else pieces) if piece.text]
        text = "".join(piece.text for piece in pieces)
        edges = list(itertools.accumulate((len(piece.text) for piece in pieces), initial=0))
        cuts: set[int] = set()
        while True:
            ids, spans = self._encode(text, sorted(cuts))
            forged = [
                start
                for token, (start, stop) in zip(ids, spans, strict=True)
                if token in self.control
                and stop > start
                and not all(
                    piece.is_trusted
                    for piece in pieces[
                        bisect.bisect_right(edges, start) - 1 : bisect.bisect_left(edges, stop)
                    ]
                )
            ]
            if not forged:
                starts = [start for start, _ in spans]
                firsts = [*(bisect.bisect_left(starts, edge) for edge in edges[:-1]), len(starts)]
                sources: list[int] = []
                for piece, (first, after) in zip(pieces, itertools.pairwise(firsts), strict=True):
                    sources += [piece.source] * (after - first)
                return Encoded(ids, sources, starts)
            cuts.update(start + 1 for start in forged)

    @functools.cached_property
    def longest_token(self) -> int | None:
        """Largest number of characters of a token; None if the tokenizer may shorten text by any factor.

        NFC joins at most four characters to one.
        """
        normalizer = self._backend.normalizer
        if normalizer is not None and type(normalizer).__name__ != "NFC":
            return None
        return max(map(len, self._backend.get_vocab())) * (1 if normalizer is None else 4)

    def encode_text(self, text: str, expansions: Expansions | None = None) -> list[int]:
        """Return the ids of a text that is trusted as a whole, without special tokens at its ends.

        It is faster than `encode`, since it computes no offsets.

        Args:
            text: The text.
            expansions: As `encode` takes them.

        Raises:
            ValueError: If there are more or fewer placeholders than expansions.
        """
        if expansions:
            text = "".join(piece.text for piece in _expanded([Piece(text, 0, is_trusted=True)], expansions))
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for start, stop in itertools.pairwise((0, *cuts, len(text))):
            found = self._backend.encode(text[start:stop], add_special_tokens=False)
            ids += found.ids
            spans += [(start + a, start + b) for a, b in found.offsets] if start else found.offsets
        return ids, spans


def _expanded(pieces: Iterable[Piece], expansions: Expansions) -> Iterator[Piece]:
    """Replace the placeholders in trusted pieces."""
    counts = dict.fromkeys(expansions, 0)
    for piece in pieces:
        rest = piece.text
        while piece.is_trusted and (found := _first(rest, expansions)):
            before, mark, rest = found
            yield Piece(before, piece.source, is_trusted=True)
            if counts[mark] < len(expansions[mark]):
                yield Piece(expansions[mark][counts[mark]], piece.source, is_trusted=True)
            counts[mark] += 1
        yield Piece(rest, piece.source, piece.is_trusted)
    for mark, count in counts.items():
        if count != len(expansions[mark]):
            raise ValueError(
                f"{count} placeholders {mark!r} for {len(expansions[mark])} images or videos: either the "
                "chat template does not show them in messages of this role (then another chat_template= or "
                "tool_role=, or ToolCompose(media=False)), or a text holds the placeholder (then "
                "escape_control_tokens(text))"
            )


def _first(text: str, marks: Iterable[str]) -> tuple[str, str, str] | None:
    """Split a text at the first mark: the text before it, the mark, the text after it."""
    found = [(text.find(mark), mark) for mark in marks if mark in text]
    if not found:
        return None
    at, mark = min(found)
    return text[:at], mark, text[at + len(mark) :]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the exact text of token ids, control tokens and spaces included.

    Args:
        tokenizer: A fast tokenizer of transformers.
        ids: Token ids.
    """
    return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)


def escaped(message: Mapping[str, Any], control: Escaper) -> dict[str, Any]:
    """Return a message whose content, name and call id hold no control tokens if a tool wrote it.

    Args:
        message: A message; those without a tool result are returned unchanged.
        control: Escapes the control tokens.
    """
    made, content = dict(message), message.get("content")
    blocks = cast("list[Mapping[str, Any]]", content) if isinstance(content, list) else []
    if "tool_call_id" not in made and not any(block.get("type") == "tool_result" for block in blocks):
        return made
    made.update(escaped_names(made, control))
    if isinstance(content, str):
        made["content"] = control.escape(content)
    elif isinstance(content, list):
        made["content"] = escaped_parts(blocks, control)
    return made


def escaped_names(message: Mapping[str, Any], control: Escaper) -> dict[str, str]:
    """Return "name" and "tool_call_id" of a message, as far as it has them, without control tokens.

    Args:
        message: A message.
        control: Escapes the control tokens.
    """
    found = {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
    return {key: control.escape(value) for key, value in found.items()}


def escaped_parts(parts: Sequence[Mapping[str, Any]], control: Escaper) -> list[dict[str, Any]]:
    """Return the parts of a content without control tokens, even if a template omits some of the parts.

    Args:
        parts: Parts of the content of a message.
        control: Escapes the control tokens.
    """
    keys = [next((k for k in ("text", "content") if isinstance(part.get(k), str)), None) for part in parts]
    texts = iter(control.together([part[key] for part, key in zip(parts, keys, strict=True) if key]))
    return [{**part, key: next(texts)} if key else dict(part) for part, key in zip(parts, keys, strict=True)]
