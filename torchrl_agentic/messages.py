"""Values of one turn: Message → ParsedCall… → ToolResult… → Message…, and the Turn that records them.

All but `StoredMessage`, a message of a live conversation, are frozen dataclasses of plain Python; change one
with `dataclasses.replace`. Tensors appear only in `transforms`.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, cast

import pydantic_core
from pydantic_core import core_schema

from torchrl_agentic.errors import (
    InfrastructureError,
    SchemaValidationError,
    StopSignal,
    ToolError,
    UnreadableResult,
    check_reward,
)
from torchrl_agentic.json_fields import AsBase64, AsText, AsTuple
from torchrl_agentic.text import MAX_DEPTH, MAX_INT_BITS

JSON: TypeAlias = Any
"""A value that `json.loads` can return. Its exact type is recursive, which would clutter every signature."""

Fields: TypeAlias = Mapping[str, JSON]
"""A JSON object."""

Content: TypeAlias = str | list[JSON] | None
"""Content of a chat message: text, a list of parts as API servers send them, or None."""


class _Part:
    """Base class of the parts of results, whose JSON always has their kind."""

    __slots__ = ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        schema = handler(source)
        schema["serialization"] = core_schema.wrap_serializer_function_ser_schema(
            lambda part, fields: {"kind": part.kind, **fields(part)}
        )
        return schema


MAX_ELEMENTS = 10_000
"""Arrays and tables with more elements are abridged."""
FIRST = 10
"""Number of elements, rows and columns that an abridged value keeps."""
MAX_YIELDED = 100_000
"""Most values that an iterator may yield whose items become a result."""


JSON_TYPES = frozenset((str, int, float, bool, NoneType, list, dict, tuple))
"""Types of values that are neither awaitable nor iterators, which a lookup tells faster than `isinstance`."""


class Status(StrEnum):
    """How a tool call ended.

    Attributes:
        OK: The tool returned a result.
        ERROR: The tool reported an error: it raised `ToolError` or returned an error.
        MALFORMED: The parser found a call that it could not read.
        UNKNOWN_TOOL: No tool with this name is available.
        INVALID_ARGS: The arguments do not match the schema of the tool.
        TIMEOUT: The call did not finish in time.
        CANCELLED: The call was cancelled.
        SKIPPED: The call was not run, because a budget or limit was used up.
        CRASH: The tool has a bug: it raised something else than `ToolError`.
        INFRA: Infrastructure failed, which is not the model's fault: a lost sandbox, an overloaded service.
    """

    OK = "ok"
    ERROR = "error"
    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGS = "invalid_args"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
    CRASH = "crash"
    INFRA = "infra"


@dataclass(frozen=True, slots=True)
class TextPart(_Part):
    """A piece of text in a result.

    Attributes:
        text: The text.
        kind: Always "text".
    """

    text: str
    kind: Literal["text"] = "text"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class JsonPart(_Part):
    """A JSON value in a result.

    `str(part)` is compact JSON. Floats that JSON lacks are written as "NaN", "Infinity" and "-Infinity".

    Attributes:
        data: The value.
        kind: Always "json".
    """

    data: JSON
    kind: Literal["json"] = "json"

    def __str__(self) -> str:
        try:
            try:
                return json.dumps(self.data, ensure_ascii=False, allow_nan=False)
            except ValueError:
                return json.dumps(finite(self.data), ensure_ascii=False)
        except (
            TypeError,
            ValueError,
            RecursionError,
        ):  # someone built the part from a value that is not JSON
            return f"[{type(self.data).__name__} that is not JSON]"


@dataclass(frozen=True, slots=True)
class ImagePart(_Part):
    """An image in a result.

    Attributes:
        data: The bytes of an image file.
        media_type: Its media type.
        kind: Always "image".
    """

    data: Annotated[bytes, AsBase64]
    media_type: str = "image/png"
    kind: Literal["image"] = "image"

    def __str__(self) -> str:
        return f"[image {self.media_type}, {len(self.data)} bytes]"


@dataclass(frozen=True, slots=True)
class VideoPart(_Part):
    """A video in a result.

    Attributes:
        data: The bytes of a video file.
        media_type: Its media type.
        kind: Always "video".
    """

    data: Annotated[bytes, AsBase64]
    media_type: str = "video/mp4"
    kind: Literal["video"] = "video"

    def __str__(self) -> str:
        return f"[video {self.media_type}, {len(self.data)} bytes]"


@dataclass(frozen=True, slots=True)
class FileRefPart(_Part):
    """A file that a tool created in the sandbox.

    Attributes:
        path: Path inside the sandbox.
        media_type: Its media type; None if unknown.
        kind: Always "file_ref".
    """

    path: str
    media_type: str | None = None
    kind: Literal["file_ref"] = "file_ref"

    def __str__(self) -> str:
        return f"[file {self.path}]"


ToolResultPart: TypeAlias = TextPart | JsonPart | ImagePart | VideoPart | FileRefPart
_KINDS = {"text": TextPart, "json": JsonPart, "image": ImagePart, "video": VideoPart, "file_ref": FileRefPart}
_PARTS = tuple(_KINDS.values())


class _ByKind:
    """Annotation of a part whose class follows from its kind in JSON."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> core_schema.CoreSchema:
        choices = {kind: handler.generate_schema(part) for kind, part in _KINDS.items()}
        return core_schema.tagged_union_schema(choices, discriminator="kind")


@dataclass(frozen=True, slots=True)
class Timing:
    """When a tool call started, and how long it waited and ran.

    Attributes:
        start: Unix time at which the turn started, in seconds.
        queue_s: Seconds from there until the tool ran.
        run_s: Seconds inside the tool.
    """

    start: float
    queue_s: float
    run_s: float


@dataclass(frozen=True, slots=True)
class _ToolResultFields:
    """Stored fields of `ToolResult`, whose constructor computes them from its arguments.

    A frozen dataclass cannot assign to its fields after `__init__`, so the computation comes before it.
    """

    parts: tuple[Annotated[ToolResultPart, _ByKind], ...]
    status: Annotated[Status, AsText]
    meta: Mapping[str, Any] | None = None
    stop: bool = False
    reward: float | None = None
    metrics: Mapping[str, JSON] | None = None
    timing: Timing | None = None
    notes: tuple[str, ...] = ()


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
        super().__init__(parts, status, meta, stop, reward, metrics, timing, notes)

    @property
    def is_error(self) -> bool:
        """True unless `status` is `Status.OK`."""
        return self.status is not Status.OK

    @property
    def text(self) -> str:
        """All parts as text, joined by newlines. Images, videos and files are named in brackets."""
        parts = self.parts
        if len(parts) == 1:
            return str(parts[0])
        return "\n".join(map(str, parts))

    def checked(self) -> ToolResult:
        """Return the result with text that can be written as UTF-8 and a reward that is a float.

        Raises:
            TypeError: If a part has no text, or the reward is not a number.
            ValueError: If the reward is not a number.
        """
        result = self
        if not is_encodable(self.text):
            result = replace(self, parts=tuple(TextPart(encodable(str(part))) for part in self.parts))
        if result.reward is None or type(result.reward) is float:
            return result
        return replace(result, reward=float(result.reward))

    def timed(self, timing: Timing, notes: tuple[str, ...]) -> ToolResult:
        """Return a copy with other timing and notes; every call needs one, and `replace` takes twice as long.

        Args:
            timing: When the call ran.
            notes: All notes of the copy.
        """
        return ToolResult(
            self.parts,
            meta=self.meta,
            status=self.status,
            stop=self.stop,
            reward=self.reward,
            metrics=self.metrics,
            timing=timing,
            notes=notes,
        )

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
        """Return a result with one part of text.

        Args:
            text: The text.
            is_error: As in `ToolResult`.
            meta: As in `ToolResult`.
            status: As in `ToolResult`.
            stop: As in `ToolResult`.
        """
        return cls((TextPart(text),), is_error, meta, status=status, stop=stop)

    @classmethod
    def from_value(
        cls, value: Any, *, reward: float | None = None, metrics: Mapping[str, JSON] | None = None
    ) -> ToolResult:
        """Convert the return value of a tool to a result.

        - A string becomes a text part.
        - A part, or a tuple of parts, becomes the parts of the result.
        - An object with text, image and video, such as `tools.verl.ToolResponse`, becomes its parts.
        - A ToolResult is returned as it is.
        - Any other value becomes JSON, see `jsonable`. A tuple becomes a JSON list; only `from_verl` reads a
          reward from one.
        - An iterator becomes the list of what it yields.
        - A value that has no JSON becomes its `str`, with a note: the tool has run, and what it did remains.

        Args:
            value: The return value of the tool.
            reward: Reward of the call. None keeps the reward of `value` if it is a ToolResult.
            metrics: Metrics of the call. None keeps the metrics of `value` if it is a ToolResult.

        Returns:
            The result.

        Raises:
            UnreadableResult: If `value` is a tuple of a result and other things, has an invalid image, or has
                not run, such as a coroutine; if `reward` is not a number, or `metrics` is not a mapping.
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
                raise UnreadableResult(
                    "a tool returned a tuple of a result and other things; a reward goes into "
                    "ToolResult.from_value(value, reward=…), or mark the function with @function_tool"
                )
        if _is_response(cast("object", value)):
            return cls(_response_parts(value))
        is_plain = type(cast("object", value)) in JSON_TYPES
        if not is_plain and isinstance(value, Awaitable | AsyncIterable | Iterator):
            if not isinstance(value, Iterator):
                kind = type(cast("object", value)).__name__
                raise UnreadableResult(f"a tool returned a {kind}, which has not run: await it")
            value = listed(cast("Iterator[Any]", value))
        try:
            return cls((JsonPart(jsonable(value)),))
        except TypeError:
            return cls(
                (TextPart(_as_text(value)),), notes=(f"not JSON: {type(cast(object, value)).__name__}",)
            )

    @classmethod
    def from_verl(cls, value: Any) -> ToolResult:
        """Convert the return value of a verl tool to a result.

        Args:
            value: A response, or a tuple `(response[, reward[, metrics]])`. `from_value` converts the
                response.

        Returns:
            The result.

        Raises:
            UnreadableResult: If `value` is another tuple, or its parts have other types.
        """
        if not isinstance(value, tuple):
            return cls.from_value(value)
        items = cast("tuple[Any, ...]", value)
        if items and all(isinstance(item, _PARTS) for item in items):
            return cls(items)
        if not 1 <= len(items) <= 3:
            raise UnreadableResult(
                f"a tool returned a tuple of {len(items)} items; expected (response[, reward[, metrics]])"
            )
        response, reward, metrics = (*items, None, None)[:3]
        return _with_reward(cls.from_value(response), reward, metrics)

    @classmethod
    def from_error(cls, error: BaseException, tool: str) -> ToolResult | None:
        """Convert an exception that `Tool.run` may raise to a result.

        Args:
            error: The exception.
            tool: Name of the tool, for the message to the model.

        Returns:
            The result, or None if the exception is a bug of the tool.
        """
        if isinstance(error, StopSignal):
            return cls.from_text(f"[stop] {error}", stop=True)
        if isinstance(error, SchemaValidationError):
            return cls.from_text(f"Error: {tool}: {error}", status=Status.INVALID_ARGS)
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
    """Return an image as a part of a result.

    Args:
        image: An image of Pillow, the bytes of an image file, or a part.

    Raises:
        UnreadableResult: If `image` has another type.
    """
    if isinstance(image, ImagePart):
        return image
    if isinstance(image, bytes):
        return ImagePart(image, image_type(image) or "image/png")
    if not callable(getattr(image, "save", None)):
        raise UnreadableResult(
            f"an image is one of Pillow's, or the bytes of a file; got {type(image).__name__}"
        )
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return ImagePart(buffer.getvalue())


def _video_part(video: Any) -> VideoPart:
    if isinstance(video, VideoPart):
        return video
    if isinstance(video, bytes):
        return VideoPart(video)
    raise UnreadableResult(f"a video is the bytes of a video file; got {type(video).__name__}")


def _with_reward(result: ToolResult, reward: Any, metrics: Any) -> ToolResult:
    """Return the result with a reward and metrics; None keeps those it has."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UnreadableResult(f"the metrics of a tool's result are a mapping; got {type(metrics).__name__}")
    try:
        number = result.reward if reward is None else as_number(reward, "the reward of a tool's result")
    except TypeError as error:
        raise UnreadableResult(str(error)) from None
    return replace(
        result,
        reward=number,
        metrics=cast("Mapping[str, JSON] | None", metrics) or result.metrics,
    )


def as_number(value: Any, what: str = "a reward") -> float:
    """Return a reward or a score as a float.

    Args:
        value: A number; a bool, which is 1.0 or 0.0; or an array or tensor with one element.
        what: Description of the value, for messages.

    Raises:
        TypeError: If it is something else.
    """
    if type(value) is float:
        return value
    if value is not None and not isinstance(value, str | bytes):
        try:
            return float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError):  # an array of several numbers
            pass
    kind = type(value).__name__
    raise TypeError(f"{what} is a number, a bool, or an array or tensor with one; got {value!r:.80} ({kind})")


def finite_number(value: Any, what: str = "a reward") -> float:
    """Return a reward or a score as a float that is finite in float32, too.

    Args:
        value: As in `as_number`.
        what: Description of the value, for messages.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is NaN, infinite, or larger than float32 can hold.
    """
    number = as_number(value, what)
    check_reward(what, number)
    return number


@dataclass(frozen=True, slots=True)
class CallError:
    """Reason why a tool call could not be read.

    Attributes:
        code: Short name of the reason, for programs.
        message: Text for the model.
    """

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call of an assistant message, or an attempt at one that could not be read.

    Attributes:
        tool: Name of the tool; empty if it could not be read.
        args: Arguments; empty if `error` is set.
        call_id: Id of the call, which its result repeats.
        tag: Tag that some formats let the model attach to a call.
        error: Why the call could not be read; None if it could.
        index: Position among the calls of the message, counted from 0.
        span: Start and end of the call in `ParseResult.raw`, in characters; None if the message was not text.
        token_span: Start and end in tokens, if the parser read tokens.
        notes: One word for each deviation from the format that the parser accepted.
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
    """One assistant message, parsed.

    Attributes:
        text: The message without the spans of its calls, otherwise unchanged.
        calls: The tool calls, in order.
        raw: The message as it was given to the parser.
        reasoning: The text inside closed thinking tags, which `text` holds too.
        notes: One word for each deviation from the format that the parser accepted outside of calls.
    """

    text: str
    calls: tuple[ParsedCall, ...] = ()
    raw: str | Mapping[str, JSON] = ""
    reasoning: str = field(default="", kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: "system", "user", "assistant", or the role of tool results.
        content: Text, a list of parts as API servers send them, or None.
        tool_calls: Tool calls of an assistant message, as API servers send them.
        tool_call_id: Id of the call that this message answers.
        is_complete: False if the model was cut off.
        reasoning: Reasoning that a server returned apart from the content.
        refusal: Why the model or its service refused to answer; empty if it did not.
    """

    role: str
    content: Content
    tool_calls: Annotated[Sequence[Mapping[str, JSON]], AsTuple] = ()
    tool_call_id: str | None = None
    is_complete: bool = True
    reasoning: str = field(default="", kw_only=True)
    refusal: str = field(default="", kw_only=True)

    @property
    def text(self) -> str:
        """The content as text; other parts are named in brackets by their type."""
        return content_text(self.content)

    @property
    def finish(self) -> Literal["stop", "length", "refused"]:
        """Why the message ended: "refused" before "length", which means that a bound cut it off.

        The calls of a message run only if it is "stop".
        """
        if self.refusal:
            return "refused"
        return "stop" if self.is_complete else "length"


COMPLETE = "is_complete"
"""Field of a message that was cut off: False. Absent from all others."""


class StoredMessage(Mapping[str, Any]):
    """A message of a conversation: an immutable mapping of its fields.

    Lists and dicts are copied when the message is made, and again when a field is read, so that nobody
    changes the message through them.

    Args:
        fields: "role", "content", and other fields that the model family needs.

    Attributes:
        shown: Slot in which the TensorDict border keeps the message in its own form, or None.
    """

    __slots__ = ("_fields", "shown")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = {key: copied(value) for key, value in fields.items()}
        self.shown: Any = None

    @classmethod
    def of(cls, message: Message) -> StoredMessage:
        """Return a message of the model, with the fields that its history keeps."""
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            fields["tool_calls"] = list(message.tool_calls)
        if not message.is_complete:
            fields[COMPLETE] = False
        for name, value in (("reasoning_content", message.reasoning), ("refusal", message.refusal)):
            if value:
                fields[name] = value
        return cls(fields)

    def __getitem__(self, key: str) -> Any:
        return copied(self._fields[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def __repr__(self) -> str:
        return f"StoredMessage({self._fields!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredMessage, (self._fields,)

    @property
    def is_shareable(self) -> bool:
        """True if no field is a list or dict, so that readers may share what they make of it."""
        return not any(isinstance(value, list | dict) for value in self._fields.values())

    def field(self, key: str) -> Any:
        """Return a field without copying it; the caller must not change it.

        Args:
            key: Name of the field. "is_complete" is true if the message does not say.
        """
        return self._fields.get(key, True) if key == COMPLETE else self._fields[key]

    def read(self) -> Message:
        """Return the message as a `Message`."""
        fields = self._fields
        calls, call_id = fields.get("tool_calls"), fields.get("tool_call_id")
        return Message(
            str(fields.get("role")),
            copied(fields.get("content")),
            tuple(copied(cast("list[Any]", calls))) if isinstance(calls, list) else (),
            call_id if isinstance(call_id, str) else None,
            fields.get(COMPLETE) is not False,
            reasoning=_text(fields.get("reasoning_content")),
            refusal=_text(fields.get("refusal")),
        )

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates take."""
        fields = self._fields
        made: dict[str, Any] = {"role": str(fields.get("role")), "content": copied(fields.get("content"))}
        for name in ("name", "tool_call_id", "tool_calls", "reasoning_content"):
            value = fields.get(name)
            if isinstance(value, str | list) and value:
                made[name] = copied(cast("Any", value))
        return made

    def keep(self, names: Callable[[str], bool]) -> StoredMessage:
        """Return a message with some of the fields.

        Args:
            names: Called with the name of a field; returns whether it stays.
        """
        return StoredMessage({key: value for key, value in self._fields.items() if names(key)})


def content_text(content: Content) -> str:
    """Return the content of a message as text.

    Args:
        content: Text, or parts. Parts that are not text are named in brackets by their type.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(map(_part_text, content))


def fields_of(value: JSON) -> Fields | None:
    """Return a JSON value if it is an object, and None otherwise."""
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
    """The outcome of one assistant message.

    Attributes:
        cleaned_text: The message without its calls.
        calls: The tool calls, in order.
        results: One result per call, in the same order.
    """

    cleaned_text: str = ""
    calls: tuple[ParsedCall, ...] = ()
    results: tuple[ToolResult, ...] = ()

    @property
    def any_error(self) -> bool:
        """True if the status of any result is not OK."""
        return any(result.is_error for result in self.results)

    @property
    def stop_requested(self) -> bool:
        """True if any result ends the trajectory."""
        return any(result.stop for result in self.results)


@dataclass(frozen=True, slots=True)
class Turn:
    """The record of one turn: an assistant message, its tool calls and their results.

    Attributes:
        trajectory: Id of the trajectory.
        index: Number of the turn in its trajectory, counted from 0.
        message: The assistant message.
        outcome: Its calls and results.
        messages: The messages that were appended to the conversation after it.
        context: The messages that were added since the turn before; in turn 0, system prompt and question.
        notes: One entry per irregularity of the turn.
        row: Place of the trajectory in the batch.
        secret_args: Names of the arguments that the schemas of the called tools declare secret, by tool.
    """

    trajectory: str
    index: int
    message: Message
    outcome: DispatchResult
    messages: tuple[Message, ...] = ()
    context: tuple[Message, ...] = ()
    notes: tuple[str, ...] = ()
    row: int = 0
    secret_args: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


def claim_id(wanted: str, taken: dict[str, int]) -> str:
    """Return an id that is not used yet, and mark it as used.

    Args:
        wanted: The preferred id. If it is used, a suffix is added: "c_2", "c_3" and so on.
        taken: Number of requests for each id so far; updated. The numbers spare a search from 2 each time.
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


def copied(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Copy the lists and dicts of a JSON value; other objects, such as images, are shared.

    Args:
        value: Any value.
        depth: Number of levels that are copied; what is nested deeper is shared.
    """
    if not depth:
        return value
    if isinstance(value, dict):
        return {key: copied(item, depth - 1) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [copied(item, depth - 1) for item in cast("list[Any]", value)]
    return value


def _as_text(value: Any) -> str:
    """Return the `str` of a value that is not JSON, without addresses of objects, which differ by run."""
    try:
        return _ADDRESS.sub("", str(value))
    except Exception:
        return f"[{type(value).__name__} that cannot be written as text]"


_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def is_encodable(text: str) -> bool:
    """Return True if a text can be written as UTF-8; half of a surrogate pair cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encodable(text: str) -> str:
    """Return a text with "?" in place of each character that cannot be written as UTF-8."""
    return text.encode("utf-8", "replace").decode()


_STARTS = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
}


def image_type(data: bytes | bytearray) -> str | None:
    """Return the media type of an image file, found by its first bytes.

    Args:
        data: The file, or at least its first 12 bytes.

    Returns:
        "image/png", "image/jpeg", "image/gif" or "image/webp"; None for other data.
    """
    return next((kind for kind, start in _STARTS.items() if start.match(data)), None)


def jsonable(value: Any) -> JSON:
    """Convert a value to one that `json.dumps` accepts, at any depth.

    Converts pydantic models, dataclasses, enums, dates, times, decimals, paths, sets, UUIDs, and bytes that
    are UTF-8 text. Recognizes numbers and arrays of numpy, torch and the like by their methods, without
    importing these libraries:

    - A scalar becomes a number, an array or tensor a nested list, on whatever device it is.
    - A table (pandas) becomes `{"columns", "index", "data"}`, a series `{"index", "data"}`, or a list where
      its index only numbers the rows; a missing value becomes null.
    - An array or table of more than `MAX_ELEMENTS` elements is abridged to its shape and first values.

    Args:
        value: The return value of a tool.

    Returns:
        None, bool, int, float, str, or lists and dicts of these. Floats that are not finite are kept, see
        `finite`.

    Raises:
        TypeError: If the value cannot be converted. The message names its type.
    """
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise TypeError("a tool returned an integer with more digits than readers of JSON accept")
    if value is None or type(value) in (bool, int, float):
        return value
    try:
        return pydantic_core.to_jsonable_python(value, fallback=_plain)
    except Exception as error:  # a property or a serializer of the value's class may raise anything
        raise TypeError(f"a tool returned a {type(value).__name__} that is not JSON: {error}") from None


def listed(values: Iterator[Any]) -> list[Any]:
    """Return what an iterator yields.

    Args:
        values: The iterator.

    Raises:
        UnreadableResult: If it yields more than `MAX_YIELDED` values; it may never end.
    """
    found = list(itertools.islice(values, MAX_YIELDED + 1))
    if len(found) > MAX_YIELDED:
        raise UnreadableResult(f"a tool yielded more than {MAX_YIELDED} values")
    return found


def finite(value: JSON) -> JSON:
    """Replace floats that JSON lacks by the strings "NaN", "Infinity" and "-Infinity", at any depth.

    Args:
        value: A JSON value.

    Returns:
        A copy without such floats.

    Raises:
        RecursionError: If the value contains itself, or is nested too deep.
    """
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {finite(key): finite(item) for key, item in cast("Mapping[Any, JSON]", value).items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in cast("Sequence[JSON]", value)]
    return value


def _plain(value: Any) -> Any:
    """Convert a value of a type that pydantic does not know."""
    kind = type(cast("object", value)).__name__
    try:
        if isinstance(value, type):
            raise TypeError("it is a class")
        if callable(getattr(value, "notna", None)) and hasattr(value, "iloc"):
            return _table(value)
        if callable(getattr(value, "tolist", None)):
            return _array(value)
    except Exception as error:
        raise ValueError(f"no JSON for {kind}: {error}") from None
    if isinstance(value, Mapping):
        return dict(cast("Mapping[Any, Any]", value))
    if isinstance(value, Sequence) and len(cast("Sequence[Any]", value)) <= MAX_ELEMENTS:
        return list(cast("Sequence[Any]", value))
    raise ValueError(f"no JSON for {kind}")


def _array(value: Any) -> Any:
    """Convert an array, a tensor or a scalar of a numerical library."""
    if _count(value) > MAX_ELEMENTS and hasattr(value, "shape"):
        first = value
        while len(first.shape) > 1:
            first = first[0]
        whole = {"shape": list(value.shape), "dtype": str(value.dtype)}
        return {**whole, "first": first[:FIRST].tolist()}
    made = value.tolist()
    if hasattr(made, "tolist"):
        raise TypeError(f"tolist() returned a {type(made).__name__}")
    return made


def _count(value: Any) -> int:
    """Return the number of elements: `numel()` of torch, `size` of numpy."""
    if callable(getattr(value, "numel", None)):
        return value.numel()
    return value.size if isinstance(getattr(value, "size", None), int) else 1


def _table(value: Any) -> Any:
    """Convert a table or a series of pandas."""
    columns = getattr(value, "columns", None)
    is_long = value.size > MAX_ELEMENTS
    whole = {"shape": list(value.shape)} if is_long else {}
    if is_long:
        value = value.iloc[:FIRST] if columns is None else value.iloc[:FIRST, :FIRST]
    data = value.astype(object).where(value.notna(), None).to_numpy().tolist()
    index = {} if type(value.index).__name__ == "RangeIndex" else {"index": value.index.tolist()}
    if columns is None and not index and not whole:
        return data
    names = {} if columns is None else {"columns": value.columns.tolist()}
    return {**whole, **names, **index, "data": data}
