"""What a data set says of one trajectory: its columns, and what they hold for tools."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from torchrl_agentic.messages import fields_of

STAGES = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
"""What `tools_kwargs` holds for a tool, for the steps of its life."""
SELECTION = "tool_selection"
KEYS = ("tools_kwargs", SELECTION, "need_tools_kwargs")
EXTRA = "extra_info"
"""The column in which these keys may stand as well."""

Columns: TypeAlias = Mapping[str, Any]
ToolsKwargs: TypeAlias = Mapping[str, Mapping[str, Columns]]


def trajectory_name(row: int, number: int, environment: int) -> str:
    """Return the name of a trajectory, unique in a process: `"row.number@environment"`, such as `"3.0@1"`.

    Args:
        row: Place in the flattened batch.
        number: How many trajectories the row had before.
        environment: Number of the environment in its process.
    """
    return f"{row}.{number}@{environment}"


def local_name(trajectory: str) -> str:
    """Return the name of a trajectory within its environment, which is the same each time a script runs."""
    return trajectory.partition("@")[0]


@dataclass(frozen=True, slots=True)
class RowData:
    """The row of a data set that a trajectory began with.

    columns: by name, as plain Python. tools_kwargs: tool → one of `STAGES` → arguments by name. selection:
    the tools that this trajectory may use; None: all.
    """

    columns: Columns = field(default_factory=dict[str, Any])
    tools_kwargs: ToolsKwargs = field(default_factory=dict[str, Mapping[str, Columns]])
    selection: frozenset[str] | None = None

    @classmethod
    def of(cls, columns: Columns) -> RowData:
        """Read the columns `tools_kwargs` and `tool_selection`, of the row or of its `extra_info`.

        Entries that are None are left out: files of columns fill up with it what other rows have.

        Raises:
            ValueError: they do not have the shape that is expected, or are needed and missing.
        """
        extra = fields_of(columns.get(EXTRA)) or {}
        asked = {key: columns.get(key, extra.get(key)) for key in KEYS}
        kwargs = _tools_kwargs(asked["tools_kwargs"])
        if asked["need_tools_kwargs"] and not kwargs:
            raise ValueError("need_tools_kwargs is set, but the row has no tools_kwargs")
        names = asked[SELECTION]
        if isinstance(names, str) or not isinstance(names, Collection | None):
            raise ValueError(f"tool_selection is a list of the names of tools; got {names!r}")
        selection = None if names is None else frozenset(cast("Collection[Any]", names))
        return cls(columns, kwargs, selection)

    def check(self, tools: Collection[str]) -> None:
        """See that all tools that are named exist.

        Raises:
            ValueError: one does not.
        """
        for place, names in (("tools_kwargs", self.tools_kwargs), ("tool_selection", self.selection or ())):
            for name in names:
                if name not in tools:
                    near = difflib.get_close_matches(str(name), tools, 1)
                    hint = f"; did you mean {near[0]!r}?" if near else ""
                    known = ", ".join(tools) or "none"
                    raise ValueError(
                        f"{place} names the tool {name!r}, which is not there; tools: {known}{hint}"
                    )

    def kwargs(self, tool: str, stage: str) -> Columns:
        """Give the arguments for a step in the life of a tool; none if the row has none."""
        return self.tools_kwargs.get(tool, {}).get(stage, {})

    def allows(self, tool: str) -> bool:
        """Whether this trajectory may use a tool."""
        return self.selection is None or tool in self.selection


NO_DATA = RowData()


def _tools_kwargs(value: Any) -> ToolsKwargs:
    if value is None:
        return {}
    by_tool = fields_of(value)
    if by_tool is None:
        raise ValueError(f'tools_kwargs is {{tool: {{"create_kwargs": {{…}}, …}}}}; got {value!r}')
    found: dict[str, Mapping[str, Columns]] = {}
    for tool, stages in by_tool.items():
        if stages is None:
            continue
        by_stage = fields_of(stages)
        if by_stage is None or not by_stage.keys() <= set(STAGES):
            met = stages if by_stage is None else list(by_stage)
            raise ValueError(f"tools_kwargs: {tool}: expected {', '.join(STAGES)}; got {met!r}")
        found[tool] = {stage: _arguments(tool, stage, value) for stage, value in by_stage.items() if value}
    return found


def _arguments(tool: str, stage: str, value: Any) -> Columns:
    arguments = fields_of(value)
    if arguments is None:
        raise ValueError(f"tools_kwargs: {tool}: {stage}: expected arguments by name; got {value!r}")
    return arguments
