"""A tool whose calls are written down, to be replayed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchrl_agentic.messages import JSON, Status, ToolResult
from torchrl_agentic.tools.base import ToolContext
from torchrl_agentic.tools.wrap.base import Wrapped
from torchrl_agentic.tools.wrap.cassette import Cassette


class Recorded(Wrapped):
    """A tool whose calls are written to a cassette, with what came of them, be it a result or an error.

    A call that the dispatcher stopped because its time was over is recorded as that; one that was stopped
    because all was stopped is not, nor is one that never got here. The cassette may be shared.

    cassette: or the path of its file.
    """

    def __init__(self, tool: Any, cassette: Cassette | str | Path) -> None:
        super().__init__(tool)
        self.cassette = cassette if isinstance(cassette, Cassette) else Cassette(cassette)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run it, and write down what came of it."""
        began, outcome = time.monotonic(), None
        try:
            outcome = ToolResult.from_value(await self.tool.run(args, ctx))
            return outcome
        except asyncio.CancelledError as stopped:
            outcome = _told(stopped)
            raise
        except Exception as error:
            outcome = error
            raise
        finally:
            if outcome is not None:
                seconds = time.monotonic() - began
                self.cassette.append(ctx.trajectory, self.name, ctx.call_id, args, outcome, seconds)

    async def teardown(self) -> None:
        """Tear the tool down, and close the file; it is opened again when it is needed."""
        await self.tool.teardown()
        self.cassette.close()


def _told(stopped: asyncio.CancelledError) -> ToolResult | None:
    """What the dispatcher has answered in place of a call that it stopped, if its time was over."""
    told = stopped.args[0] if stopped.args else None
    if isinstance(told, ToolResult) and told.status is Status.TIMEOUT:
        return replace(told, timing=None, notes=())
    return None
