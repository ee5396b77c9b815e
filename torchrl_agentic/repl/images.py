"""Which images are taken from inside: so many, so large, and those that are what they say they are."""

from __future__ import annotations

from torchrl_agentic.messages import image_type
from torchrl_agentic.sandbox.inside.worker import MAX_DISPLAY_BYTES as MAX_IMAGE
from torchrl_agentic.sandbox.inside.worker import MAX_DISPLAYS as MAX_IMAGES

__all__ = ["KINDS", "MAX_IMAGE", "MAX_IMAGES", "is_image"]
KINDS = ("image/png", "image/jpeg")
"""The media types that are taken."""


def is_image(kind: str, data: bytes) -> bool:
    """Whether something is an image of that kind, and not too large."""
    return kind in KINDS and image_type(data) == kind and len(data) <= MAX_IMAGE
