"""Open image files of tools and data sets, up to a size; needs Pillow."""

from __future__ import annotations

import importlib
import io
import warnings
from typing import TYPE_CHECKING

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


def _decoded(data: bytes) -> Image:
    from PIL import Image, ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is our bound
        image = Image.open(io.BytesIO(data))
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width} × {image.height} pixels are more than {MAX_PIXELS:,}")
    return (ImageOps.exif_transpose(image) or image).convert("RGB")
