"""`MCPLayer`: runs `MCPToolTransform`, whose tools have names of the form "server.tool"."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import ImagePart, JsonPart, Status, TextPart, ToolResult, ToolResultPart
from torchrl_agentic.tools.legacy.base import ANY, Layer, TransformCall, children_of, end_trees
from torchrl_agentic.tools.legacy.layers import outcome
from torchrl_agentic.tools.schema import Schema

_WHY = (
    "MCPToolTransform needs the 'mcp' package, has logged why it could not connect, and never sends"
    " 'initialize', which servers made with the Python SDK require: use MCPToolset instead"
)


class MCPLayer(Layer):
    """Calls servers on the transform's event loop, where calls can be cancelled.

    All rows share the servers, as in the transform itself.
    """

    rows_have_state = False

    async def run(self, call: TransformCall) -> ToolResult:
        """Call a tool of a server."""
        server, tool = self._server_and_tool(call.name)
        seconds = self.transform.timeout
        work = self._work(server, tool, dict(call.args))
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop()))
        except TimeoutError:
            return ToolResult.from_text(f"Tool execution timed out after {seconds}s", status=Status.TIMEOUT)
        except InfrastructureError:
            work.close()
            raise
        except Exception as error:
            return ToolResult.from_text(f"MCP tool call failed: {error}", is_error=True)

    def _loop(self) -> asyncio.AbstractEventLoop:
        loop, thread = self.transform._loop, self.transform._thread
        if loop is None or thread is None or not thread.is_alive():
            raise InfrastructureError(f"the MCP thread is not running: {_WHY}")
        return loop

    async def _work(self, server: str, tool: str, args: dict[str, Any]) -> ToolResult:
        """Call a tool; runs on the transform's loop."""
        transform = self.transform
        if _overrides(transform):
            return outcome(await transform._execute_tool_async(server, tool, json.dumps(args)))
        if server not in transform._sessions:
            raise InfrastructureError(f"MCP server {server!r} is not connected: {_WHY}")
        # Not the transform's own method, which drops the server's error flag.
        answer = await transform._sessions[server]["session"].call_tool(tool, arguments=args)
        is_error = getattr(answer, "isError", False) or getattr(answer, "is_error", False)
        return ToolResult(tuple(map(_part, answer.content)), bool(is_error))

    @property
    def names(self) -> list[str]:
        """The tools of all connected servers, as "server.tool"."""
        return [f"{server}.{tool}" for server, tools in self.transform._tools_cache.items() for tool in tools]

    def offer(self, name: str) -> tuple[str, Schema]:
        """Return the server's description and schema of the tool."""
        server, tool = self._server_and_tool(name)
        listed: Any = self.transform._tools_cache.get(server, {}).get(tool)
        schema: Any = getattr(listed, "inputSchema", None) or getattr(listed, "input_schema", None) or ANY
        return str(getattr(listed, "description", None) or ""), schema

    def reopen(self) -> None:
        """Connect to the servers again."""
        transform = self.transform
        if transform._thread is None:
            transform._shutdown_event.clear()
            transform._ready_event.clear()
            transform._start_mcp_thread()

    def close_transform(self) -> None:
        """Close the connections, and end the servers that still run."""
        thread = self.transform._thread
        servers = [] if thread is None else children_of(thread.native_id)
        super().close_transform()
        end_trees(servers)

    def _server_and_tool(self, name: str) -> tuple[str, str]:
        server, dot, tool = name.partition(".")
        return (server, tool) if dot else (next(iter(self.transform.server_configs), ""), name)


def _overrides(transform: Any) -> bool:
    """Return whether a subclass overrides one of the two methods that call tools; then it is used."""
    names = ("_execute_tool_async", "_execute_tool_sync")
    definers = [next(kind for kind in type(transform).__mro__ if name in vars(kind)) for name in names]
    return definers[0] is not definers[1]


def _part(block: Any) -> ToolResultPart:
    kind = getattr(block, "type", None)
    if kind == "text":
        return TextPart(block.text)
    if kind == "image":
        media_type = getattr(block, "mimeType", None) or getattr(block, "mime_type", None)
        return ImagePart(base64.b64decode(block.data), media_type or "image/png")
    return JsonPart(block.model_dump(mode="json", exclude_none=True))
