"""Commands for the model, in a folder that lasts as long as its trajectory."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Self

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import JSON, Status, TextPart, ToolResult
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.schema import Schema
from torchrl_agentic.tool import Effects, ToolContext
from torchrl_agentic.tools.exchange import FileExchange
from torchrl_agentic.tools.text import middle_out
from torchrl_agentic.tools.workspace import WorkspaceTool


class ShellTool(WorkspaceTool):
    """Runs one command in a sandbox, one sandbox per trajectory. Files stay from call to call.

    Tools that are given the same sandbox share their files.

    A command is split into words; there is no shell, unless the model asks for one: `argv: ["sh", "-c", "a |
    b"]`.
    sandbox: a template, as for `PythonTool`. uploads, outputs: see `FileExchange`.
    """

    name: str = "shell"
    description: str = "Run a command. For pipes and redirections use argv ['sh', '-c', '...']."
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command in one string."},
            "argv": {"type": "array", "items": {"type": "string"}, "description": "Or the command in words."},
            "cwd": {"type": "string", "description": "The folder to run it in, below /work."},
        },
    }

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        output_max_chars: int = 8192,
        uploads: str | None = None,
        outputs: str | None = None,
    ) -> None:
        super().__init__(sandbox)
        self.files = FileExchange(uploads, outputs)
        self.wants_state = uploads is not None
        self.output_max_chars = output_max_chars
        self.effects = Effects(writes=["workspace"])

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run the command, and show what it printed and how it ended."""
        await self.sandbox.open()
        await self.files.before(self.sandbox, ctx)
        try:
            result = await self.sandbox.run(_words(args), cwd=args.get("cwd"))
        except (ValueError, PermissionError) as error:
            raise ToolError(str(error)) from None
        lines = [result.stdout.rstrip("\n")] if result.stdout.strip() else []
        if result.stderr.strip():
            lines.append(f"[stderr]\n{result.stderr.rstrip()}")
        if result.timed_out:
            lines.append(f"[stopped after {result.wall_seconds:.1f} s]")
        lines.append(f"[exit {result.exit_code}]")
        text = "\n".join(lines)
        shown = middle_out(text, self.output_max_chars)
        failed = Status.TIMEOUT if result.timed_out else Status.ERROR if result.exit_code else Status.OK
        meta: dict[str, Any] = {
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
            "wall_seconds": result.wall_seconds,
            "truncated": result.truncated or shown != text,
        }
        refs = await self.files.after(self.sandbox)
        return ToolResult((TextPart(shown), *refs), meta=meta, status=failed)

    def _in(self, sandbox: Sandbox) -> Self:
        live = super()._in(sandbox)
        live.files = self.files.fresh()
        return live


def _words(args: Mapping[str, JSON]) -> list[str]:
    argv, command = args.get("argv"), args.get("command")
    if (argv is None) == (command is None):
        raise ToolError("give either 'command' or 'argv'")
    return [str(word) for word in argv] if argv is not None else shlex.split(str(command))
