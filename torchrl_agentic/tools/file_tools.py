"""`FileReadTool`, `FileWriteTool` and `FileEditTool`: files in the sandbox of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import JSON, ToolResult
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.tools.base import Effects, ToolContext
from torchrl_agentic.tools.sandbox_workspace import WorkspaceTool
from torchrl_agentic.tools.schema import Schema

MAX_BYTES = 1 << 20
"""Most bytes that the file tools read, and the largest file that they change or write."""
_PATH = {"type": "string", "description": "Path of the file, below /work or relative to /work."}


class FileReadTool(WorkspaceTool):
    """Reads a file in the trajectory's workspace, or in a folder that the sandbox grants.

    Args:
        sandbox: Template of a sandbox, as for `ShellTool`.
    """

    name: str = "file_read"
    description: str = "Read a text file and return its content."
    effects = Effects(reads=["workspace"])
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "path": _PATH,
            "max_bytes": {
                "type": "integer",
                "minimum": 1,
                "description": "Read only this many bytes from the start of the file.",
            },
        },
        "required": ["path"],
    }

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        super().__init__(sandbox)
        limits = self.sandbox.limits
        self.input_schema = _naming(self.input_schema, (*limits.fs_read_roots, *limits.fs_write_roots))

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Read the file as UTF-8, replacing invalid bytes."""
        await self.sandbox.open()
        try:
            data = await self.sandbox.read_file(
                args["path"], min(args.get("max_bytes", MAX_BYTES), MAX_BYTES)
            )
        except OSError as error:
            raise ToolError(str(error)) from None
        return ToolResult.from_text(data.decode("utf-8", "replace"), meta={"bytes": len(data)})


class _WritingTool(WorkspaceTool):
    """A tool that writes files; its schema names the folders that it may write to."""

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
        """Raise ToolError if a file would be too large."""
        limit = min(MAX_BYTES, self.sandbox.limits.disk_bytes or MAX_BYTES)
        if size > limit:
            raise ToolError(
                f"{path} would have {size} bytes, but this tool writes at most {limit}; write less, or "
                "create the file by running code"
            )


class FileWriteTool(_WritingTool):
    """Writes a whole file in the trajectory's workspace, and creates its folders.

    Args:
        sandbox: Template of a sandbox, as for `ShellTool`.
    """

    name: str = "file_write"
    description: str = "Write a text file, replacing any previous content. Missing folders are created."
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "path": _PATH,
            "content": {"type": "string", "description": "The complete content of the file."},
        },
        "required": ["path", "content"],
    }

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Write the file as UTF-8, unless it is larger than the sandbox accepts."""
        await self.sandbox.open()
        path, data = args["path"], _encoded(args["content"])
        await self._write(path, data)
        return ToolResult.from_text(f"wrote {len(data)} bytes to {path}", meta={"bytes": len(data)})


class FileEditTool(_WritingTool):
    """Replaces text in a file in the trajectory's workspace.

    Args:
        sandbox: Template of a sandbox, as for `ShellTool`.
    """

    name: str = "file_edit"
    description: str = "Replace text in a file. The text must occur exactly once, unless 'all' is true."
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "path": _PATH,
            "old": {
                "type": "string",
                "minLength": 1,
                "description": "The text to replace, exactly as in the file, with whitespace and newlines.",
            },
            "new": {"type": "string", "description": "The text to put in its place."},
            "all": {"type": "boolean", "description": "Replace every occurrence. Default: false."},
        },
        "required": ["path", "old", "new"],
    }

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Replace the text; leave the file unchanged if it is not UTF-8, or too large before or after."""
        await self.sandbox.open()
        path, old, new = args["path"], _encoded(args["old"]), _encoded(args["new"])
        try:
            data = await self.sandbox.read_file(path, MAX_BYTES + 1)
        except OSError as error:
            raise ToolError(str(error)) from None
        if len(data) > MAX_BYTES:
            raise ToolError(f"{path} has more than {MAX_BYTES} bytes; change it by running code")
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ToolError(
                f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; change it by running code"
            ) from None
        count = data.count(old)  # equals the count in the text: no UTF-8 character begins inside another
        if not count:
            raise ToolError(
                f"{path} does not contain the text of 'old'; copy it exactly from the file, with whitespace"
            )
        if count > 1 and not args.get("all"):
            raise ToolError(
                f"{path} contains the text of 'old' {count} times; add the text around it to make it unique, "
                "or set 'all' to true"
            )
        self._check_size(path, len(data) + count * (len(new) - len(old)))
        await self._write(path, data.replace(old, new))
        places = "1 occurrence" if count == 1 else f"{count} occurrences"
        return ToolResult.from_text(f"replaced {places} in {path}", meta={"replaced": count})


def _naming(schema: Schema, roots: Sequence[str]) -> Schema:
    """Add the granted folders to the description of `path`; without any, return the schema unchanged."""
    if not roots:
        return schema
    path = {**_PATH, "description": f"{_PATH['description']} Or a path below {', '.join(roots)}."}
    return {**schema, "properties": {**schema["properties"], "path": path}}


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ToolError(f"the text cannot be written as UTF-8: {error}") from None
