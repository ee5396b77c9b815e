"""Files of the sandbox for the model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import JSON, ToolResult
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.schema import Schema
from torchrl_agentic.tool import Effects, Tool, ToolContext
from torchrl_agentic.tools.workspace import shared_sandbox

MAX_BYTES = 1 << 20


class FileReadTool(Tool):
    """Reads a file in a sandbox, one sandbox per trajectory, shared with the tools that are given the same.

    sandbox: a template, as for `PythonTool`.
    """

    name: str = "file_read"
    description: str = "Read a file."
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "A path below /work, or relative to it."},
            "max_bytes": {"type": "integer", "minimum": 1, "description": "Read no more than this."},
        },
        "required": ["path"],
    }

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.effects = Effects(reads=["workspace"])

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Open a sandbox for this trajectory."""
        async with shared_sandbox(self.sandbox, trajectory) as sandbox:
            yield FileReadTool(sandbox)

    async def teardown(self) -> None:
        """Close the sandbox that was used by hand, if it was."""
        await self.sandbox.close()

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Read the file as UTF-8; what is none is replaced."""
        await self.sandbox.open()
        try:
            data = await self.sandbox.read_file(
                args["path"], min(args.get("max_bytes", MAX_BYTES), MAX_BYTES)
            )
        except OSError as error:
            raise ToolError(str(error)) from None
        return ToolResult.from_text(data.decode("utf-8", "replace"), meta={"bytes": len(data)})
