"""`ShellTool`: runs shell commands in a sandbox that lives as long as its trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
    """Runs shell commands in a sandbox, one sandbox per trajectory, whose files persist between calls.

    `command` runs in bash, or in sh if the sandbox has no bash. Each call is a new shell, so variables and
    the current folder do not persist. `argv` runs a program with these arguments, without a shell.

    Args:
        sandbox: Template of a sandbox, as for `PythonTool`; tools with the same template share their files.
            None: `default_sandbox()`; all shell and file tools of a trajectory that are given None share one.
        output_max_chars: Characters of output that a result shows; longer output loses its middle.
        uploads: Key of the row under which files for the sandbox are found; see `FileExchange`.
        outputs: Folder whose new and changed files results refer to; see `FileExchange`.

    Raises:
        SandboxError: If no sandbox is given and none works on this machine.
    """

    name: str = "shell"
    description: str = (
        "Run a shell command and return its output and exit code. Files persist between calls; each call "
        "starts a new shell in /work."
    )
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "description": "Command line for bash, e.g. 'grep -c x *.txt | sort > counts'.",
            },
            "argv": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Instead of command: a program and its arguments, run without a shell.",
            },
            "cwd": {"type": "string", "description": "Folder to run it in, below /work. Default: /work."},
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
        """Run the command, and return its output and exit code."""
        await self.sandbox.open()
        await self.files.before(self.sandbox, ctx)
        try:
            limits = self.sandbox.limits
            limits = replace(limits, wall_seconds=ctx.run_seconds(limits.wall_seconds))
            result = await self.sandbox.run(_words(args), cwd=args.get("cwd"), limits=limits)
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
        raise ToolError("pass exactly one of 'command' and 'argv'")
    if argv is not None:
        return [str(word) for word in argv]
    if not str(command).strip():
        raise ToolError("'command' is empty; write a command line, e.g. 'ls -l'")
    return ["sh", "-c", _SHELL, "sh", str(command)]
