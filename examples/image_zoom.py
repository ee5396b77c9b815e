"""`ImageZoomTool`, which shows an enlarged part of the image in the data set's row, like verl's tool.

A tool file names it by the path of this file, and needs no schema:

    tools:
      - class_name: examples/image_zoom.py:ImageZoomTool
        config: {type: native}
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torchrl_agentic.messages import JSON, ImagePart
from torchrl_agentic.tools.images import require_pillow
from torchrl_agentic.tools.verl import BaseTool, OpenAIFunctionToolSchema, ToolResponse, process_image

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_SIDE = 28
"""Shortest side of a crop, in pixels; models see patches of this size."""
MAX_ASPECT = 100.0
"""Highest ratio of the longer to the shorter side of a box."""
PENALTY = -0.05
"""Reward of a call that shows no image."""

Box = tuple[float, float, float, float]


class ImageZoomTool(BaseTool):
    """`image_zoom_in_tool`: crops a trajectory's image to a box; for `LifecycleTool`.

    `create_kwargs` has the `image`: a Pillow image, the bytes of an image file, base64 of them or a data URL,
    or the path of a file. Nothing is loaded from the network.

    Args:
        config: May have min_side, in pixels, and max_aspect, instead of `MIN_SIDE` and `MAX_ASPECT`.
        tool_schema: The schema that the model reads; None: the default one.

    Raises:
        MissingExtra: If Pillow is not installed.
    """

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema)
        require_pillow()
        self._min_side: float = self.config.get("min_side", MIN_SIDE)
        self._max_aspect: float = self.config.get("max_aspect", MAX_ASPECT)
        self._images: dict[str, Image] = {}

    async def create(
        self, instance_id: str | None = None, image: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Start an instance with its image.

        Args:
            instance_id: Id of the instance; None: a new one.
            image: The image; see `process_image`.
            kwargs: Other arguments of the row, which are ignored.

        Raises:
            ValueError: If there is no image, or it cannot be opened.
        """
        if image is None:
            raise ValueError(
                f"{self.name} needs an image: add to the data set's rows "
                f'tools_kwargs: {{"{self.name}": {{"create_kwargs": {{"image": …}}}}}}'
            )
        made, said = await super().create(instance_id)
        self._images[made] = process_image(image)
        return made, said

    async def execute(
        self, instance_id: str, parameters: dict[str, JSON], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, JSON]]:
        """Return the part of the image in the box, or an error message if the box is invalid."""
        image = self._images[instance_id]
        try:
            box = fit(_box(parameters.get("bbox_2d")), image.size, self._min_side, self._max_aspect)
        except ValueError as error:
            return ToolResponse(text=f"Error: {error}"), PENALTY, {"success": False}
        buffer = io.BytesIO()
        left, top, right, bottom = map(round, box)
        image.crop((left, top, right, bottom)).save(buffer, "PNG")
        label = parameters.get("label")
        text = f"Zoomed in on {[left, top, right, bottom]}" + (f" ({label})" if label else "") + "."
        return ToolResponse(text=text, image=[ImagePart(buffer.getvalue())]), 0.0, {"success": True}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Remove the image."""
        self._images.pop(instance_id, None)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema that the model reads."""
        corners = "The box [x1, y1, x2, y2] in pixels: its top left and its bottom right corner."
        four = {"items": {"type": "number"}, "minItems": 4, "maxItems": 4}
        box = {"type": "array", **four, "description": corners}
        label = {"type": "string", "description": "Name of the object in the box."}
        return OpenAIFunctionToolSchema.model_validate(
            {
                "function": {
                    "name": "image_zoom_in_tool",
                    "description": "Zoom in on a part of the image.",
                    "parameters": {
                        "type": "object",
                        "properties": {"bbox_2d": box, "label": label},
                        "required": ["bbox_2d"],
                    },
                }
            }
        )


def _box(value: JSON) -> Box:
    numbers = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()
    if len(numbers) != 4 or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        raise ValueError(f"expected bbox_2d as four numbers [x1, y1, x2, y2]; got {value!r}")
    left, top, right, bottom = map(float, numbers)
    if not (left < right and top < bottom):
        raise ValueError(f"bbox_2d is empty: it must have x1 < x2 and y1 < y2; got {value!r}")
    return left, top, right, bottom


def fit(box: Box, size: tuple[int, int], min_side: float, max_aspect: float) -> Box:
    """Clip a box to an image, and widen it around its center to `min_side`.

    Args:
        box: Left, top, right and bottom edge, in pixels.
        size: Width and height of the image, in pixels.
        min_side: Shortest side of the result, in pixels.
        max_aspect: Highest ratio of the longer to the shorter side of the clipped box.

    Returns:
        The new box.

    Raises:
        ValueError: If the box is outside of the image or too narrow, or the image is too small.
    """
    width, height = size
    left, top = max(0.0, box[0]), max(0.0, box[1])
    right, bottom = min(float(width), box[2]), min(float(height), box[3])
    if not (left < right and top < bottom):
        raise ValueError(f"the box {list(box)} is outside of the image of {width} × {height} pixels")
    aspect = max(right - left, bottom - top) / min(right - left, bottom - top)
    if aspect > max_aspect:
        raise ValueError(
            f"the longer side of the box is {aspect:.0f} times its shorter side; at most {max_aspect:g} times"
            " is allowed"
        )
    if min(width, height) < min_side:
        raise ValueError(
            f"the image has {width} × {height} pixels; zooming in needs at least {min_side:g} on each side"
        )
    left, right = _widened(left, right, width, min_side)
    top, bottom = _widened(top, bottom, height, min_side)
    return left, top, right, bottom


def _widened(low: float, high: float, limit: float, least: float) -> tuple[float, float]:
    side = max(least, high - low)
    low = min(max(0.0, (low + high - side) / 2), limit - side)
    return low, low + side
