"""Python for the model, with state that lasts as long as its trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

from torchrl_agentic.messages import JSON, Status, ToolResult
from torchrl_agentic.repl import Repl, ReplResult, SubprocessRepl
from torchrl_agentic.schema import Schema
from torchrl_agentic.tool import Effects, Tool, ToolContext
from torchrl_agentic.tools.text import middle_out
from torchrl_agentic.tools.workspace import shared_sandbox

MARGIN_S = 1.5
"""How much earlier than the dispatcher's deadline code is stopped, so that what it printed is not lost."""


class PythonTool(Tool):
    """Runs code in a stateful interpreter, one per trajectory.

    Args:
        repl: a template: each trajectory gets a fresh interpreter of its kind. None: `SubprocessRepl()`, in
            the strongest sandbox there is. Used by hand, outside of any trajectory, the tool uses this one
            itself.
        timeout: seconds that one call may take; None: as long as the dispatcher allows.
        output_max_chars: longer output loses its middle.
        name, description: what the model knows it by.

    Raises:
        SandboxError: no repl is given, and no sandbox works here.
    """

    name: str = "python"
    description: str = "Run Python code. Variables stay from call to call. Print what you want to see."
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code to run."}},
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
    ) -> None:
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, or None; got {timeout}")
        self.repl = SubprocessRepl() if repl is None else repl
        self.timeout = timeout
        self.output_max_chars = output_max_chars
        self.name = name
        self.description = self.description if description is None else description
        self.effects = Effects(writes=["python", "workspace"])

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Open an interpreter for this trajectory."""
        async with (
            shared_sandbox(self.repl.sandbox, trajectory) as sandbox,
            self.repl.fresh(sandbox) as repl,
        ):
            yield PythonTool(
                repl,
                timeout=self.timeout,
                output_max_chars=self.output_max_chars,
                name=self.name,
                description=self.description,
            )

    async def teardown(self) -> None:
        """Close the interpreter that was used by hand, if it was."""
        await self.repl.close()

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run the code, and show what it printed, its last value, and what it raised."""
        await self.repl.open()
        result = await self.repl.execute(str(args["code"]), timeout=self._time(ctx))
        text = middle_out(result.text or "[no output]", self.output_max_chars)
        meta = {
            "execution_count": result.execution_count,
            "timed_out": result.timed_out,
            "truncated": len(result.text) > self.output_max_chars or result.omitted_bytes > 0,
            "state_lost": result.state_lost,
        }
        return ToolResult.from_text(text, meta=meta, status=_status(result))

    def _time(self, ctx: ToolContext) -> float | None:
        if ctx.deadline is None:
            return self.timeout
        left = ctx.deadline - asyncio.get_running_loop().time()
        earlier = left - MARGIN_S if left > 2 * MARGIN_S else left
        return earlier if self.timeout is None else min(self.timeout, earlier)


def _status(result: ReplResult) -> Status:
    if result.timed_out:
        return Status.TIMEOUT
    return Status.OK if result.status == "ok" else Status.ERROR
