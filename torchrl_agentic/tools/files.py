"""Files of the sandbox for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import JSON, ToolResult
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.schema import Schema
from torchrl_agentic.tool import Effects, ToolContext
from torchrl_agentic.tools.workspace import WorkspaceTool

MAX_BYTES = 1 << 20
_PATH = {"type": "string", "description": "A path below /work, or relative to it."}


class FileReadTool(WorkspaceTool):
    """Reads a file in the trajectory's workspace, or in a folder that the sandbox grants."""

    name: str = "file_read"
    description: str = "Read a file."
    effects = Effects(reads=["workspace"])
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "path": _PATH,
            "max_bytes": {"type": "integer", "minimum": 1, "description": "Read no more than this."},
        },
        "required": ["path"],
    }

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        super().__init__(sandbox)
        limits = self.sandbox.limits
        self.input_schema = _naming(self.input_schema, (*limits.fs_read_roots, *limits.fs_write_roots))

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


class _WritingTool(WorkspaceTool):
    """A tool that changes files; its schema names the folders that it may write to."""

    effects = Effects(writes=["workspace"])

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        super().__init__(sandbox)
        self.input_schema = _naming(self.input_schema, self.sandbox.limits.fs_write_roots)


class FileWriteTool(_WritingTool):
    """Writes a whole file in the trajectory's workspace, making its folders."""

    name: str = "file_write"
    description: str = "Write a file; what it held before is gone."
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "path": _PATH,
            "content": {"type": "string", "description": "All that the file shall hold."},
        },
        "required": ["path", "content"],
    }

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Write the file as UTF-8."""
        await self.sandbox.open()
        size = await _write(self.sandbox, args["path"], args["content"])
        return ToolResult.from_text(f"wrote {size} bytes to {args['path']}", meta={"bytes": size})


class FileEditTool(_WritingTool):
    """Replaces a piece of a file in the trajectory's workspace."""

    name: str = "file_edit"
    description: str = "Replace a piece of text in a file. It must occur exactly once, unless all=true."
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "path": _PATH,
            "old": {"type": "string", "minLength": 1, "description": "What stands there now, exactly."},
            "new": {"type": "string", "description": "What shall stand there."},
            "all": {"type": "boolean", "description": "Replace every occurrence."},
        },
        "required": ["path", "old", "new"],
    }

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Replace the text; a file that is no UTF-8, or larger than is read, stays as it is."""
        await self.sandbox.open()
        path, old = args["path"], args["old"]
        try:
            data = await self.sandbox.read_file(path, MAX_BYTES + 1)
            text = data.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ToolError(str(error)) from None
        if len(data) > MAX_BYTES:
            raise ToolError(f"{path} has more than {MAX_BYTES} bytes; change it with a command")
        count = text.count(old)
        if not count:
            raise ToolError(f"{path} does not hold that text; give it exactly, white space included")
        if count > 1 and not args.get("all"):
            raise ToolError(f"{path} holds that text {count} times; give more around it, or all=true")
        await _write(self.sandbox, path, text.replace(old, args["new"]))
        places = "1 place" if count == 1 else f"{count} places"
        return ToolResult.from_text(f"changed {places} in {path}", meta={"replaced": count})


def _naming(schema: Schema, roots: Sequence[str]) -> Schema:
    """Name the granted folders in what the model reads of `path`; without any, the schema stays as it is."""
    if not roots:
        return schema
    path = {**_PATH, "description": f"{_PATH['description']} Or a path below {', '.join(roots)}."}
    return {**schema, "properties": {**schema["properties"], "path": path}}


async def _write(sandbox: Sandbox, path: str, text: str) -> int:
    try:
        data = text.encode()
        await sandbox.write_file(path, data)
    except (OSError, UnicodeEncodeError) as error:
        raise ToolError(str(error)) from None
    return len(data)
