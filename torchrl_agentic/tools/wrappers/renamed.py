"""`Renamed`, a tool under another name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.base import Tool, ToolContext, current_row
from torchrl_agentic.tools.row_data import RowData
from torchrl_agentic.tools.wrappers.base import Wrapped


class Renamed(Wrapped):
    """A tool under another name, for two tools of one name, or for a model that knows it by another name.

    Its effects stay those of the tool inside, so that calls keep their order under any name.

    Args:
        tool: The tool.
        name: The name that the model calls.
        description: The description that the model reads; None: that of the tool.

    Raises:
        ValueError: If the name is empty.
    """

    def __init__(self, tool: Any, name: str, description: str | None = None) -> None:
        super().__init__(tool)
        if not name:
            raise ValueError(f"expected a name that a model can call for {tool!r}; got an empty one")
        self._name, self._description = name, description

    @property
    def name(self) -> str:
        """The new name."""
        return self._name

    @property
    def description(self) -> str:
        """The new description if there is one, else that of the tool inside."""
        return self.tool.description if self._description is None else self._description

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Run the tool inside, with the row's arguments for the new name."""
        row = self._as_inside(ctx.row)
        return await self.tool.run(args, ctx if row is ctx.row else replace(ctx, row=row))

    def check_row(self, row: RowData) -> None:
        """Check that the data set has what the tool inside needs, under the new name."""
        self.tool.check_row(self._as_inside(row))

    def session(self, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Open the session of the tool inside, with the row's arguments for the new name."""
        current_row.set(self._as_inside(current_row.get()))
        return super().session(trajectory)

    def _as_inside(self, row: RowData) -> RowData:
        """Return a row that has the arguments for the new name under the name of the tool inside."""
        given = row.tools_kwargs.get(self.name)
        if given is None:
            return row
        return replace(row, tools_kwargs={**row.tools_kwargs, self.tool.name: given})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tool!r}, {self.name!r})"
