"""`PythonTool`: runs Python code in an interpreter that lives as long as its trajectory."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Self

from torchrl_agentic.errors import check_seconds
from torchrl_agentic.messages import JSON, ImagePart, Status, TextPart, ToolResult
from torchrl_agentic.repl import Repl, ReplResult, default_repl
from torchrl_agentic.repl.duck_typed_repl import ensure_repl
from torchrl_agentic.text import truncate_middle
from torchrl_agentic.tools.base import Effects, Tool, ToolContext
from torchrl_agentic.tools.sandbox_workspace import FileExchange, shared_sandbox
from torchrl_agentic.tools.schema import Schema


class PythonTool(Tool):
    """Runs code in a stateful interpreter, one per trajectory.

    Args:
        repl: Template of an interpreter; each trajectory gets a fresh one of its kind. None:
            `default_repl()`, in the strongest sandbox that works on this machine. A tool that is used by
            hand, outside of any trajectory, uses this interpreter itself.
        timeout: Seconds that one call may take; None: as long as the dispatcher allows.
        output_max_chars: Characters of output that a result shows; longer output loses its middle.
        name: The name that the model calls.
        description: The description that the model reads; None: the default one.
        uploads: Key of the row under which files for the sandbox are found; see `FileExchange`.
        outputs: Folder whose new and changed files results refer to; see `FileExchange`.

    Raises:
        TypeError: If `repl` is not an interpreter, or is a look-alike that lacks a member.
        SandboxError: If no repl is given and no sandbox works on this machine.
    """

    name: str = "python"
    # The tiny model of this package was trained with these texts.
    description: str = "Run Python code. Variables stay from call to call. Print what you want to see."
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "The code to run."},
        },
        "required": ["code"],
    }

    def __init__(
        self,
        repl: Repl | None = None,
        *,
        timeout: float | None = 30.0,
        output_max_chars: int = 8192,
        name: str = "python",
        description: str | None = None,
        uploads: str | None = None,
        outputs: str | None = None,
    ) -> None:
        check_seconds("timeout", timeout, none="as long as the dispatcher allows")
        self.repl = default_repl() if repl is None else ensure_repl(repl)
        self.timeout = timeout
        self.output_max_chars = output_max_chars
        self.name = name
        self.description = self.description if description is None else description
        self.files = FileExchange(uploads, outputs)
        self.wants_state = uploads is not None
        self.effects = Effects(writes=["python", "workspace"])

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Open an interpreter for this trajectory."""
        async with (
            shared_sandbox(self.repl.sandbox, trajectory) as sandbox,
            self.repl.fresh(sandbox) as repl,
        ):
            yield self._with(repl)

    @asynccontextmanager
    async def branch(self, live: Tool, trajectory: str) -> AsyncGenerator[Tool]:
        """Open a copy of another trajectory's interpreter, with its variables and files."""
        assert isinstance(live, PythonTool)
        async with (
            shared_sandbox(self.repl.sandbox, trajectory, like=live.repl.sandbox) as sandbox,
            await live.repl.continue_in(sandbox) as repl,
        ):
            yield self._with(repl)

    def _with(self, repl: Repl) -> Self:
        live = copy.copy(self)
        live.repl, live.files = ensure_repl(repl), self.files.fresh()
        return live

    async def teardown(self) -> None:
        """Close the interpreter if the tool was used by hand."""
        await self.repl.close()

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run the code, and return its output, its last value and its exception."""
        await self.repl.open()
        await self.files.before(self.repl.sandbox, ctx)
        result = await self.repl.execute(str(args["code"]), timeout=ctx.run_seconds(self.timeout))
        text = result.text or ("" if result.display else "[no output]")
        text = truncate_middle(text, self.output_max_chars)
        meta = {
            "execution_count": result.execution_count,
            "timed_out": result.timed_out,
            "truncated": len(result.text) > self.output_max_chars or result.omitted_bytes > 0,
            "state_lost": result.state_lost,
        }
        images = tuple(ImagePart(shown.data, shown.media_type) for shown in result.display)
        refs = await self.files.after(self.repl.sandbox)
        return ToolResult((TextPart(text), *images, *refs), meta=meta, status=_status(result))


def _status(result: ReplResult) -> Status:
    if result.timed_out:
        return Status.TIMEOUT
    return Status.OK if result.status == "ok" else Status.ERROR
