"""The values that travel in one turn: Message → ParsedCall… → ToolResult… → Message…, and their Turn.

All are frozen dataclasses of plain Python. A TensorDict appears only at the border (`transforms/history.py`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, TypeAlias, cast

from torchrl_agentic.errors import InfrastructureError, StopSignal, ToolError
from torchrl_agentic.images import image_type
from torchrl_agentic.jsonable import JSON, finite, jsonable

Fields: TypeAlias = Mapping[str, JSON]
"""A JSON object."""

Content: TypeAlias = str | list[JSON] | None
"""The content of a chat message: text, a list of parts as API servers send them, or nothing."""


class Status(StrEnum):
    """How a call was answered. `is_error` is true for all but OK."""

    OK = "ok"
    ERROR = "error"
    """The tool says so: it raised `ToolError` or returned an error."""
    MALFORMED = "malformed"
    """The parser found an attempt to call, but could not read it."""
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGS = "invalid_args"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
    """Over a budget: the call was not tried."""
    CRASH = "crash"
    """A bug in the tool: it raised something that is no `ToolError`."""
    INFRA = "infra"
    """Not the model's fault: a sandbox was lost, a service is overloaded."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text in a result."""

    text: str
    kind: Literal["text"] = "text"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class JsonPart:
    """A JSON value in a result.

    Its text is compact JSON in UTF-8, with "NaN", "Infinity" and "-Infinity" for floats that JSON does not
    have.
    """

    data: JSON
    kind: Literal["json"] = "json"

    def __str__(self) -> str:
        try:
            try:
                return json.dumps(self.data, ensure_ascii=False, allow_nan=False)
            except ValueError:
                return json.dumps(finite(self.data), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):  # made by hand of what is no JSON: named all the same
            return f"[{type(self.data).__name__} that is no JSON]"


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a result: the bytes of an image file."""

    data: bytes
    media_type: str = "image/png"
    kind: Literal["image"] = "image"

    def __str__(self) -> str:
        return f"[image {self.media_type}, {len(self.data)} bytes]"


@dataclass(frozen=True, slots=True)
class VideoPart:
    """A video in a result: the bytes of a video file."""

    data: bytes
    media_type: str = "video/mp4"
    kind: Literal["video"] = "video"

    def __str__(self) -> str:
        return f"[video {self.media_type}, {len(self.data)} bytes]"


@dataclass(frozen=True, slots=True)
class FileRefPart:
    """A file that a tool made, by its path inside the sandbox."""

    path: str
    media_type: str | None = None
    kind: Literal["file_ref"] = "file_ref"

    def __str__(self) -> str:
        return f"[file {self.path}]"


ToolResultPart: TypeAlias = TextPart | JsonPart | ImagePart | VideoPart | FileRefPart
_PARTS = (TextPart, JsonPart, ImagePart, VideoPart, FileRefPart)


@dataclass(frozen=True, slots=True)
class Timing:
    """When a call started and where its time went.

    start: Unix time in seconds at which the turn took it up. queue_s: from there until the tool ran.
    run_s: inside the tool.
    """

    start: float
    queue_s: float
    run_s: float


@dataclass(frozen=True, slots=True)
class _ToolResultFields:
    """Stored fields of `ToolResult`, whose constructor computes them from its arguments.

    A frozen dataclass cannot assign to its fields after `__init__`, so the computation comes before it.
    """

    parts: tuple[ToolResultPart, ...]
    meta: Mapping[str, Any] | None
    status: Status
    stop: bool
    reward: float | None
    metrics: Mapping[str, JSON] | None
    timing: Timing | None
    notes: tuple[str, ...]


@dataclass(frozen=True, init=False)
class ToolResult(_ToolResultFields):
    """Answer to one tool call.

    Only `status` is stored; `is_error` is computed from it, so that the two cannot contradict each other.

    Args:
        parts: Content of the result, in order.
        is_error: Short for `status=Status.ERROR`. Ignored if `status` is given, except that True and
            `Status.OK` are refused.
        meta: Data for programs. The model does not see it, and records leave it out.
        status: How the call ended. None follows `is_error`.
        stop: Whether the trajectory ends after this turn.
        reward: Reward that the tool assigns to this call; None if it assigns none.
        metrics: Numbers and other JSON that the tool reports about this call.
        timing: When the call ran. The dispatcher fills it in; a tool that queues its calls itself reports the
            seconds it waited as `timing.queue_s`.
        notes: One entry per deviation from a plain call, such as an argument that was ignored. The dispatcher
            adds those of the call.

    Raises:
        ValueError: If `is_error` is True and `status` is `Status.OK`.
    """

    __slots__ = ()

    def __init__(
        self,
        parts: tuple[ToolResultPart, ...] = (),
        is_error: bool = False,
        meta: Mapping[str, Any] | None = None,
        *,
        status: Status | None = None,
        stop: bool = False,
        reward: float | None = None,
        metrics: Mapping[str, JSON] | None = None,
        timing: Timing | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        if status is None:
            status = Status.ERROR if is_error else Status.OK
        elif is_error and status is Status.OK:
            raise ValueError("is_error=True contradicts status=Status.OK; pass only one of the two")
        super().__init__(parts, meta, status, stop, reward, metrics, timing, notes)

    @property
    def is_error(self) -> bool:
        """True unless `status` is `Status.OK`."""
        return self.status is not Status.OK

    @property
    def text(self) -> str:
        """All parts as one text, one part a line; what a model without eyes reads."""
        parts = self.parts
        if len(parts) == 1:
            return str(parts[0])
        return "\n".join(map(str, parts))

    @classmethod
    def from_text(
        cls,
        text: str,
        *,
        is_error: bool = False,
        meta: Mapping[str, Any] | None = None,
        status: Status | None = None,
        stop: bool = False,
    ) -> ToolResult:
        """Make the common result: one part of text."""
        return cls((TextPart(text),), is_error, meta, status=status, stop=stop)

    @classmethod
    def from_value(
        cls, value: Any, *, reward: float | None = None, metrics: Mapping[str, JSON] | None = None
    ) -> ToolResult:
        """Convert what a tool returned to a result.

        - str: text.
        - A part, or a tuple of parts: these parts.
        - An object with text, image and video, such as `tools.verl.ToolResponse`: its parts.
        - ToolResult: itself.
        - Anything else: JSON, see `jsonable`. A tuple is a JSON list; only `from_verl` reads a reward from
          one.

        Args:
            value: What the tool returned.
            reward: The reward of the call. None keeps that of `value` if it is a ToolResult.
            metrics: The metrics of the call, likewise.

        Raises:
            TypeError: If there is no JSON for `value`, or a number of the result is not one.
        """
        if reward is not None or metrics is not None:
            return _with_reward(cls.from_value(value), reward, metrics)
        if isinstance(value, str):
            return cls((TextPart(value),))
        if isinstance(value, ToolResult):
            return value
        if isinstance(value, _PARTS):
            return cls((value,))
        if isinstance(value, tuple) and value:
            items = cast("tuple[Any, ...]", value)
            if all(isinstance(item, _PARTS) for item in items):
                return cls(cast("tuple[ToolResultPart, ...]", items))
            if any(isinstance(item, (ToolResult, *_PARTS)) or _is_response(item) for item in items):
                raise TypeError(
                    "a tool returned a tuple of a result and other things; a reward goes into "
                    "ToolResult.from_value(value, reward=…), or mark the function with @function_tool"
                )
        if _is_response(cast("object", value)):
            return cls(_response_parts(value))
        return cls((JsonPart(jsonable(value)),))

    @classmethod
    def from_verl(cls, value: Any) -> ToolResult:
        """Convert what a tool of verl returned to a result.

        Args:
            value: A response, or a tuple `(response[, reward[, metrics]])`. `from_value` converts the
                response.

        Raises:
            TypeError: If it is another tuple, or there is no JSON for the response.
        """
        if not isinstance(value, tuple):
            return cls.from_value(value)
        items = cast("tuple[Any, ...]", value)
        if items and all(isinstance(item, _PARTS) for item in items):
            return cls(items)
        if not 1 <= len(items) <= 3:
            raise TypeError(
                f"a tool returned a tuple of {len(items)} items; expected (response[, reward[, metrics]])"
            )
        response, reward, metrics = (*items, None, None)[:3]
        return _with_reward(cls.from_value(response), reward, metrics)

    @classmethod
    def from_error(cls, error: BaseException, tool: str) -> ToolResult | None:
        """Make a result of what a tool raised, where `Tool.run` may raise such a thing; None: it is a bug."""
        if isinstance(error, StopSignal):
            return cls.from_text(f"[stop] {error}", stop=True)
        if isinstance(error, ToolError):
            return cls.from_text(f"Error: {error.message}", meta=error.detail or None, status=Status.ERROR)
        if isinstance(error, InfrastructureError):
            return cls.from_text(
                f"Error: {tool} is not available at the moment: {error}", status=Status.INFRA
            )
        if isinstance(error, TimeoutError):
            reason = f": {error}" if str(error) else ""
            return cls.from_text(f"Error: {tool} timed out{reason}", status=Status.TIMEOUT)
        return None


_RESPONSE = {"text", "image", "video"}


def _is_response(value: object) -> bool:
    fields: Any = getattr(type(value), "model_fields", {})
    return fields.keys() == _RESPONSE


def _response_parts(response: Any) -> tuple[ToolResultPart, ...]:
    text = (TextPart(response.text),) if response.text else ()
    images = (image_part(image) for image in response.image or ())
    return (*text, *images, *(_video_part(video) for video in response.video or ()))


def image_part(image: Any) -> ImagePart:
    """Make a part of an image: one of Pillow's, or the bytes of an image file.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(image, ImagePart):
        return image
    if isinstance(image, bytes):
        return ImagePart(image, image_type(image) or "image/png")
    if not callable(getattr(image, "save", None)):
        raise TypeError(f"an image is one of Pillow's, or the bytes of a file; got {type(image).__name__}")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return ImagePart(buffer.getvalue())


def _video_part(video: Any) -> VideoPart:
    if isinstance(video, VideoPart):
        return video
    if isinstance(video, bytes):
        return VideoPart(video)
    raise TypeError(f"a video is the bytes of a video file; got {type(video).__name__}")


def _with_reward(result: ToolResult, reward: Any, metrics: Any) -> ToolResult:
    """Copy a result, with a reward and metrics where they are not None."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"the metrics of a tool's result are a mapping; got {type(metrics).__name__}")
    return replace(
        result,
        reward=result.reward if reward is None else _number(reward),
        metrics=cast("Mapping[str, JSON] | None", metrics) or result.metrics,
    )


def _number(reward: Any) -> float:
    if not isinstance(reward, bool | str | bytes):
        try:
            return float(reward)
        except (TypeError, ValueError):
            pass
    raise TypeError(f"the reward of a tool's result is a number; got {type(reward).__name__}")


@dataclass(frozen=True, slots=True)
class CallError:
    """Why an attempt to call could not be read: a code for programs, a message for the model."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One attempt to call a tool, readable or not.

    Where `error` is set, `args` is empty, and `tool` is empty if not even the name could be read. `index`
    counts the attempts of a message from 0. `span`: the attempt is `raw[span[0]:span[1]]`, in characters;
    None where a call was no text. `token_span`: the same in tokens, where it was read from tokens. `notes`:
    one word for each liberty that was taken in reading it.
    """

    tool: str
    args: Mapping[str, JSON]
    call_id: str
    tag: str | None = None
    error: CallError | None = None
    index: int = field(default=0, kw_only=True)
    span: tuple[int, int] | None = field(default=None, kw_only=True)
    token_span: tuple[int, int] | None = field(default=None, kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True, slots=True)
class ParseResult:
    """What a parser read in one message.

    `text` is the message without the spans of its calls, each byte kept. `reasoning` repeats what stood
    inside closed thinking tags. `raw` is what was parsed.
    """

    text: str
    calls: tuple[ParsedCall, ...] = ()
    raw: str | Mapping[str, JSON] = ""
    reasoning: str = field(default="", kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: Content
    tool_calls: Sequence[Mapping[str, JSON]] = ()
    tool_call_id: str | None = None
    is_complete: bool = True

    @property
    def text(self) -> str:
        """The content as text; parts that are not text appear by their type."""
        return content_text(self.content)


def content_text(content: Content) -> str:
    """All text of a message's content, whichever form it has."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(map(_part_text, content))


def fields_of(value: JSON) -> Fields | None:
    """Give a JSON object as such; None if it is none."""
    return cast("Fields", value) if isinstance(value, Mapping) else None


def _part_text(part: JSON) -> str:
    fields = fields_of(part)
    if fields is None:
        try:
            return str(part)
        except RecursionError:
            return f"[{type(part).__name__}]"
    text = fields.get("text")
    return text if isinstance(text, str) else f"[{fields.get('type', 'part')}]"


@dataclass(frozen=True, slots=True)
class DispatchResult:
    """The outcome of one assistant message: the text around its calls, and one result per call, in order."""

    cleaned_text: str = ""
    calls: tuple[ParsedCall, ...] = ()
    results: tuple[ToolResult, ...] = ()

    @property
    def any_error(self) -> bool:
        """Whether any call was not answered OK."""
        return any(result.is_error for result in self.results)

    @property
    def stop_requested(self) -> bool:
        """Whether any call asked for the end of the trajectory."""
        return any(result.stop for result in self.results)


@dataclass(frozen=True, slots=True)
class Turn:
    """The record of one pass: what the model wrote, what it called, what came of it.

    trajectory: its id. index: counts the turns of a trajectory from 0. row: its place in the batch. context:
    the messages that were added since the turn before (system prompt and question, in turn 0). messages: what
    was appended to the conversation.
    """

    trajectory: str
    index: int
    message: Message
    outcome: DispatchResult
    messages: tuple[Message, ...] = ()
    context: tuple[Message, ...] = ()
    notes: tuple[str, ...] = ()
    row: int = 0


def claim_id(wanted: str, taken: dict[str, int]) -> str:
    """Give an id that is not taken yet, and take it; of equal ids the later ones get a suffix.

    taken: each id and how many have wanted it, so that many equal ones cost no search each.
    """
    if wanted not in taken:
        taken[wanted] = 1
        return wanted
    copies = taken[wanted] + 1
    while (call_id := f"{wanted}_{copies}") in taken:
        copies += 1
    taken[wanted] = copies
    taken[call_id] = 1
    return call_id


def is_encodable(text: str) -> bool:
    """Whether a text can be written as UTF-8: model text may hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encodable(text: str) -> str:
    """Give a text with what cannot be written as UTF-8 replaced."""
    return text.encode("utf-8", "replace").decode()
