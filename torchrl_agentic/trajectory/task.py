"""`Task`: what a group of trajectories starts from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torchrl_agentic.errors import check_count
from torchrl_agentic.tools.row_data import EXTRA, KEYS, RIGHT_ANSWERS, RowData
from torchrl_agentic.trajectory.task_columns import RowParts, TaskColumns


@dataclass(frozen=True, slots=True)
class Task:
    """First messages and data of a group of trajectories.

    Attributes:
        name: Name of the task, part of the names of its trajectories.
        messages: The first messages: mappings with "role" and "content", as chat templates take them.
        answer: The right answer, for rewards and records; tools do not see it. None: unknown.
        data: Columns of the data set: `tools_kwargs`, `tool_selection`, `interaction_kwargs` and others.
        max_turns: Upper bound on the messages of the model, besides that of the collector; None: no other.
    """

    name: str
    messages: Sequence[Mapping[str, Any]]
    answer: Any = None
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_turns: int | None = None

    @property
    def truth(self) -> Any:
        """The right answer: `answer`, or else the first known column of `data`, such as `ground_truth`."""
        if self.answer is not None:
            return self.answer
        return next((found for name in RIGHT_ANSWERS if (found := lookup(self.data, name)) is not None), None)

    @classmethod
    def of(cls, row: Any, number: int) -> Task:
        """Read a task from a row of a data set.

        `load_tasks` reads whole data sets, and takes other names of columns.

        Args:
            row: A `Task`, or a mapping with one of the columns "messages" or "prompt" (messages, or the
                user's text), "query", "question", "problem" or "instruction" (the user's text); and perhaps
                with "name", "answer" or another column of `TaskColumns`, and further columns.
            number: Number of the row, its name if it has none.

        Raises:
            TypeError: If it is neither.
            ValueError: If it has no messages, or one lacks a role or content.
        """
        if isinstance(row, Task):
            _check(row)
            return row
        if not isinstance(row, Mapping):
            raise TypeError(f"a task is a Task or a mapping of columns; got {type(row).__name__}")
        parts = TaskColumns().read(cast("Mapping[str, Any]", row))
        return cls.from_parts(parts, str(number if parts.name is None else parts.name))

    @classmethod
    def from_parts(cls, parts: RowParts, name: str) -> Task:
        """Return the task of a row that was read by `TaskColumns`.

        Args:
            parts: The parts of the row.
            name: Name of the task.

        Raises:
            ValueError: If it has no messages, or one lacks a role or content.
        """
        task = cls(name, parts.messages, parts.answer, parts.data)
        _check(task)
        return task


def lookup(data: Mapping[str, Any], name: Any) -> Any:
    """Return a column of a data set; None if it is missing.

    Args:
        data: The columns.
        name: Name of a column, or a tuple that leads into nested mappings.
    """
    found: Any = data
    for key in (name,) if isinstance(name, str) else name:
        if not isinstance(found, Mapping):
            return None
        found = cast("Mapping[str, Any]", found).get(key)
    return found


def first_known(columns: Mapping[Any, Any], names: Iterable[Any]) -> Any:
    """Return the first of some columns that has a value; None if none has.

    Args:
        columns: Values by column name.
        names: Names of columns.
    """
    return next((columns[name] for name in names if columns.get(name) is not None), None)


def check_tool_names(tasks: Iterable[Any], tools: Collection[str]) -> None:
    """Check that all tools that tasks, or rows of a data set, name exist.

    Items that are not rows, and columns for tools that have another shape, are skipped.

    Args:
        tasks: `Task` objects or rows.
        tools: Names of the existing tools.

    Raises:
        ValueError: If one does not exist; the message has the number of its task.
    """
    for number, task in enumerate(tasks):
        columns = task.data if isinstance(task, Task) else task
        if not isinstance(columns, Mapping) or not any(key in columns for key in (EXTRA, *KEYS)):
            continue
        try:
            data = RowData.of(cast("Mapping[str, Any]", columns))
        except (TypeError, ValueError):
            continue
        try:
            data.check(tools)
        except ValueError as error:
            raise ValueError(f"task {number}: {error}") from None


def _check(task: Task) -> None:
    check_count("max_turns", task.max_turns)
    if not task.messages:
        raise ValueError(f"task {task.name!r} has no messages")
    for message in task.messages:
        if not isinstance(cast("object", message), Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"task {task.name!r}: a message has a role and a content; got {message!r}")
        content = cast("object", message["content"])
        if content is not None and (
            isinstance(content, Mapping | bytes) or not isinstance(content, str | Sequence)
        ):
            raise ValueError(
                f"task {task.name!r}: the content of a message is a text or a list of parts; got {content!r}"
            )
    for name in cast("Mapping[object, Any]", task.data):
        if not isinstance(name, str):
            raise ValueError(f"task {task.name!r}: names of columns are texts; got {name!r}")
