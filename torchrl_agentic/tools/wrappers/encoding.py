"""Results, errors and arguments as JSON, such that what is read back is what was written."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from torchrl_agentic.errors import InfrastructureError, StopSignal, ToolError
from torchrl_agentic.messages import (
    JSON,
    FileRefPart,
    ImagePart,
    JsonPart,
    Status,
    TextPart,
    Timing,
    ToolResult,
    ToolResultPart,
    VideoPart,
)
from torchrl_agentic.text import read_json

Outcome: TypeAlias = ToolResult | Exception
"""What running a tool came to."""

_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def canonical(args: Mapping[str, JSON]) -> str | None:
    """Write arguments so that equal ones look equal; None: no JSON can hold them."""
    try:
        return _canonical(args)
    except (TypeError, ValueError, RecursionError):
        return None


def plain_text(outcome: Outcome) -> str | None:
    """Give the text of a result that is OK and one piece of text and nothing more; None: it is not."""
    if (
        isinstance(outcome, ToolResult)
        and outcome.status is Status.OK
        and outcome.meta is outcome.metrics is outcome.reward is outcome.timing is None
        and not outcome.stop
        and not outcome.notes
        and len(outcome.parts) == 1
        and isinstance(part := outcome.parts[0], TextPart)
    ):
        return part.text
    return None


def outcome_to_json(outcome: Outcome) -> dict[str, JSON]:
    """Write what running a tool came to; what `meta` holds that is no JSON will become text."""
    if isinstance(outcome, ToolResult):
        return {"result": _result_to_json(outcome)}
    data: dict[str, JSON] = {"kind": _kind(outcome), "type": type(outcome).__name__, "text": str(outcome)}
    if isinstance(outcome, ToolError):
        data.update(text=outcome.message, detail=outcome.detail)
    return {"error": data}


def outcome_from_json(data: Mapping[str, Any]) -> Outcome:
    """Read back what `outcome_to_json` wrote; an error is not raised, and has no traceback."""
    if "result" in data:
        return _result_from_json(data["result"])
    error: Mapping[str, Any] = data["error"]
    text: str = error["text"]
    match error["kind"]:
        case "tool":
            return ToolError(text, error.get("detail"))
        case "stop":
            return StopSignal(text)
        case "infra":
            return InfrastructureError(text)
        case "timeout":
            return TimeoutError(text)
        case _:  # a bug of the tool: the model has read the name of its class
            return cast("Exception", type(error["type"], (RuntimeError,), {})(text))


def _kind(error: Exception) -> str:
    kinds = ((StopSignal, "stop"), (ToolError, "tool"), (InfrastructureError, "infra"))
    found = next((kind for known, kind in kinds if isinstance(error, known)), None)
    return found or ("timeout" if isinstance(error, TimeoutError) else "crash")


def _result_to_json(result: ToolResult) -> dict[str, JSON]:
    data: dict[str, JSON] = {
        "status": str(result.status),
        "parts": [_part_to_json(part) for part in result.parts],
    }
    if result.stop:
        data["stop"] = True
    if result.reward is not None:
        data["reward"] = result.reward
    if result.meta is not None:
        data["meta"] = dict(result.meta)
    if result.metrics is not None:
        data["metrics"] = dict(result.metrics)
    if result.notes:
        data["notes"] = list(result.notes)
    if result.timing is not None:
        data["timing"] = [result.timing.start, result.timing.queue_s, result.timing.run_s]
    return data


def _result_from_json(data: Mapping[str, Any]) -> ToolResult:
    return ToolResult(
        tuple(map(_part_from_json, data["parts"])),
        meta=data.get("meta"),
        status=Status(data["status"]),
        stop=data.get("stop", False),
        reward=data.get("reward"),
        metrics=data.get("metrics"),
        timing=Timing(*data["timing"]) if "timing" in data else None,
        notes=tuple(data.get("notes", ())),
    )


def _part_to_json(part: ToolResultPart) -> dict[str, JSON]:
    if isinstance(part, TextPart):
        return {"text": part.text}
    if isinstance(part, ImagePart | VideoPart):
        return {part.kind: base64.b64encode(part.data).decode(), "media_type": part.media_type}
    if isinstance(part, FileRefPart):
        return {"file_ref": part.path, "media_type": part.media_type}
    text = str(part)
    try:
        value = read_json(text)  # what is deeper than is read back becomes text
    except ValueError:
        return {"text": text}
    return {"json": value} if str(JsonPart(value)) == text else {"text": text}


def _part_from_json(data: Mapping[str, Any]) -> ToolResultPart:
    for kind, make in (("image", ImagePart), ("video", VideoPart)):
        if kind in data:
            return make(base64.b64decode(data[kind]), data["media_type"])
    if "file_ref" in data:
        return FileRefPart(data["file_ref"], data["media_type"])
    return JsonPart(data["json"]) if "json" in data else TextPart(data["text"])
