"""The content of an MCP result as the parts of ours."""

from __future__ import annotations

import base64
import binascii
import contextlib
import copy
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import (
    JSON,
    FileRefPart,
    ImagePart,
    JsonPart,
    TextPart,
    Timing,
    ToolResult,
    ToolResultPart,
    VideoPart,
)
from torchrl_agentic.tools.base import Effects, Tool, ToolContext
from torchrl_agentic.tools.mcp.approval import ChangedTool
from torchrl_agentic.tools.schema import Schema
from torchrl_agentic.tools.service import seconds_left

if TYPE_CHECKING:
    import mcp_types
    from mcp_types import CallToolResult, ContentBlock

    from torchrl_agentic.tools.mcp.mcp_client import Client
    from torchrl_agentic.tools.mcp.toolset import MCPToolset

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class MCPProgress:
    """How far a call has come, as its server says.

    progress: grows; in the server's own unit. total: where it will end, if that is known.
    """

    tool: str
    call_id: str
    trajectory: str
    progress: float
    total: float | None = None
    message: str | None = None


class MCPTool(Tool):
    """A tool that an MCP server offers; all trajectories share one session with it. Made by `MCPToolset`.

    server_name: how the server calls it. annotations: what the server says of it, as it says it.

    The `meta` of its results: "structured" is the structured content, "progress" the last that was told of
    it, "restarts" how often the server was lost before.
    """

    def __init__(self, toolset: MCPToolset, name: str, definition: mcp_types.Tool) -> None:
        self.toolset = toolset
        self.name = name
        self.server_name = definition.name
        self.client: Client | None = None
        self.annotations: Mapping[str, JSON] = {}
        self.take(definition)

    def take(self, definition: mcp_types.Tool) -> bool:
        """Become what the server says now; whether that is anything new."""
        notes = definition.annotations
        before = (self.description, self.input_schema, self.output_schema, self.annotations)
        self.description = definition.description or definition.title or (notes and notes.title) or ""
        self.input_schema: Schema = definition.input_schema
        self.output_schema = definition.output_schema
        self.annotations = notes.model_dump(by_alias=True, exclude_none=True) if notes else {}
        self.effects = self.toolset.effects or effects_of(self.annotations, self.toolset.config.name)
        return before != (self.description, self.input_schema, self.output_schema, self.annotations)

    @property
    def origin(self) -> str:
        """Where it comes from, and how to give it another name."""
        server = self.toolset.config.name
        return f"the MCP server {server!r} (MCPToolset(..., name_prefix='…') renames its tools)"

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Call the server."""
        client = self.client or self.toolset.shared()
        limiter, asked = self.toolset.limiter, time.monotonic()
        if limiter is None:
            return await self._call(client, args, ctx, asked)
        async with contextlib.AsyncExitStack() as stack:
            _, ctx = await ctx.queue(stack.enter_async_context(limiter.slot()))
            try:
                result = await self._call(client, args, ctx, asked)
            except ChangedTool:
                raise  # the service has not failed
            except (InfrastructureError, TimeoutError):
                limiter.record_failure()
                raise
            limiter.record_success()
            return result

    async def _call(
        self, client: Client, args: Mapping[str, JSON], ctx: ToolContext, asked: float
    ) -> ToolResult:
        started = time.monotonic()
        last: list[MCPProgress] = []
        notes: tuple[str, ...] = ()

        def check(fingerprint: str | None) -> None:
            nonlocal notes
            notes = self.toolset.approval.check(self.server_name, fingerprint)

        async def told(progress: float, total: float | None, message: str | None) -> None:
            last[:] = [MCPProgress(self.name, ctx.call_id, ctx.trajectory, progress, total, message)]
            logger.debug("%s", last[0])
            if self.toolset.on_progress is not None:
                self.toolset.on_progress(last[0])

        found, news = await client.call(
            self.server_name,
            args,
            timeout=self.toolset.request_timeout,
            left_s=seconds_left(ctx),
            on_progress=told,
            check=check,
        )
        result = result_of(found)
        meta: dict[str, Any] = dict(result.meta or {})
        if last:
            meta["progress"] = {name: getattr(last[0], name) for name in ("progress", "total", "message")}
        if client.restarts:
            meta["restarts"] = client.restarts
        ended = time.monotonic()
        return replace(
            result,
            parts=(*map(TextPart, news), *result.parts),
            meta=meta or None,
            timing=Timing(0.0, started - asked, ended - started),
            notes=notes,
        )


class SessionMCPTool(MCPTool):
    """A tool of a server that each trajectory has a session of its own with; its other tools share that."""

    @contextlib.asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Self]:
        """Connect for this trajectory, or join the tools that have."""
        async with self.toolset.of_trajectory(trajectory) as client:
            live = copy.copy(self)
            live.client = client
            yield live


def effects_of(annotations: Mapping[str, JSON], server: str) -> Effects:
    """Say what a call does to a server, from what the server says: reading and writing are kept in order.

    Calls that only read overlap. A server that says nothing may do anything.
    """
    resource = [f"mcp:{server}"]
    return Effects(reads=resource) if annotations.get("readOnlyHint") else Effects(writes=resource)
