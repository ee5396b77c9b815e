"""The content of an MCP result as the parts of ours."""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING, Any, cast

from torchrl_agentic.messages import (
    JSON,
    FileRefPart,
    ImagePart,
    JsonPart,
    TextPart,
    ToolResult,
    ToolResultPart,
    VideoPart,
)

if TYPE_CHECKING:
    from mcp_types import CallToolResult, ContentBlock


def result_of(found: CallToolResult) -> ToolResult:
    """Give a server's result with its parts in their order.

    Servers write structured content into a text too, for clients that know none: a text that says the same
    is replaced by it. Structured content that wraps a single value as `{"result": value}`, and that texts say
    already, adds nothing. meta: "structured" has it in any case; "audio" what there is no part for;
    "server_meta" what the server calls `_meta`.
    """
    meta: dict[str, Any] = {}
    audio = [
        {"media_type": block.mime_type, "data": block.data}
        for block in found.content
        if block.type == "audio"
    ]
    if audio:
        meta["audio"] = audio
    if found.meta:
        meta["server_meta"] = dict(found.meta)
    parts = [part_of(block) for block in found.content]
    if found.structured_content is not None:
        meta["structured"] = found.structured_content
        parts = with_structured(parts, found.structured_content)
    return ToolResult(tuple(parts), found.is_error, meta or None)


def part_of(block: ContentBlock) -> ToolResultPart:
    """Give the part for one block of content."""
    if block.type == "text":
        return TextPart(block.text)
    if block.type == "image":
        return _media(block.data, block.mime_type, "image")
    if block.type == "audio":
        return TextPart(f"[audio {block.mime_type}, {len(block.data) * 3 // 4} bytes]")
    if block.type == "resource_link":
        return FileRefPart(block.uri, block.mime_type)
    resource = block.resource
    text = getattr(resource, "text", None)
    if isinstance(text, str):
        return TextPart(f"[resource {resource.uri}]\n{text}")
    kind = (resource.mime_type or "").partition("/")[0]
    if kind in ("image", "video"):
        return _media(cast("str", getattr(resource, "blob", "")), resource.mime_type or "", kind)
    return FileRefPart(resource.uri, resource.mime_type)


def _media(encoded: str, media_type: str, kind: str) -> ToolResultPart:
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return TextPart(f"[{kind} {media_type} whose base64 is broken]")
    return VideoPart(data, media_type) if kind == "video" else ImagePart(data, media_type)


def with_structured(parts: list[ToolResultPart], value: JSON) -> list[ToolResultPart]:
    """Put structured content among the parts, in place of a text that says the same."""
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    wrapped = _unwrapped(value)
    if wrapped is not None and _say(texts, wrapped[0]):
        return parts
    for index, part in enumerate(parts):
        if isinstance(part, TextPart) and _says(part.text, value):
            return [*parts[:index], JsonPart(value), *parts[index + 1 :]]
    return [*parts, JsonPart(value)]


def _unwrapped(value: JSON) -> tuple[JSON] | None:
    if isinstance(value, dict) and list(cast("dict[str, JSON]", value)) == ["result"]:
        return (cast("dict[str, JSON]", value)["result"],)
    return None


def _say(texts: list[str], value: JSON) -> bool:
    """Whether texts say a value: one all of it, or each an item of it."""
    if len(texts) == 1 and _says(texts[0], value):
        return True
    items = cast("list[JSON]", value) if isinstance(value, list) else []
    return len(texts) == len(items) > 0 and all(map(_says, texts, items))


def _says(text: str, value: JSON) -> bool:
    if isinstance(value, str):
        return text == value
    try:
        return json.dumps(json.loads(text), sort_keys=True) == json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return False
