"""What a model that sees needs besides the ids of a prompt: its images and videos."""

from __future__ import annotations

from typing import Any, Literal

from tensordict import TensorDictBase

from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms import media


def media_of(td: TensorDictBase, kind: Literal["image", "video"] = "image") -> list[list[Any]]:
    """Give all images, or videos, of each row's ("history", "prompt"), in the order of their placeholders.

    An image that came as data is opened, as `PIL.Image`, in RGB; a video that came as data is given as bytes.
    What came as a path, an address or an object is given as it is. Rows count through the flattened batch.

    ("tokens", "prompt") holds what stands for them already, so that a transformers model takes
    `processor.image_processor(images=media_of(td)[row])` beside the ids. An engine that puts that in by
    itself, as vLLM does, takes the rendered text and these images instead.

    Raises:
        MissingExtra: an image must be opened, and Pillow is not installed.
    """
    chats = [
        [border.message_dict(message) for message in border.messages(conversation)]
        for conversation in border.prompts(td)
    ]
    return [[media.opened(part, kind) for part in media.parts_of(chat, kind)] for chat in chats]
