"""Images that come as the bytes of a file: of which type they are; opened if not too large, right way up."""

from __future__ import annotations

import importlib
import io
import re
import warnings
from typing import TYPE_CHECKING

from torchrl_agentic.errors import MissingExtra

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 64_000_000
"""Larger images are not opened: a few bytes can claim to be any size."""

_STARTS = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
}


def image_type(data: bytes | bytearray) -> str | None:
    """Give the media type of an image file, by how it begins; None if it is of none that we know."""
    return next((kind for kind, start in _STARTS.items() if start.match(data)), None)


def require_pillow() -> None:
    """See that images can be opened.

    Raises:
        MissingExtra: they cannot.
    """
    try:
        importlib.import_module("PIL")
    except ImportError:
        raise MissingExtra("Opening images", "pillow", "images") from None


def decoded(data: bytes) -> Image:
    """Open an image file, in RGB.

    Raises:
        ValueError: it is none that can be opened, or is too large.
        MissingExtra: Pillow is not installed.
    """
    require_pillow()
    try:
        return _decoded(data)
    except Exception as error:  # Pillow raises whatever it likes of broken files
        raise ValueError(f"the image cannot be opened: {error}") from error


def _decoded(data: bytes) -> Image:
    from PIL import Image, ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # we have a bound of our own
        image = Image.open(io.BytesIO(data))
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width} × {image.height} pixels are more than {MAX_PIXELS:,}")
    return (ImageOps.exif_transpose(image) or image).convert("RGB")
