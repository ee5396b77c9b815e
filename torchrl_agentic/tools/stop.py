"""`StopTool`: lets a model end its trajectory."""

from __future__ import annotations

from collections.abc import Mapping

from torchrl_agentic.errors import StopSignal
from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.base import Tool, ToolContext
from torchrl_agentic.tools.schema import Schema


class StopTool(Tool):
    """Ends the trajectory after this turn; the other calls of the same message still run."""

    name: str = "stop"
    description: str = "End the conversation. Call this when the task is finished."
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {"reason": {"type": "string", "description": "Why the task is finished."}},
    }

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> None:
        """End the trajectory."""
        raise StopSignal(str(args.get("reason", "done")))
