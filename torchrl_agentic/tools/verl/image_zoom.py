"""ImageZoomTool: looks closer at a part of the image that the data set's row has."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchrl_agentic.messages import JSON, ImagePart
from torchrl_agentic.tools.images import decoded, require_pillow
from torchrl_agentic.tools.verl.base_tool import BaseTool, OpenAIFunctionToolSchema, ToolResponse

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_SIDE = 28
"""The shorter side of what is shown, in pixels; models see patches of this size."""
MAX_ASPECT = 100.0
"""How often the shorter side may go into the longer one."""
PENALTY = -0.05
"""The reward of a call that shows nothing."""

Box = tuple[float, float, float, float]


class ImageZoomTool(BaseTool):
    """`image_zoom_in_tool`: crops a trajectory's image to a box; for `LifecycleTool`.

    `create_kwargs` holds its `image`: one of Pillow's, the bytes of an image file, base64 of them (a data URL
    too), or the path of a file. Nothing is loaded from the network.

    config: min_side and max_aspect, in place of `MIN_SIDE` and `MAX_ASPECT`.

    Raises:
        MissingExtra: Pillow is not installed.
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
        """Begin with an image.

        Raises:
            ValueError: there is none, or it cannot be opened.
        """
        if image is None:
            raise ValueError(
                f"{self.name} needs an image: give the data set's rows "
                f'tools_kwargs: {{"{self.name}": {{"create_kwargs": {{"image": …}}}}}}'
            )
        made, said = await super().create(instance_id)
        self._images[made] = open_image(image)
        return made, said

    async def execute(
        self, instance_id: str, parameters: dict[str, JSON], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, JSON]]:
        """Show what is in the box, or say what is wrong with it."""
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
        """Forget the image."""
        self._images.pop(instance_id, None)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Say what the model is told."""
        corners = "[x1, y1, x2, y2] in pixels, the top left corner and the bottom right one."
        four = {"items": {"type": "number"}, "minItems": 4, "maxItems": 4}
        box = {"type": "array", **four, "description": corners}
        label = {"type": "string", "description": "What is to be seen there."}
        return OpenAIFunctionToolSchema.model_validate(
            {
                "function": {
                    "name": "image_zoom_in_tool",
                    "description": "Look closer at a part of the image.",
                    "parameters": {
                        "type": "object",
                        "properties": {"bbox_2d": box, "label": label},
                        "required": ["bbox_2d"],
                    },
                }
            }
        )


def open_image(image: Any) -> Image:
    """Open an image: one of Pillow's, the bytes of a file, base64, a data URL, a path.

    Raises:
        ValueError: it is none of these, cannot be opened, or is too large.
    """
    from PIL import Image as pillow

    if isinstance(image, pillow.Image):  # already the way up that its owner wants
        return image.convert("RGB")
    if isinstance(image, Mapping):  # as files of columns hold images: {"bytes", "path"}
        fields = cast("Mapping[str, Any]", image)
        image = fields.get("bytes") or fields.get("path") or fields.get("image")
    if isinstance(image, str):
        image = _bytes_of(image)
    if not isinstance(image, bytes):
        raise ValueError(f"an image is one of Pillow's, bytes, base64 or a path; got {type(image).__name__}")
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
        raise ValueError(f"the image is no file and no base64: {text[:80]!r}") from None


def _box(value: JSON) -> Box:
    numbers = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()
    if len(numbers) != 4 or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        raise ValueError(f"bbox_2d is [x1, y1, x2, y2], four numbers; got {value!r}")
    left, top, right, bottom = map(float, numbers)
    if not (left < right and top < bottom):
        raise ValueError(f"bbox_2d is empty: x1 < x2 and y1 < y2 are needed; got {value!r}")
    return left, top, right, bottom


def fit(box: Box, size: tuple[int, int], min_side: float, max_aspect: float) -> Box:
    """Cut a box off at the edges of an image, and widen it around its middle to `min_side`.

    Raises:
        ValueError: nothing of it is inside, it is too narrow, or the image is too small.
    """
    width, height = size
    left, top = max(0.0, box[0]), max(0.0, box[1])
    right, bottom = min(float(width), box[2]), min(float(height), box[3])
    if not (left < right and top < bottom):
        raise ValueError(f"the box {list(box)} lies outside of the image, which is {width} × {height}")
    times = max(right - left, bottom - top) / min(right - left, bottom - top)
    if times > max_aspect:
        raise ValueError(f"the box is {times:.0f} times as long as wide; {max_aspect:g} is allowed")
    if min(width, height) < min_side:
        raise ValueError(f"the image is {width} × {height}; zooming in takes {min_side:g} pixels at least")
    left, right = _widened(left, right, width, min_side)
    top, bottom = _widened(top, bottom, height, min_side)
    return left, top, right, bottom


def _widened(low: float, high: float, limit: float, least: float) -> tuple[float, float]:
    side = max(least, high - low)
    low = min(max(0.0, (low + high - side) / 2), limit - side)
    return low, low + side
