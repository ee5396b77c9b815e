"""Images and videos in messages, and the text that a processor writes into the prompt for each."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from torchrl_agentic.tools.images import decoded

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
