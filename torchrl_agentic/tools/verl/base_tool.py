"""What files of tools import from verl, so that they load with nothing but another import path.

`BaseTool`, `ToolResponse`, `OpenAIFunctionToolSchema` and `function_tool`; verl's own classes of these names
are taken just as well. `LifecycleTool` runs a `BaseTool`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import pydantic

from torchrl_agentic.messages import JSON, VideoPart, fields_of
from torchrl_agentic.tools.function import function_tool, schema_fields
from torchrl_agentic.tools.schema import Schema

__all__ = [
    "BaseTool",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolSchema",
    "ToolResponse",
    "function_tool",
    "process_image",
    "process_video",
]


class OpenAIFunctionPropertySchema(pydantic.BaseModel):
    """The JSON Schema of one parameter. All its other keywords are kept, as attributes too."""

    model_config = pydantic.ConfigDict(extra="allow")

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


def _as_schema(value: Any) -> Any:
    if isinstance(value, bool):
        value = cast("Any", {} if value else {"not": {}})
    return value


_Property = Annotated[OpenAIFunctionPropertySchema, pydantic.BeforeValidator(_as_schema)]


class OpenAIFunctionParametersSchema(pydantic.BaseModel):
    """The JSON Schema of a function's parameters. All its other keywords are kept, as attributes too."""

    model_config = pydantic.ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, _Property] = {}
    required: list[str] = []


class OpenAIFunctionSchema(pydantic.BaseModel):
    """A function as a model reads of it.

    Attributes:
        name: What the model calls.
        description: What the function does.
        parameters: The JSON Schema of its arguments.
        strict: Whether an API server is asked to keep arguments to the schema.
    """

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = pydantic.Field(
        default_factory=OpenAIFunctionParametersSchema
    )
    strict: bool = False


class OpenAIFunctionToolSchema(pydantic.BaseModel):
    """A function among the tools of a model."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema


class ToolResponse(pydantic.BaseModel):
    """What a tool answers: text, images, videos.

    image: `ImagePart`s, bytes of image files, or Pillow's images. video: `VideoPart`s, or bytes of files.
    """

    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether there is nothing but text in it."""
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """A tool that has a life of its own in each trajectory: create, execute…, calc_reward, release.

    One object serves all trajectories, and keeps what it knows of each under its `instance_id`.

    config: the settings of the tool, from a configuration file. tool_schema: what the model is told; without,
    `get_openai_tool_schema` says it.
    """

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self.config = dict(config)
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Say what the model is told.

        Raises:
            NotImplementedError: neither this nor a `tool_schema` does.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a tool_schema, or a method get_openai_tool_schema that gives one"
        )

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin with a trajectory; what is answered stands in its first prompt.

        kwargs: `create_kwargs` of the data set's row for this tool, one by one, and as `create_kwargs` too.
        """
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, JSON], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, JSON]]:
        """Answer a call, with the reward of this step and its metrics.

        kwargs: the row's `execute_kwargs` for this tool; `agent_data` says where the trajectory stands.
        """
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Say what the whole trajectory was worth. kwargs: the row's `calc_reward_kwargs` for this tool."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Let go of a trajectory. kwargs: the row's `release_kwargs` for this tool."""


@dataclass(frozen=True, slots=True)
class Described:
    """What the schema of a tool in this shape says of it."""

    name: str
    description: str
    parameters: Schema
    is_strict: bool | None


def schema_of_target(target: Any) -> Described:
    """Read the schema of a tool in this shape.

    Raises:
        TypeError: If it has none.
    """
    told: Any = getattr(target, "tool_schema", None)
    if told is None:
        make = getattr(target, "get_openai_tool_schema", None)
        told = make() if callable(make) else None
    whole = schema_fields(told) or {}
    function = fields_of(whole.get("function", whole)) or {}
    name = function.get("name")
    if not isinstance(name, str):
        raise TypeError(
            f"{type(target).__name__} has no schema: expected tool_schema, or get_openai_tool_schema(), "
            'with {"type": "function", "function": {"name", "description", "parameters"}}'
        )
    parameters = {"type": "object", **(fields_of(function.get("parameters")) or {})}
    return Described(name, str(function.get("description", "")), parameters, function.get("strict"))


def number_of(value: Any) -> float | None:
    """Return a number of any library as a float, or None for what is a text or a collection."""
    is_number = hasattr(value, "__float__") or hasattr(value, "__index__")
    return float(value) if is_number and not isinstance(value, str) else None


def process_image(image: Any) -> Any:
    """Open an image for `ToolResponse(image=[…])`, as verl's `vision_utils.process_image` does.

    Args:
        image: One of Pillow's, the bytes of a file, base64, a data URL, a path, or a mapping with one of them
            as "image", "bytes" or "path". Nothing is loaded from the network.

    Returns:
        An RGB image of Pillow's.

    Raises:
        ValueError: If it is none of these, or cannot be opened.
    """
    from torchrl_agentic.tools.verl.image_zoom import open_image

    return open_image(image)


def process_video(video: Any) -> VideoPart:
    """Read a video for `ToolResponse(video=[…])`, in place of verl's `vision_utils.process_video`.

    Args:
        video: The bytes of a file, a path, a `VideoPart`, or a mapping with one of them as "video".

    Returns:
        The file; the processor of a model takes its frames.

    Raises:
        ValueError: If it is none of these.
        OSError: If the file cannot be read.
    """
    if isinstance(video, Mapping):
        video = cast("Mapping[str, Any]", video).get("video")
    if isinstance(video, str | Path):
        video = Path(str(video).removeprefix("file://")).read_bytes()
    if isinstance(video, bytes):
        video = VideoPart(video)
    if not isinstance(video, VideoPart):
        raise ValueError(f"expected the bytes of a video file, or a path; got {type(video).__name__}")
    return video


def _process_single_case(*args: Any, **kwargs: Any) -> tuple[bool | int, dict[str, Any]]:  # pyright: ignore[reportUnusedFunction]
    """Run a test case in a Sandbox Fusion service, as verl's function of this name does."""
    from torchrl_agentic.tools.sandbox_fusion.single_case import process_single_case

    return process_single_case(*args, **kwargs)
