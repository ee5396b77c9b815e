"""Images and videos in messages: what a processor puts into the prompt for each."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchrl_agentic.messages import JSON, Content, ImagePart, TextPart, ToolResult, VideoPart, content_text
from torchrl_agentic.tools.images import decoded

KINDS = {"image": "images", "video": "videos"}
"""Kinds of media, and the argument of a processor that takes them."""
_REMEMBERED = 256
_WORD = re.compile(r"vjq([0-9]+)media")


def slotted(results: Sequence[ToolResult]) -> tuple[list[ToolResult], dict[str, JSON]]:
    """Give results with a word in place of each image and video; and by word, the part of a message.

    A parser writes such results as it writes any text; then `filled` puts the parts in.
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
    """Give messages with parts in place of words; None if a word is not there once, in a content of text."""
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
    """What a processor puts into a prompt for each image and video, as text.

    The same image often stands in several rows; what stands for the latest ones is remembered.

    processor: None, of a model that reads text alone.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._known: dict[bytes, str] = {}

    def __call__(self, chat: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
        """Give, for each placeholder, what stands for the first one in these messages, the second, ...

        Raises:
            ValueError: the model sees no media of this kind.
            Exception: whatever the processor raises of an image that it does not like.
        """
        found: dict[str, list[str]] = {}
        for kind in KINDS:
            parts = parts_of(chat, kind)
            if parts:
                found[self._mark(kind)] = [self.text(part, kind) for part in parts]
        return found

    def text(self, part: Mapping[str, Any], kind: str) -> str:
        """Give what stands for one of them."""
        data = part.get("base64")
        key = None if data is None else hashlib.blake2b(f"{kind} {data}".encode()).digest()
        text = None if key is None else self._known.pop(key, None)
        if text is None:
            text = self._made(self._mark(kind), kind, opened(part, kind))
        if key is not None:
            self._known[key] = text  # the latest is the last
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        return text

    def takes(self, kind: str) -> bool:
        """Whether the model sees media of this kind."""
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
        if isinstance(item, bytes):  # processors read videos from files alone
            with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
                file.write(item)
                file.flush()
                return self._made(mark, kind, file.name)
        made = self._processor(text=[mark], **{KINDS[kind]: [item]}, add_special_tokens=False)
        return self._processor.tokenizer.decode(
            list(made["input_ids"][0]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def parts_of(chat: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """Give the parts of messages that are images ("image"), or videos ("video"), in their order."""
    contents = [message.get("content") for message in chat]
    return [
        part for content in contents if isinstance(content, list) for part in content if kind_of(part) == kind
    ]


def as_text(content: Content) -> str:
    """Give a content as the text of a result, in which a line names each image and video."""
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


def kind_of(part: Any) -> str | None:
    """Give which of `KINDS` a part of a message is; None if it is none."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    kind = {"image_url": "image", "video_url": "video"}.get(kind, kind) if isinstance(kind, str) else None
    return kind if kind in KINDS else None


def opened(part: Mapping[str, Any], kind: str) -> Any:
    """Give a part's image as processors take it: opened if it is data, else the path, address or object.

    A video that is data is given as bytes.

    Raises:
        ValueError: it holds no image, or the data is none that can be opened.
        MissingExtra: it must be opened, and Pillow is not installed.
    """
    data = part.get("base64")
    if data is not None:
        raw = base64.b64decode(data)
        return decoded(raw) if kind == "image" else raw
    value = next((part[key] for key in (kind, "url", "path", f"{kind}_url") if key in part), None)
    if value is None:
        raise ValueError(f"a part of type {part.get('type')!r} has none of: base64, {kind}, url, path")
    return value.get("url") if isinstance(value, Mapping) else value


def _opens(data: bytes) -> bool:
    try:
        decoded(data)
    except ValueError:
        return False
    return True
