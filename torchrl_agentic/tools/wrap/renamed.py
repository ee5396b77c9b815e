"""A tool under another name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.base import Tool, ToolContext, current_row
from torchrl_agentic.tools.row_data import RowData
from torchrl_agentic.tools.wrap.base import Wrapped


class Renamed(Wrapped):
    """A tool under another name: where two servers offer tools of one name, or a model knows it by another.

    name: what the model calls it. description: what the model is told; None: what it was told before. Its
    effects stay those of the tool, so that calls keep their order under any name.

    Raises:
        ValueError: the name is empty.
    """

    def __init__(self, tool: Any, name: str, description: str | None = None) -> None:
        super().__init__(tool)
        if not name:
            raise ValueError(f"{tool!r} needs a name that a model can call; got an empty one")
        self.name = name
        if description is not None:
            self.description = description

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Hand the call on, with what the row has for this name."""
        return await self.tool.run(args, replace(ctx, row=self._as_inside(ctx.row)))

    def check_row(self, row: RowData) -> None:
        """Let the tool see what the row has for this name."""
        self.tool.check_row(self._as_inside(row))

    def session(self, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Open what the tool opens, with what the row has for this name."""
        current_row.set(self._as_inside(current_row.get()))
        return super().session(trajectory)

    def _as_inside(self, row: RowData) -> RowData:
        """Return a row in which the tool inside finds, under its own name, what is there for ours."""
        given = row.tools_kwargs.get(self.name)
        if given is None:
            return row
        return replace(row, tools_kwargs={**row.tools_kwargs, self.tool.name: given})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tool!r}, {self.name!r})"
