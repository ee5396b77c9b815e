"""`RowData`, the row of a data set that a trajectory starts from, with its arguments for tools."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from torchrl_agentic.messages import fields_of
from torchrl_agentic.text import did_you_mean

STAGES = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
"""Keys of `tools_kwargs[tool]`: arguments for each method of a `LifecycleTool`."""
SELECTION = "tool_selection"
KEYS = ("tools_kwargs", SELECTION, "need_tools_kwargs")
AGENT = "tool_agent"
"""The only one of verl's agent loops: turns with tools until a message calls none."""
EXTRA = "extra_info"
"""Column that may hold these keys too."""
RIGHT_ANSWERS: tuple[str | tuple[str, ...], ...] = (
    "ground_truth", ("reward_model", "ground_truth"), (EXTRA, "ground_truth"), "answer",
)  # fmt: skip
"""Columns of the right answer in common data sets; the first that a row has counts."""

HIDDEN_STATE = frozenset((
    "history", "text", "tokens", "masks", "log_probs", "next", "agentic", "answer", "answers", "ground_truth",
    "ground_truths", "gts", "label", "labels", "reward_model", "solution", "solutions", "target", "targets",
))  # fmt: skip
"""Keys that tools never see: the conversation, and the right answers of a data set."""

Columns: TypeAlias = Mapping[str, Any]
ToolsKwargs: TypeAlias = Mapping[str, Mapping[str, Columns]]


def trajectory_name(row: int, number: int, environment: int) -> str:
    """Return the name of a trajectory, unique in a process: `"row.number@environment"`, such as `"3.0@1"`.

    Args:
        row: Place in the flattened batch.
        number: Number of earlier trajectories of the row.
        environment: Number of the environment in its process.
    """
    return f"{row}.{number}@{environment}"


def local_name(trajectory: str) -> str:
    """Return the name of a trajectory within its environment, which is the same each time a script runs."""
    return trajectory.partition("@")[0]


@dataclass(frozen=True, slots=True)
class RowData:
    """The row of a data set that a trajectory starts from.

    Attributes:
        columns: Values by column name, as plain Python.
        tools_kwargs: Tool name → one of `STAGES` → arguments by name.
        selections: Pairs of a turn and the names of the tools that the trajectory may use from that turn on,
            sorted by turn. Empty: all tools.
    """

    columns: Columns = field(default_factory=dict[str, Any])
    tools_kwargs: ToolsKwargs = field(default_factory=dict[str, Mapping[str, Columns]])
    selections: tuple[tuple[int, frozenset[str]], ...] = ()

    @classmethod
    def of(cls, columns: Columns) -> RowData:
        """Read the columns `tools_kwargs` and `tool_selection`, of the row or of its `extra_info`.

        `tool_selection` is a list of names, or a mapping from turns, counted from 0, to lists of names, each
        of which applies from its turn on: `{"0": ["ls"], "3": ["ls", "sort"]}`. Entries that are None are
        ignored, because column files store None where only other rows have a value.

        Args:
            columns: Values by column name.

        Raises:
            ValueError: If a column has another shape, or is required and missing, or if a row of verl names
                another agent than `AGENT`.
        """
        agent = columns.get("agent_name")
        if agent not in (None, AGENT) and {"data_source", "reward_model"} <= columns.keys():
            raise ValueError(
                f"agent_name is {agent!r}, and {AGENT!r} is the only one here; change the column"
            )
        keys = tool_columns(columns)
        kwargs = _tools_kwargs(keys["tools_kwargs"])
        if keys["need_tools_kwargs"] and not kwargs:
            raise ValueError("need_tools_kwargs is set, but the row has no tools_kwargs")
        return cls(columns, kwargs, read_selections(keys[SELECTION]))

    def check(self, tools: Collection[str]) -> None:
        """Check that all tools that the row names exist.

        Args:
            tools: Names of the existing tools.

        Raises:
            ValueError: If one does not exist.
        """
        check_names("tools_kwargs", self.tools_kwargs, tools)
        for _, names in self.selections:
            check_names(SELECTION, names, tools)

    def kwargs(self, tool: str, stage: str) -> Columns:
        """Return the row's arguments for one method of a tool; empty if it has none.

        Args:
            tool: Name of the tool.
            stage: One of `STAGES`.
        """
        return self.tools_kwargs.get(tool, {}).get(stage, {})

    def selection_at(self, turn: int) -> frozenset[str] | None:
        """Return the names of the tools that the trajectory may use in a turn, or None if it may use all."""
        return next((names for first, names in reversed(self.selections) if first <= turn), None)

    def allows(self, tool: str) -> bool:
        """Return whether the trajectory may use a tool from its first turn on."""
        names = self.selection_at(0)
        return names is None or tool in names

    def allows_later(self, tool: str) -> bool:
        """Return whether the trajectory may use a tool in its first turn or a later one."""
        return self.allows(tool) or any(tool in names for _, names in self.selections)


NO_DATA = RowData()


def tool_columns(columns: Columns) -> dict[str, Any]:
    """Return the values of `KEYS` in a row: of the column, or else of the same key in `extra_info`."""
    extra = fields_of(columns.get(EXTRA)) or {}
    return {key: extra.get(key) if columns.get(key) is None else columns[key] for key in KEYS}


def read_selections(value: Any) -> tuple[tuple[int, frozenset[str]], ...]:
    """Read a `tool_selection`; see `RowData.of`.

    Args:
        value: The value of the column, or None.

    Returns:
        Pairs of a turn and names of tools, sorted by turn.

    Raises:
        ValueError: If it is neither a list of names nor a mapping from turns to such lists.
    """
    if value is None:
        return ()
    by_turn = fields_of(value)
    if by_turn is None:
        by_turn = {"0": value}
    found: list[tuple[int, frozenset[str]]] = []
    for turn, names in by_turn.items():
        if names is None:
            continue
        if isinstance(names, str) or not isinstance(names, Collection) or not str(turn).isdecimal():
            raise ValueError(
                "expected tool_selection as a list of tool names, or as a mapping from turns to such lists: "
                f'{{"0": ["ls"], "3": ["ls", "sort"]}}; got {value!r}'
            )
        found.append((int(turn), frozenset(cast("Collection[str]", names))))
    return tuple(sorted(found, key=lambda one: one[0]))


def check_names(place: str, names: Iterable[str], tools: Collection[str]) -> None:
    """Check that all named tools exist.

    Args:
        place: Where the names come from, for the message.
        names: The names.
        tools: Names of the existing tools.

    Raises:
        ValueError: If a tool does not exist; the message lists those that do, and the most similar name.
    """
    for name in names:
        if name not in tools:
            known = ", ".join(tools) or "none"
            hint = did_you_mean(name, tools)
            raise ValueError(f"{place} names the tool {name!r}, which does not exist; tools: {known}{hint}")


def _tools_kwargs(value: Any) -> ToolsKwargs:
    if value is None:
        return {}
    by_tool = fields_of(value)
    if by_tool is None:
        raise ValueError(f'expected tools_kwargs as {{tool: {{"create_kwargs": {{…}}, …}}}}; got {value!r}')
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


def without_answers(value: Any) -> Any:
    """Return a value of a data set without `HIDDEN_STATE`, at any depth; itself if it has none of these keys.

    Args:
        value: A column: mappings, lists and other values.
    """
    fields = fields_of(value)
    if fields is not None:
        kept = {key: without_answers(item) for key, item in fields.items() if key not in HIDDEN_STATE}
        is_same = len(kept) == len(fields) and all(kept[key] is item for key, item in fields.items())
        return value if is_same else kept
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        found = [without_answers(item) for item in items]
        is_same = all(new is old for new, old in zip(found, items, strict=True))
        return items if is_same else found
    return value
