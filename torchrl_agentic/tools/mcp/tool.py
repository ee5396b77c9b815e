"""One tool of an MCP server."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import JSON, TextPart, Timing, ToolResult
from torchrl_agentic.schema import Schema
from torchrl_agentic.tool import Effects, Tool, ToolContext
from torchrl_agentic.tools.mcp.approval import ChangedTool
from torchrl_agentic.tools.mcp.parts import result_of
from torchrl_agentic.tools.mcp.progress import MCPProgress
from torchrl_agentic.tools.service import seconds_left

if TYPE_CHECKING:
    import mcp_types

    from torchrl_agentic.tools.mcp.client import Client
    from torchrl_agentic.tools.mcp.toolset import MCPToolset

logger = logging.getLogger(__name__)


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
                limiter.failed()
                raise
            limiter.succeeded()
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
