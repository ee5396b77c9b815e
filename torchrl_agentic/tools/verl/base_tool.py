"""Classes that tool files import from verl: `BaseTool`, `ToolResponse` and `OpenAIFunctionToolSchema`.

Instances of verl's own classes are accepted too. `LifecycleTool` runs a `BaseTool`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import pydantic

from torchrl_agentic.messages import JSON, VideoPart, fields_of
from torchrl_agentic.tools.function import schema_fields
from torchrl_agentic.tools.images import open_image
from torchrl_agentic.tools.schema import Schema

Function = TypeVar("Function", bound=Callable[..., Any])


class OpenAIFunctionPropertySchema(pydantic.BaseModel):
    """The JSON Schema of one parameter. Other keywords are kept as attributes."""

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
    """The JSON Schema of a function's parameters. Other keywords are kept as attributes."""

    model_config = pydantic.ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, _Property] = {}
    required: list[str] = []


class OpenAIFunctionSchema(pydantic.BaseModel):
    """Description of a function for a model.

    Attributes:
        name: The name that the model calls.
        description: The description that the model reads.
        parameters: JSON Schema of the arguments.
        strict: Whether an API server is asked to enforce the schema.
    """

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = pydantic.Field(
        default_factory=OpenAIFunctionParametersSchema
    )
    strict: bool = False


class OpenAIFunctionToolSchema(pydantic.BaseModel):
    """Description of a tool for a model, in the form of OpenAI's API."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema


class ToolResponse(pydantic.BaseModel):
    """Response of a tool: text, images, videos.

    Attributes:
        text: The text, or None.
        image: `ImagePart`s, bytes of image files, or Pillow images; or None.
        video: `VideoPart`s, or bytes of video files; or None.
    """

    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Return whether there is no text, image or video."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Return whether there is a text, but no image or video."""
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """A tool with an instance per trajectory: `create`, any number of `execute`, `calc_reward`, `release`.

    One object serves all trajectories, and stores the state of each under its `instance_id`.

    Args:
        config: Settings of the tool, from a configuration file.
        tool_schema: The schema that the model reads; None: that of `get_openai_tool_schema`.
    """

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self.config = dict(config)
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema that the model reads: that of the constructor, unless the class overrides this.

        Raises:
            NotImplementedError: If the constructor got no schema and the class does not override the method.
        """
        given = getattr(self, "tool_schema", None)
        if given is None:
            raise NotImplementedError(
                f"{type(self).__name__} needs a tool_schema, or must override get_openai_tool_schema"
            )
        return given

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Start an instance for a trajectory.

        Args:
            instance_id: Id of the instance; None: a new one.
            kwargs: The row's `create_kwargs` for this tool, one by one, and also as `create_kwargs`.

        Returns:
            The id of the instance, and a response that is added to the first prompt.
        """
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, JSON], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, JSON]]:
        """Run a call.

        Args:
            instance_id: Id of the instance.
            parameters: Arguments of the call.
            kwargs: The row's `execute_kwargs` for this tool, and `agent_data`, an `AgentData`.

        Returns:
            The response, the reward of this call or None, and its metrics.
        """
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of the whole trajectory.

        Args:
            instance_id: Id of the instance.
            kwargs: The row's `calc_reward_kwargs` for this tool.
        """
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Close the instance of a trajectory.

        Args:
            instance_id: Id of the instance.
            kwargs: The row's `release_kwargs` for this tool.
        """


@dataclass(frozen=True, slots=True)
class Description:
    """Name, description, parameters and strictness in the schema of a verl tool."""

    name: str
    description: str
    parameters: Schema
    is_strict: bool | None


def description_of(target: Any) -> Description:
    """Read the schema of a verl tool.

    Args:
        target: An object with a `tool_schema` or a method `get_openai_tool_schema`.

    Raises:
        TypeError: If it has neither.
    """
    schema: Any = getattr(target, "tool_schema", None)
    if schema is None:
        make = getattr(target, "get_openai_tool_schema", None)
        schema = make() if callable(make) else None
    whole = schema_fields(schema) or {}
    function = fields_of(whole.get("function", whole)) or {}
    name = function.get("name")
    if not isinstance(name, str):
        raise TypeError(
            f"{type(target).__name__} has no schema: expected tool_schema, or get_openai_tool_schema(), "
            'with {"type": "function", "function": {"name", "description", "parameters"}}'
        )
    parameters = {"type": "object", **(fields_of(function.get("parameters")) or {})}
    return Description(name, str(function.get("description", "")), parameters, function.get("strict"))


def process_image(image: Any, image_patch_size: int = 14) -> Any:
    """Open an image for `ToolResponse(image=[…])`, as verl's `vision_utils.process_image` does.

    Args:
        image: A Pillow image, the bytes of a file, base64, a data URL, a path, or a mapping with one of them
            as "image", "bytes" or "path". Nothing is loaded from the network.
        image_patch_size: Accepted as verl's callers pass it; the processor of a model resizes by its own.

    Returns:
        A Pillow image, in RGB.

    Raises:
        ValueError: If it has another type, or cannot be opened.
    """
    del image_patch_size
    return open_image(image)


def process_video(
    video: Any,
    image_patch_size: int = 14,
    nframes: int | None = None,
    fps: float | None = None,
    **others: Any,
) -> VideoPart:
    """Read a video for `ToolResponse(video=[…])`, in place of verl's `vision_utils.process_video`.

    Args:
        video: The bytes of a file, a path, a `VideoPart`, or a mapping with one of them as "video".
        image_patch_size: As in `process_image`.
        nframes: Only None; the processor chooses the frames.
        fps: Likewise.
        others: Likewise.

    Returns:
        The file; the processor of a model extracts its frames.

    Raises:
        TypeError: If an option chooses frames; the message names it.
        ValueError: If it has another type.
        OSError: If the file cannot be read.
    """
    del image_patch_size
    for name, value in {"nframes": nframes, "fps": fps, **others}.items():
        if value:
            raise TypeError(
                f"process_video() returns the file, not frames, and takes no {name}: set it where the "
                "processor of the model is made"
            )
    if isinstance(video, Mapping):
        video = cast("Mapping[str, Any]", video).get("video")
    if isinstance(video, str | Path):
        video = Path(str(video).removeprefix("file://")).read_bytes()
    if isinstance(video, bytes):
        video = VideoPart(video)
    if not isinstance(video, VideoPart):
        raise ValueError(f"expected the bytes of a video file, or a path; got {type(video).__name__}")
    return video


def rollout_trace_op(function: Function) -> Function:
    """Return a method of a tool as it is, in place of verl's `rollout_trace.rollout_trace_op`.

    Records and OpenTelemetry spans contain each call anyway; see `Recorder`.

    Args:
        function: The method, such as `execute`.
    """
    return function


def _process_single_case(*args: Any, **kwargs: Any) -> tuple[bool | int, dict[str, Any]]:  # pyright: ignore[reportUnusedFunction]
    """Run a test case in a Sandbox Fusion service, as verl's function of this name does."""
    from torchrl_agentic.tools.sandbox_fusion.single_case import process_single_case

    return process_single_case(*args, **kwargs)
