"""The tool with which a model ends its trajectory."""

from __future__ import annotations

from collections.abc import Mapping

from torchrl_agentic.errors import StopSignal
from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.base import Tool, ToolContext
from torchrl_agentic.tools.schema import Schema


class StopTool(Tool):
    """Ends the trajectory after this turn; the other calls of the message are answered all the same."""

    name: str = "stop"
    description: str = "Say that the task is finished."
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {"reason": {"type": "string", "description": "Why it is finished."}},
    }

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> None:
        """End it."""
        raise StopSignal(str(args.get("reason", "done")))
