"""Python for the model, with state that lasts as long as its trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

from torchrl_agentic.errors import check_seconds
from torchrl_agentic.messages import JSON, ImagePart, Status, TextPart, ToolResult
from torchrl_agentic.repl import Repl, ReplResult, default_repl
from torchrl_agentic.repl.look_alikes import ensure_repl
from torchrl_agentic.text import truncate_middle
from torchrl_agentic.tools.base import Effects, Tool, ToolContext
from torchrl_agentic.tools.sandbox_workspace import FileExchange, shared_sandbox
from torchrl_agentic.tools.schema import Schema

MARGIN_S = 1.5
"""How much earlier than the dispatcher's deadline code is stopped, so that what it printed is not lost."""


class PythonTool(Tool):
    """Runs code in a stateful interpreter, one per trajectory.

    Args:
        repl: a template: each trajectory gets a fresh interpreter of its kind. None: `default_repl()`, in
            the strongest sandbox there is. Used by hand, outside of any trajectory, the tool uses this one
            itself.
        timeout: seconds that one call may take; None: as long as the dispatcher allows.
        output_max_chars: longer output loses its middle.
        name, description: what the model knows it by.
        uploads, outputs: files that go in with the dataset row, and those that come back; see `FileExchange`.

    Raises:
        TypeError: `repl` is no interpreter, or a look-alike that lacks something.
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
        """Open a copy of another trajectory's interpreter, with all that its cells have defined."""
        assert isinstance(live, PythonTool)
        async with (
            shared_sandbox(self.repl.sandbox, trajectory, like=live.repl.sandbox) as sandbox,
            await live.repl.continue_in(sandbox) as repl,
        ):
            yield self._with(repl)

    def _with(self, repl: Repl) -> PythonTool:
        return PythonTool(
            repl,
            timeout=self.timeout,
            output_max_chars=self.output_max_chars,
            name=self.name,
            description=self.description,
            uploads=self.files.uploads,
            outputs=self.files.outputs,
        )

    async def teardown(self) -> None:
        """Close the interpreter that was used by hand, if it was."""
        await self.repl.close()

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run the code, and show what it printed, its last value, and what it raised."""
        await self.repl.open()
        await self.files.before(self.repl.sandbox, ctx)
        result = await self.repl.execute(str(args["code"]), timeout=self._time(ctx))
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
