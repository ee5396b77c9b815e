"""`Task`, which a group of trajectories starts from, and `Trajectory`, the finished conversation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torchrl_agentic.collectors.fork import Fork
from torchrl_agentic.collectors.score import Score
from torchrl_agentic.collectors.span import Span
from torchrl_agentic.collectors.task_columns import RowParts, TaskColumns
from torchrl_agentic.errors import check_count
from torchrl_agentic.messages import Message, ParsedCall, Status, ToolResult, Turn, content_text
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.tools.row_data import EXTRA, KEYS, RIGHT_ANSWERS, RowData


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


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished conversation.

    Attributes:
        name: Name of the trajectory, unique in the process.
        task: The task.
        index: Number in its group, counted from 0; the same for all branches of a tree.
        messages: All messages.
        turns: One record per message of the model, with its calls and their results.
        reason: Why it ended: "no_calls", "stop_tool", "max_turns", "max_new_tokens", "max_trajectory_tokens",
            "user" or "refused".
        terminated: Whether it ended by itself.
        truncated: Whether a bound ended it.
        ledger: Its tokens; None if the engine takes messages instead of tokens.
        tool_reward: Sum of the rewards of its tool calls.
        final_reward: Sum of the final rewards of its tools.
        user_score: Score of its simulated user; 0.0 without one.
        n_replies: Number of replies of the user.
        replies_score: Sum of the scores of the replies.
        reward: The reward; 0.0 until the rewards have been computed.
        token_drift: Number of ids that differ from those of the whole conversation, encoded at once.
        seconds: From its first request to its end.
        spans: What the time was spent on.
        score: What the reward function returned, as a `Score`; None until then, or without one.
        forks: The forks on its way, if `AgentCollector(branching=...)` let it fork; it shares the messages
            and tokens before a fork with the other branches.
    """

    name: str
    task: Task
    index: int
    messages: tuple[Message, ...]
    turns: tuple[Turn, ...] = ()
    reason: str = ""
    terminated: bool = False
    truncated: bool = False
    ledger: TokenLedger | None = None
    tool_reward: float = 0.0
    final_reward: float = 0.0
    user_score: float = 0.0
    n_replies: int = 0
    replies_score: float = 0.0
    reward: float = 0.0
    token_drift: int = 0
    seconds: float = 0.0
    spans: tuple[Span, ...] = ()
    score: Score | None = None
    forks: tuple[Fork, ...] = ()

    @property
    def path(self) -> tuple[int, ...]:
        """The index, then the number of its branch at each fork; unique in its group."""
        return (self.index, *(fork.branch for fork in self.forks))

    @property
    def has_ended(self) -> bool:
        """True if the trajectory ended by itself, rather than by a bound."""
        return self.terminated

    @property
    def answer(self) -> str:
        """The text of the last message if it is the model's, else ""."""
        last = self.messages[-1]
        return last.text if last.role == "assistant" else ""

    @property
    def final_answer(self) -> str:
        """The `answer` without its reasoning; "" if the model was cut off while it reasoned."""
        return _split(self.answer)[1].strip()

    @property
    def reasoning(self) -> str:
        """The reasoning of all messages of the model, in order, without the `<think>` tags."""
        said = [message for message in self.messages if message.role == "assistant"]
        found = (message.reasoning or _split(message.text)[0] for message in said)
        return "\n".join(filter(None, (text.strip() for text in found)))

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of all messages of the model, in order, with their reasoning and calls."""
        return tuple(message.text for message in self.messages if message.role == "assistant")

    @property
    def question(self) -> str:
        """The text of the last message of the task that the user wrote, else of its last message."""
        asked = [message for message in self.task.messages if message["role"] == "user"]
        return content_text((asked or self.task.messages)[-1]["content"])

    @property
    def calls(self) -> tuple[tuple[ParsedCall, ToolResult], ...]:
        """All tool calls, in order, each with its result: `for call, result in trajectory.calls`.

        A call has `tool` and `args`, and `error` if it could not be read; a result has `status`, `is_error`,
        `text`, `reward` and `metrics`.
        """
        return tuple(
            pair for turn in self.turns for pair in zip(turn.outcome.calls, turn.outcome.results, strict=True)
        )

    @property
    def n_calls(self) -> int:
        """Number of tool calls."""
        return sum(len(turn.outcome.calls) for turn in self.turns)

    @property
    def n_errors(self) -> int:
        """Number of calls whose result is an error, INFRA included."""
        return sum(result.is_error for turn in self.turns for result in turn.outcome.results)

    @property
    def n_infra(self) -> int:
        """Number of calls that failed although the model did nothing wrong."""
        found = (result.status for turn in self.turns for result in turn.outcome.results)
        return sum(status is Status.INFRA for status in found)

    @property
    def stop_requested(self) -> bool:
        """True if a tool asked for the end of the trajectory."""
        return any(result.stop for _, result in self.calls)

    @property
    def is_cut(self) -> bool:
        """True if its last answer was cut off by a bound."""
        return bool(self.turns) and self.turns[-1].message.finish == "length"

    @property
    def tool_seconds(self) -> float:
        """Seconds inside tools, summed over all calls."""
        found = (result.timing for turn in self.turns for result in turn.outcome.results)
        return sum(timing.run_s for timing in found if timing is not None)

    @property
    def n_sampled(self) -> int:
        """Number of sampled tokens, those before its forks included; 0 without tokens."""
        return 0 if self.ledger is None else sum(self.ledger.mask)


def _split(text: str) -> tuple[str, str]:
    """Return the reasoning in a message of the model, and what follows it.

    The opening tag may be missing, because many chat templates end the prompt with it.
    """
    before, tag, after = text.rpartition("</think>")
    if not tag:
        after, tag, before = text.partition("<think>")  # cut off while it reasoned, if there is a tag
        return before, after
    return before.replace("<think>", "").replace("</think>", ""), after
