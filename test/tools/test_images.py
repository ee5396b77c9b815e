"""Images are opened the right way up, and not if they are broken or claim to be huge."""

import base64
import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from torchrl_agentic import MissingExtra
from torchrl_agentic.messages import image_type
from torchrl_agentic.tools.images import MAX_PIXELS, decoded, open_image


def png(width=20, height=10, mode="RGB"):
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def claiming(width, height):
    """A small image whose header says that it is another size."""
    data = bytearray(png())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP"])
def test_image_type_is_detected_by_its_first_bytes(format):
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10)).save(buffer, format)
    assert image_type(buffer.getvalue()) == image_type(buffer.getvalue()[:12]) == f"image/{format.lower()}"


@pytest.mark.parametrize("data", [b"", b"RIFF\0\0\0\0WAVE", b"GIF88a", b"\x89PNG", b"BM", b"\n" + png()])
def test_data_of_unknown_type_has_no_image_type(data):
    assert image_type(data) is None


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "I;16"])
def test_an_image_is_opened_in_rgb(mode):
    image = decoded(png(mode=mode))
    assert (image.mode, image.size) == ("RGB", (20, 10))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_opened_the_right_way_up(orientation):
    image, exif, buffer = Image.new("RGB", (20, 10)), Image.Exif(), io.BytesIO()
    exif[274] = orientation
    image.save(buffer, "JPEG", exif=exif)
    assert decoded(buffer.getvalue()).size == ((20, 10) if orientation < 5 else (10, 20))


@pytest.mark.parametrize("side", [8_001, 10_000, 50_000], ids=["large", "warned_of", "bomb"])
def test_claims_of_huge_images_are_not_believed(side):
    assert side * side > MAX_PIXELS
    with pytest.raises(ValueError, match="cannot be opened: "):
        decoded(claiming(side, side))


@given(st.binary() | st.tuples(st.integers(0, 80), st.binary(min_size=1, max_size=9)))
def test_broken_images_raise_one_type_of_error(damage):
    data = damage
    if isinstance(damage, tuple):
        place, patch = damage
        data = bytearray(png())
        data[place : place + len(patch)] = patch
    try:
        assert decoded(bytes(data)).mode == "RGB"
    except ValueError as error:
        assert str(error).startswith("the image cannot be opened: ")


def test_without_pillow_the_extra_is_named(monkeypatch):
    data = png()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"torchrl-agentic\[images\]"):
        decoded(data)


@pytest.mark.parametrize(
    "image",
    [
        Image.new("RGB", (20, 10)),
        png(),
        base64.b64encode(png()).decode(),
        f"data:image/png;base64,{base64.b64encode(png()).decode()}",
        {"bytes": png(), "path": None},
    ],
)
def test_images_come_in_many_forms(image, tmp_path):
    assert open_image(image).size == (20, 10)
    (tmp_path / "i.png").write_bytes(png())
    assert open_image(str(tmp_path / "i.png")).size == open_image(f"file://{tmp_path}/i.png").size == (20, 10)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("https://example.org/i.png", "not loaded from the network"),
        ("no such file", "as a path or base64"),
        (b"no image", "cannot be opened"),
        (7, "got int"),
    ],
)
def test_invalid_image_is_rejected(image, message):
    with pytest.raises(ValueError, match=message):
        open_image(image)
