"""Files of the sandbox for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import JSON, ToolResult
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.tools.base import Effects, ToolContext
from torchrl_agentic.tools.sandbox_workspace import WorkspaceTool
from torchrl_agentic.tools.schema import Schema

MAX_BYTES = 1 << 20
"""How many bytes the file tools read, and how large a file may be that they change or write."""
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

    async def _write(self, path: str, data: bytes) -> None:
        self._check_size(path, len(data))
        try:
            await self.sandbox.write_file(path, data)
        except OSError as error:
            raise ToolError(str(error)) from None

    def _check_size(self, path: str, size: int) -> None:
        """Raise ToolError if a file may not have so many bytes."""
        limit = min(MAX_BYTES, self.sandbox.limits.disk_bytes or MAX_BYTES)
        if size > limit:
            raise ToolError(
                f"{path} would have {size} bytes, and this tool writes at most {limit}; "
                "write less, or write it with a command"
            )


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
        """Write the file as UTF-8; one that is larger than the sandbox takes is not begun."""
        await self.sandbox.open()
        path, data = args["path"], _encoded(args["content"])
        await self._write(path, data)
        return ToolResult.from_text(f"wrote {len(data)} bytes to {path}", meta={"bytes": len(data)})


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
        """Replace the text; a file that is no UTF-8, or too large before or after, stays as it is."""
        await self.sandbox.open()
        path, old, new = args["path"], _encoded(args["old"]), _encoded(args["new"])
        try:
            data = await self.sandbox.read_file(path, MAX_BYTES + 1)
        except OSError as error:
            raise ToolError(str(error)) from None
        if len(data) > MAX_BYTES:
            raise ToolError(f"{path} has more than {MAX_BYTES} bytes; change it with a command")
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ToolError(str(error)) from None
        count = data.count(old)  # as of text: no character of UTF-8 begins inside of another
        if not count:
            raise ToolError(f"{path} does not hold that text; give it exactly, white space included")
        if count > 1 and not args.get("all"):
            raise ToolError(f"{path} holds that text {count} times; give more around it, or all=true")
        self._check_size(path, len(data) + count * (len(new) - len(old)))
        await self._write(path, data.replace(old, new))
        places = "1 place" if count == 1 else f"{count} places"
        return ToolResult.from_text(f"changed {places} in {path}", meta={"replaced": count})


def _naming(schema: Schema, roots: Sequence[str]) -> Schema:
    """Name the granted folders in what the model reads of `path`; without any, the schema stays as it is."""
    if not roots:
        return schema
    path = {**_PATH, "description": f"{_PATH['description']} Or a path below {', '.join(roots)}."}
    return {**schema, "properties": {**schema["properties"], "path": path}}


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ToolError(str(error)) from None
