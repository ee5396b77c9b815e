"""`MCPTool`: a tool of an MCP server, and the conversion of its results."""

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

    from torchrl_agentic.tools.mcp.mcp_client import MCPClient
    from torchrl_agentic.tools.mcp.toolset import MCPToolset

logger = logging.getLogger(__name__)


def mcp_result(found: CallToolResult) -> ToolResult:
    """Convert a server's result, with its parts in order.

    Servers repeat structured content as a text, for clients that do not support it. A text that is equal to
    the structured content is replaced by it. Structured content of the form `{"result": value}` adds no part
    if the texts contain the value already. The `meta` has "structured", the structured content; "audio",
    which has no part; and "server_meta", the server's `_meta`.

    Args:
        found: Result of the server.
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
    """Convert one block of content."""
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
        return TextPart(f"[{kind} {media_type} with invalid base64]")
    return VideoPart(data, media_type) if kind == "video" else ImagePart(data, media_type)


def with_structured(parts: list[ToolResultPart], value: JSON) -> list[ToolResultPart]:
    """Add structured content to the parts, in place of a text that is equal to it.

    Args:
        parts: Parts of the other content.
        value: The structured content.

    Returns:
        The new parts.
    """
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    wrapped = _unwrapped(value)
    if wrapped is not None and _all_equal(texts, wrapped[0]):
        return parts
    for index, part in enumerate(parts):
        if isinstance(part, TextPart) and _is_equal(part.text, value):
            return [*parts[:index], JsonPart(value), *parts[index + 1 :]]
    return [*parts, JsonPart(value)]


def _unwrapped(value: JSON) -> tuple[JSON] | None:
    if isinstance(value, dict) and list(cast("dict[str, JSON]", value)) == ["result"]:
        return (cast("dict[str, JSON]", value)["result"],)
    return None


def _all_equal(texts: list[str], value: JSON) -> bool:
    """Return whether one text is equal to a value, or each text to one of its items."""
    if len(texts) == 1 and _is_equal(texts[0], value):
        return True
    items = cast("list[JSON]", value) if isinstance(value, list) else []
    return len(texts) == len(items) > 0 and all(map(_is_equal, texts, items))


def _is_equal(text: str, value: JSON) -> bool:
    """Return whether a text is equal to a value, or is its JSON."""
    if isinstance(value, str):
        return text == value
    try:
        return json.dumps(json.loads(text), sort_keys=True) == json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True, slots=True)
class MCPProgress:
    """Progress of a running call, as its server reports it.

    Attributes:
        tool: Name of the tool.
        call_id: Id of the call.
        trajectory: Name of the trajectory.
        progress: Progress so far, in the server's unit.
        total: Progress at the end, if known.
        message: Message of the server, if any.
    """

    tool: str
    call_id: str
    trajectory: str
    progress: float
    total: float | None = None
    message: str | None = None


class MCPTool(Tool):
    """A tool of an MCP server whose connection all trajectories share; created by `MCPToolset`.

    The `meta` of its results has "structured", the structured content; "progress", the last reported
    progress; and "restarts", the number of times that the server was lost before.

    Args:
        toolset: The toolset of the server.
        name: The name that the model calls.
        definition: The server's description of the tool.

    Attributes:
        server_name: The server's name of the tool.
        client: The connection of its trajectory; None: the shared one.
        annotations: The server's annotations of the tool.
    """

    def __init__(self, toolset: MCPToolset, name: str, definition: mcp_types.Tool) -> None:
        self.toolset = toolset
        self.name = name
        self.server_name = definition.name
        self.client: MCPClient | None = None
        self.take(definition)

    def take(self, definition: mcp_types.Tool) -> None:
        """Take over a new description by the server."""
        notes = definition.annotations
        self.description = definition.description or definition.title or (notes and notes.title) or ""
        self.input_schema: Schema = definition.input_schema
        self.output_schema = definition.output_schema
        self.annotations: Mapping[str, JSON] = (
            notes.model_dump(by_alias=True, exclude_none=True) if notes else {}
        )
        self.effects = self.toolset.effects or implied_effects(self.annotations, self.toolset.config.name)

    @property
    def origin(self) -> str:
        """Where the tool comes from and how to rename it."""
        server = self.toolset.config.name
        return f"the MCP server {server!r} (MCPToolset(..., name_prefix='…') renames its tools)"

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Call the tool on the server."""
        client = self.client or self.toolset.shared()
        limiter, queued_at = self.toolset.limiter, time.monotonic()
        if limiter is None:
            return await self._call(client, args, ctx, queued_at)
        async with contextlib.AsyncExitStack() as stack:
            _, ctx = await ctx.queue(stack.enter_async_context(limiter.slot()))
            try:
                result = await self._call(client, args, ctx, queued_at)
            except ChangedTool:
                raise  # not a failure of the server
            except (InfrastructureError, TimeoutError) as error:
                limiter.record_failure(str(error))
                raise
            limiter.record_success()
            return result

    async def _call(
        self, client: MCPClient, args: Mapping[str, JSON], ctx: ToolContext, queued_at: float
    ) -> ToolResult:
        started = time.monotonic()
        last: list[MCPProgress] = []
        notes: tuple[str, ...] = ()

        def check(fingerprint: str | None) -> None:
            nonlocal notes
            notes = self.toolset.approval.check(self.server_name, fingerprint)

        async def report(progress: float, total: float | None, message: str | None) -> None:
            last[:] = [MCPProgress(self.name, ctx.call_id, ctx.trajectory, progress, total, message)]
            logger.debug("%s", last[0])
            if self.toolset.on_progress is not None:
                self.toolset.on_progress(last[0])

        found, remarks = await client.call(
            self.server_name,
            args,
            timeout=self.toolset.request_timeout,
            left_s=seconds_left(ctx),
            on_progress=report,
            progress_extends_timeout=self.toolset.progress_extends_timeout,
            check=check,
        )
        result = mcp_result(found)
        meta: dict[str, Any] = dict(result.meta or {})
        if last:
            meta["progress"] = {name: getattr(last[0], name) for name in ("progress", "total", "message")}
        if client.restarts:
            meta["restarts"] = client.restarts
        ended = time.monotonic()
        return replace(
            result,
            parts=(*map(TextPart, remarks), *result.parts),
            meta=meta or None,
            timing=Timing(0.0, started - queued_at, ended - started),
            notes=notes,
        )


class SessionMCPTool(MCPTool):
    """A tool of an MCP server with one connection per trajectory, which all tools of the server share."""

    @contextlib.asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Self]:
        """Open the connection of this trajectory, or share that of another tool."""
        async with self.toolset.of_trajectory(trajectory) as client:
            live = copy.copy(self)
            live.client = client
            yield live


def implied_effects(annotations: Mapping[str, JSON], server: str) -> Effects:
    """Return the effects of a tool: it reads "mcp:<server>" if it is declared read-only, else it writes it.

    Args:
        annotations: The server's annotations of the tool.
        server: Name of the server.
    """
    resource = [f"mcp:{server}"]
    return Effects(reads=resource) if annotations.get("readOnlyHint") else Effects(writes=resource)
