"""MCP servers for tests and demos, made with the official SDK: over stdio, streamable HTTP and SSE.

`python -m torchrl_agentic.testing.servers.demo_mcp` serves stdio, and `config()` returns how to start it;
`http_app` and `sse_app` are for `serving`.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)

if TYPE_CHECKING:
    from torchrl_agentic.tools.mcp import MCPServerConfig

READS = ToolAnnotations(read_only_hint=True)
PIXEL = base64.b64encode(b"\x89PNG one pixel").decode()


def config(*arguments: str, env: Mapping[str, str] | None = None, **options: Any) -> MCPServerConfig:
    """Return the configuration that starts the demo server over stdio.

    Args:
        arguments: Command-line arguments of the server.
        env: Environment variables that are added to PYTHONPATH and the usual ones.
        options: Additional fields of `MCPServerConfig`.
    """
    from torchrl_agentic.tools.mcp import MCPServerConfig  # the server itself needs nothing of the package

    root = str(Path(__file__).parents[3])
    paths = {"PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    options = {"name": "demo", **options}
    return MCPServerConfig(sys.executable, ["-m", __name__, *arguments], {**paths, **(env or {})}, **options)


def demo_server() -> MCPServer:
    """Return a server whose tools cover all behaviours of MCP tools."""
    server = MCPServer("demo", log_level="CRITICAL")
    counts: Counter[str] = Counter()
    cancelled: list[str] = []
    released = asyncio.Event()

    def session_of(ctx: Context) -> str:
        return (ctx.headers or {}).get("mcp-session-id", "")

    @server.tool(annotations=READS)
    async def echo(text: str) -> str:
        """Return the text unchanged."""
        return text

    @server.tool(annotations=READS)
    async def pid() -> int:
        """Return the id of the server's process."""
        return os.getpid()

    @server.tool(annotations=READS)
    async def environ() -> dict[str, str]:
        """Return the server's environment variables."""
        return dict(os.environ)

    @server.tool(annotations=ToolAnnotations(read_only_hint=False, idempotent_hint=False))
    async def count(ctx: Context) -> int:
        """Count the calls of a session."""
        counts[session_of(ctx)] += 1
        return counts[session_of(ctx)]

    @server.tool(annotations=READS)
    async def counted(ctx: Context) -> int:
        """Return how often `count` was called."""
        return counts[session_of(ctx)]

    @server.tool(annotations=READS)
    async def hold(label: str) -> str:
        """Wait until `release` is called."""
        counts["holding"] += 1
        try:
            await released.wait()
        except anyio.get_cancelled_exc_class():
            cancelled.append(label)
            raise
        return label

    @server.tool(annotations=READS)
    async def holding() -> int:
        """Return how many calls of `hold` have begun."""
        return counts["holding"]

    @server.tool(annotations=READS)
    async def release() -> str:
        """End all calls of `hold`."""
        released.set()
        return "released"

    @server.tool(annotations=READS)
    async def cancelled_calls() -> list[str]:
        """Return the labels of the calls of `hold` that were cancelled."""
        return cancelled

    @server.tool()
    async def work(steps: int, ctx: Context) -> str:
        """Work in steps, and report each."""
        for step in range(steps):
            await ctx.report_progress(step + 1, steps, f"step {step + 1}")
        return "done"

    @server.tool()
    async def grow(name: str, ctx: Context) -> str:
        """Add a tool, and notify the client."""

        async def grown() -> str:
            return name

        server.add_tool(grown, name=name, description=f"Says {name}.")
        await ctx.session.send_tool_list_changed()
        return f"{name} is there"

    @server.tool()
    async def shrink(name: str, ctx: Context) -> str:
        """Remove a tool, and notify the client."""
        server.remove_tool(name)
        await ctx.session.send_tool_list_changed()
        return f"{name} is gone"

    @server.tool()
    async def retype(ctx: Context) -> str:
        """Change the argument of `echo`, and notify the client."""
        server.remove_tool("echo")

        async def echo(number: int) -> str:
            return str(number)

        server.add_tool(echo, description="Return a number.")
        await ctx.session.send_tool_list_changed()
        return "done"

    @server.tool()
    async def fail(why: str) -> str:
        """Fail."""
        raise ToolError(why)

    @server.tool()
    async def die() -> str:
        """End the server at once."""
        os.write(2, b"this is the end\n")
        os._exit(7)

    @server.tool()
    async def parts() -> CallToolResult:
        """Return content of each kind."""
        return CallToolResult(
            content=[
                TextContent(type="text", text="first"),
                ImageContent(type="image", data=PIXEL, mime_type="image/png"),
                AudioContent(type="audio", data=PIXEL, mime_type="audio/wav"),
                EmbeddedResource(
                    type="resource",
                    resource=TextResourceContents(uri="memo://1", mime_type="text/plain", text="a memo"),
                ),
                EmbeddedResource(
                    type="resource",
                    resource=BlobResourceContents(uri="pic://1", mime_type="image/jpeg", blob=PIXEL),
                ),
                EmbeddedResource(
                    type="resource",
                    resource=BlobResourceContents(uri="zip://1", mime_type="application/zip", blob=PIXEL),
                ),
                ResourceLink(type="resource_link", name="log", uri="file:///log.txt", mime_type="text/plain"),
                TextContent(type="text", text="last"),
            ],
            structured_content={"n": 8},
        )

    @server.tool()
    async def facts() -> dict[str, int]:
        """Return a structured result."""
        return {"answer": 42}

    @server.tool(name="odd.name/with spaces")
    async def odd() -> str:
        """Return "odd"; the name of this tool is one that models cannot write."""
        return "odd"

    return server


def http_app() -> Any:
    """Return the demo server for streamable HTTP, at /mcp."""
    return demo_server().streamable_http_app()


def sse_app() -> Any:
    """Return the demo server for SSE, at /sse."""
    return demo_server().sse_app()


if __name__ == "__main__":
    demo_server().run("stdio")
