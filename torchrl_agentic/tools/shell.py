"""Commands for the model, in a folder that lasts as long as its trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import JSON, Status, TextPart, ToolResult
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.text import truncate_middle
from torchrl_agentic.tools.base import Effects, ToolContext
from torchrl_agentic.tools.sandbox_workspace import FileExchange, WorkspaceTool
from torchrl_agentic.tools.schema import Schema

_SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi'
"""Runs its first argument with bash, or with sh where there is no bash."""


class ShellTool(WorkspaceTool):
    """Runs one shell command in a sandbox, one sandbox per trajectory. Files stay from call to call.

    `command` runs in bash, or in sh where the sandbox has no bash; each call is a new shell, so variables and
    the current folder do not stay. `argv` runs a program with these arguments, without a shell.

    Args:
        sandbox: A template, as for `PythonTool`; tools that are given the same share their files. None:
            `default_sandbox()`, in a workspace that a trajectory has in common for all shell and file tools
            that are given none.
        output_max_chars: Longer output loses its middle.
        uploads: See `FileExchange`.
        outputs: See `FileExchange`.

    Raises:
        SandboxError: If no sandbox is given, and none works here.
    """

    name: str = "shell"
    description: str = "Run a shell command. Files stay from call to call; each call begins in /work."
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "description": "A command line for the shell, e.g. 'grep -c x *.txt | sort > counts'.",
            },
            "argv": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Instead of command: a program and its arguments, run without a shell.",
            },
            "cwd": {"type": "string", "description": "The folder to run it in, below /work."},
        },
    }

    def __init__(
        self,
        sandbox: Sandbox | None = None,
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
        shown = truncate_middle(text, self.output_max_chars)
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
    if argv is not None:
        return [str(word) for word in argv]
    if not str(command).strip():
        raise ToolError("the command is empty")
    return ["sh", "-c", _SHELL, "sh", str(command)]
