"""Open image files of tools and data sets, up to a size; needs Pillow."""

from __future__ import annotations

import base64
import importlib
import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchrl_agentic.errors import MissingExtra

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 64_000_000
"""Largest image that is opened. A header of a few bytes can claim any size."""


def require_pillow() -> None:
    """Check that Pillow is installed.

    Raises:
        MissingExtra: If it is not.
    """
    try:
        importlib.import_module("PIL")
    except ImportError:
        raise MissingExtra("Opening images", "pillow", "images") from None


def decoded(data: bytes) -> Image:
    """Open an image file, turned upright as its EXIF data says.

    Args:
        data: The bytes of the file.

    Returns:
        The image, in RGB.

    Raises:
        ValueError: If the data is not an image that Pillow can open, or the image has more than `MAX_PIXELS`.
        MissingExtra: If Pillow is not installed.
    """
    require_pillow()
    try:
        return _decoded(data)
    except Exception as error:  # Pillow documents no common exception for broken files
        raise ValueError(f"the image cannot be opened: {error}") from error


def open_image(image: Any) -> Image:
    """Open an image.

    Args:
        image: A Pillow image, the bytes of a file, base64, a data URL, a path, or a mapping with one of them
            as "bytes", "path" or "image".

    Returns:
        The image, in RGB.

    Raises:
        ValueError: If it has another type, cannot be opened, or is too large.
    """
    require_pillow()
    from PIL import Image as pillow

    if isinstance(image, pillow.Image):  # already turned upright by its owner
        return image.convert("RGB")
    if isinstance(image, Mapping):  # column files store images as {"bytes", "path"}
        fields = cast("Mapping[str, Any]", image)
        image = fields.get("bytes") or fields.get("path") or fields.get("image")
    if isinstance(image, str):
        image = _bytes_of(image)
    if not isinstance(image, bytes):
        raise ValueError(f"expected a Pillow image, bytes, base64 or a path; got {type(image).__name__}")
    return decoded(image)


def _bytes_of(text: str) -> bytes:
    if re.match(r"https?://", text):
        raise ValueError(f"images are not loaded from the network; got {text[:80]!r}")
    if text.startswith("data:"):
        return base64.b64decode(text.partition(",")[2])
    path = Path(text.removeprefix("file://")) if len(text) < 4096 else None
    if path is not None and path.is_file():
        return path.read_bytes()
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError(f"expected an image as a path or base64; got {text[:80]!r}") from None


def _decoded(data: bytes) -> Image:
    from PIL import Image, ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is our bound
        image = Image.open(io.BytesIO(data))
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width} × {image.height} pixels are more than {MAX_PIXELS:,}")
    return (ImageOps.exif_transpose(image) or image).convert("RGB")
