"""Encode text, images and videos as token ids; decode ids.

Text of tools never becomes control tokens (`Encoder`). A processor replaces each image and video by text,
which is encoded with the text around it (`Expander`).
"""

from __future__ import annotations

import base64
import bisect
import copy
import functools
import hashlib
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torchrl_agentic.messages import (
    JSON,
    Content,
    Fields,
    ImagePart,
    TextPart,
    ToolResult,
    VideoPart,
    content_text,
    fields_of,
)
from torchrl_agentic.parsers.base import Escaper
from torchrl_agentic.parsers.control_tokens import control_tokens_of
from torchrl_agentic.tools.images import decoded


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


KINDS = {"image": "images", "video": "videos"}
"""Kind of media → the argument of a processor that takes a list of them."""
_REMEMBERED = 256
_WORD = re.compile(r"vjq([0-9]+)media")


def slotted(results: Sequence[ToolResult]) -> tuple[list[ToolResult], dict[str, JSON]]:
    """Replace each image and video in tool results with a word, so that any parser can render them.

    Args:
        results: Results of tool calls.

    Returns:
        The results as text, and by word the part of a message that `filled` puts back.
    """
    taken = {found for result in results for found in _WORD.findall(result.text)}
    number = next(number for number in itertools.count() if str(number) not in taken)
    slots: dict[str, JSON] = {}
    made: list[ToolResult] = []
    for result in results:
        text, is_text = "", False
        for part in result.parts:
            if isinstance(part, VideoPart) or (isinstance(part, ImagePart) and _opens(part.data)):
                word = f"vjq{number}media{len(slots)}qvj"
                data = base64.b64encode(part.data).decode()
                slots[word] = {"type": part.kind, "base64": data, "media_type": part.media_type}
                text, is_text = text + word, False
            else:
                text, is_text = f"{text}\n{part}" if is_text else f"{text}{part}", True
        made.append(replace(result, parts=(TextPart(text),)))
    return made, slots


def filled(
    messages: Sequence[Mapping[str, JSON]], slots: Mapping[str, JSON]
) -> list[Mapping[str, JSON]] | None:
    """Replace the words of `slotted` in rendered messages with the parts they stand for.

    Args:
        messages: Rendered messages.
        slots: Word → part of a message.

    Returns:
        The messages, or None unless each word occurs exactly once in the contents that are text.
    """
    written = [message["content"] for message in messages if isinstance(message["content"], str)]
    stem = next(iter(slots)).removesuffix("0qvj")
    pattern = re.compile(f"({stem}[0-9]+qvj)")
    counts = Counter(word for text in written for word in pattern.findall(text))
    if any(counts[word] != 1 for word in slots):
        return None
    made: list[Mapping[str, JSON]] = []
    for message in messages:
        found = pattern.split(message["content"]) if isinstance(message["content"], str) else []
        if len(found) > 1:
            parts = [slots.get(piece) or {"type": "text", "text": piece} for piece in found if piece]
            message = {**message, "content": parts}
        made.append(message)
    return made


class Expander:
    """Returns the text that a processor writes into a prompt for each image and video.

    The same image often occurs in several rows, so the texts of the latest ones are cached.

    Args:
        processor: A processor of transformers, or None if the model reads text only.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._known: dict[bytes, str] = {}

    def __call__(self, chat: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
        """Return the expansions of all images and videos in a conversation, as `Encoder.encode` takes them.

        Raises:
            ValueError: If the model takes no media of some kind.
            Exception: If the processor rejects an image; processors raise any type.
        """
        found: dict[str, list[str]] = {}
        for kind in KINDS:
            parts = parts_of(chat, kind)
            if parts:
                found[self._mark(kind)] = [self.text(part, kind) for part in parts]
        return found

    def text(self, part: Mapping[str, Any], kind: str) -> str:
        """Return the text that the processor writes for one image or video.

        Args:
            part: The part of a message.
            kind: "image" or "video".

        Raises:
            ValueError: If the model takes no media of this kind.
            Exception: If the processor rejects it; processors raise any type.
        """
        data = part.get("base64")
        key = None if data is None else hashlib.blake2b(f"{kind} {data}".encode()).digest()
        text = None if key is None else self._known.pop(key, None)
        if text is None:
            text = self._made(self._mark(kind), kind, opened(part, kind))
        if key is not None:
            self._known[key] = text  # dictionaries keep their order: the oldest is the first
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        return text

    def takes(self, kind: str) -> bool:
        """Check whether the model takes media of a kind: "image" or "video"."""
        return getattr(self._processor, f"{kind}_token", None) is not None

    def _mark(self, kind: str) -> str:
        if not self.takes(kind):
            raise ValueError(
                f"a conversation holds {KINDS[kind]}, and "
                + ("no processor is given: TurnTokenizer(tokenizer, processor=processor)"
                   if self._processor is None
                   else f"{type(self._processor).__name__} takes none; let tools return text")
            )  # fmt: skip
        return getattr(self._processor, f"{kind}_token")

    def _made(self, mark: str, kind: str, item: Any) -> str:
        if isinstance(item, bytes):  # processors read videos only from files
            with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
                file.write(item)
                file.flush()
                return self._made(mark, kind, file.name)
        made = self._processor(text=[mark], **{KINDS[kind]: [item]}, add_special_tokens=False)
        return self._processor.tokenizer.decode(
            list(made["input_ids"][0]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def parts_of(chat: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """Return the images or videos of a conversation, in order.

    Args:
        chat: Messages.
        kind: "image" or "video".
    """
    contents = [message.get("content") for message in chat]
    lists = [cast("list[Fields]", content) for content in contents if isinstance(content, list)]
    return [part for parts in lists for part in parts if kind_of(part) == kind]


def as_text(content: Content) -> str:
    """Return the content of a message as text, in which a line names each image and video."""
    if not isinstance(content, list):
        return content_text(content)
    lines: list[str] = []
    for part in content:
        kind, data = kind_of(part), part.get("base64")
        made = {"image": ImagePart, "video": VideoPart}.get(kind or "")
        if made is None or data is None:
            lines.append(content_text([part]))
        else:
            lines.append(str(made(base64.b64decode(data), part.get("media_type", f"{kind}/*"))))
    return "\n".join(lines)


def kind_of(part: JSON) -> str | None:
    """Return which of `KINDS` a part of a message is, or None if it is text or something else."""
    kind = (fields_of(part) or {}).get("type")
    kind = {"image_url": "image", "video_url": "video"}.get(kind, kind) if isinstance(kind, str) else None
    return kind if kind in KINDS else None


def opened(part: Mapping[str, Any], kind: str) -> Any:
    """Return an image or video as processors take it.

    Args:
        part: The part of a message.
        kind: "image" or "video".

    Returns:
        A `PIL.Image` or the bytes of a video if the part holds data, else its path, URL or object.

    Raises:
        ValueError: If the part holds no image, or data that cannot be opened.
        MissingExtra: If an image must be opened and Pillow is not installed.
    """
    data = part.get("base64")
    if data is not None:
        raw = base64.b64decode(data)
        return decoded(raw) if kind == "image" else raw
    value = next((part[key] for key in (kind, "url", "path", f"{kind}_url") if key in part), None)
    if value is None:
        raise ValueError(f"a part of type {part.get('type')!r} has none of: base64, {kind}, url, path")
    fields = fields_of(value)
    return value if fields is None else fields.get("url")


def _opens(data: bytes) -> bool:
    try:
        decoded(data)
    except ValueError:
        return False
    return True
