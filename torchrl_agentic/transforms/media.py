"""Images and videos in messages: what a processor puts into the prompt for each."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.transforms.encoding import Expand


def expansions(processor: Any, chat: Sequence[Mapping[str, Any]]) -> dict[str, Expand]:
    """Give, for each kind of placeholder, what makes the ids that stand for the k-th one in these messages.

    processor: None, of a model that reads text alone.
    """
    if processor is None:
        return {}
    found: dict[str, Expand] = {}
    for kind, argument in (("image", "images"), ("video", "videos")):
        mark, items = getattr(processor, f"{kind}_token", None), media_of(chat, kind)
        if mark is not None and items:
            found[mark] = _expand(processor, mark, argument, items)
    return found


def media_of(chat: Sequence[Mapping[str, Any]], kind: str) -> list[Any]:
    """Give the images ("image"), or videos ("video"), of a conversation, as processors take them."""
    found: list[Any] = []
    for message in chat:
        content = message.get("content")
        if isinstance(content, str | None):
            continue
        found += [_opened(part, kind) for part in content if part.get("type") == kind]
    return found


def _expand(processor: Any, mark: str, argument: str, items: Sequence[Any]) -> Expand:
    def expand(index: int) -> Sequence[int]:
        made = processor(text=[mark], **{argument: [items[index]]}, add_special_tokens=False)
        return list(made["input_ids"][0])

    return expand


def _opened(part: Mapping[str, Any], kind: str) -> Any:
    """Give an image as a PIL image where it is data; a video, a path or an address as they are."""
    data = part.get("base64")
    if data is None or kind != "image":
        return next(value for key, value in part.items() if key not in ("type", "media_type"))
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("Images in prompts", "pillow", "images") from None
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
