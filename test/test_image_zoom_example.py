"""`examples/image_zoom.py`: it shows the whole box, large enough, or explains why the box is invalid."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_zoom import ImageZoomTool, fit
from PIL import Image

from torchrl_agentic import MissingExtra, ParsedCall, RowData
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.tools import LifecycleTool

IMAGE = Image.new("RGB", (200, 100), "white")
IMAGE.paste("red", (100, 0, 200, 100))


def png(image=IMAGE):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


async def zoom(*boxes, image=IMAGE, config=None):
    tool = LifecycleTool(ImageZoomTool(config))
    async with Dispatcher([tool]).session("t") as session:
        session.data = RowData(tools_kwargs={tool.name: {"create_kwargs": {"image": image}}})
        calls = [
            ParsedCall(tool.name, {"bbox_2d": box, "label": "it"}, f"c{n}") for n, box in enumerate(boxes)
        ]
        return await session.run(calls)


async def test_image_is_cropped_to_the_box():
    (result,) = await zoom([120, 10, 180, 60])
    assert result.parts[0].text == "Zoomed in on [120, 10, 180, 60] (it)."
    shown = Image.open(io.BytesIO(result.parts[1].data))
    assert shown.size == (60, 50)
    assert shown.getcolors() == [(3000, (255, 0, 0))]
    assert (result.reward, result.metrics) == (0.0, {"success": True})


@pytest.mark.parametrize(
    ("box", "message"),
    [
        ([300, 0, 400, 50], "outside of the image of 200 × 100 pixels"),
        ([50, 0, 10, 50], "x1 < x2 and y1 < y2"),
        ([0, 0, 200, 1], "200 times its shorter side; at most 100 times is allowed"),
    ],
)
async def test_empty_box_is_explained_and_penalised(box, message):
    (result,) = await zoom(box)
    assert message in result.text
    assert (result.reward, result.metrics) == (-0.05, {"success": False})


async def test_too_small_image_is_reported():
    (result,) = await zoom([0, 0, 5, 5], image=Image.new("RGB", (10, 10)))
    assert "zooming in needs at least 28" in result.text
    (result,) = await zoom([0, 0, 5, 5], image=Image.new("RGB", (10, 10)), config={"min_side": 4})
    assert result.reward == 0.0


_sides = st.lists(st.floats(-50, 400), min_size=2, max_size=2, unique=True).map(sorted)


@given(
    box=st.tuples(_sides, _sides).map(lambda sides: (sides[0][0], sides[1][0], sides[0][1], sides[1][1])),
    size=st.tuples(st.integers(28, 300), st.integers(28, 300)),
)
def test_crop_is_inside_the_image_large_enough_and_contains_the_box(box, size):
    try:
        left, top, right, bottom = fit(box, size, 28, 100)
    except ValueError:
        return
    near = 1e-6
    assert -near <= left < right <= size[0] + near
    assert -near <= top < bottom <= size[1] + near
    assert min(right - left, bottom - top) >= 28 - near
    assert left <= max(0, box[0]) + near
    assert right >= min(size[0], box[2]) - near


async def test_a_photograph_is_cropped_the_way_up_that_the_model_sees_it():
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[274] = 6  # taken with the camera turned to its left
    IMAGE.save(buffer, "JPEG", exif=exif)
    (result,) = await zoom([10, 120, 90, 180], image=buffer.getvalue())
    assert Image.open(io.BytesIO(result.parts[1].data)).size == (80, 60)


async def test_a_row_without_an_image_says_where_it_belongs():
    with pytest.raises(ValueError, match=r"image_zoom_in_tool needs an image: .*create_kwargs"):
        await ImageZoomTool().create()


def test_without_pillow_the_extra_is_named_before_there_is_an_image(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"torchrl-agentic\[images\]"):
        ImageZoomTool()
