"""`Task`, which a group of trajectories starts from, and `Trajectory`, the finished conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torchrl_agentic.collectors.span import Span
from torchrl_agentic.errors import check_count
from torchrl_agentic.messages import Message, Status, Turn
from torchrl_agentic.tokens.ledger import TokenLedger

QUESTIONS = ("messages", "prompt", "query", "question")
"""Columns of a data set that may hold the first messages, or the text of the user's message."""
ANSWERS = ("answer", "ground_truth")


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

    @classmethod
    def of(cls, row: Any, number: int) -> Task:
        """Read a task from a row of a data set.

        Args:
            row: A `Task`, or a mapping with "messages" or "prompt" (messages), or "query" or "question" (the
                user's text), and perhaps "name", "answer" or "ground_truth", and further columns.
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
        columns = cast("Mapping[str, Any]", row)
        key = next((key for key in QUESTIONS if columns.get(key) is not None), None)
        if key is None:
            raise ValueError(f"a row needs one of {', '.join(QUESTIONS)}; got {', '.join(columns)}")
        asked: Any = columns[key]
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        answer = next((columns[name] for name in ANSWERS if columns.get(name) is not None), None)
        hidden = {key, "name", *ANSWERS}
        data = {name: value for name, value in columns.items() if name not in hidden}
        task = cls(str(columns.get("name", number)), messages, answer, data)
        _check(task)
        return task


def _check(task: Task) -> None:
    check_count("max_turns", task.max_turns)
    if not task.messages:
        raise ValueError(f"task {task.name!r} has no messages")
    for message in task.messages:
        if not isinstance(cast("object", message), Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"task {task.name!r}: a message has a role and a content; got {message!r}")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished conversation.

    Attributes:
        name: Name of the trajectory, unique in the process.
        task: The task.
        index: Number in its group, counted from 0.
        messages: All messages.
        turns: One record per message of the model, with its calls and their results.
        reason: Why it ended: "no_calls", "stop_tool", "max_turns", "max_trajectory_tokens" or "user".
        terminated: Whether it ended by itself.
        truncated: Whether a bound ended it.
        ledger: Its tokens; None if the engine takes messages instead of tokens.
        tool_reward: Sum of the rewards of its tool calls.
        final_reward: Sum of the final rewards of its tools.
        user_score: Score of its simulated user; 0.0 without one.
        reward: The reward; 0.0 until the rewards have been computed.
        token_drift: Number of ids that differ from those of the whole conversation, encoded at once.
        seconds: From its first request to its end.
        spans: What the time was spent on.
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
    reward: float = 0.0
    token_drift: int = 0
    seconds: float = 0.0
    spans: tuple[Span, ...] = ()

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
    def tool_seconds(self) -> float:
        """Seconds inside tools, summed over all calls."""
        found = (result.timing for turn in self.turns for result in turn.outcome.results)
        return sum(timing.run_s for timing in found if timing is not None)

    @property
    def n_sampled(self) -> int:
        """Number of sampled tokens; 0 without tokens."""
        return 0 if self.ledger is None else sum(self.ledger.mask)
