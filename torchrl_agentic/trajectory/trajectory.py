"""`Trajectory`: a finished conversation, as reward functions and batches get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_agentic.messages import Message, ParsedCall, Status, ToolResult, Turn, content_text
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.trajectory.fork import Fork
from torchrl_agentic.trajectory.score import Score
from torchrl_agentic.trajectory.span import Span
from torchrl_agentic.trajectory.task import Task


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
        contexts: Its contexts in order, if its prompts are rendered anew (`Contexts`); empty if `ledger` is
            the only one.
        columns: Its entries under "agentic" by name, as the turns add up (`COLUMNS`); missing ones are 0.
        turn_rewards: Rewards that the transforms gave for each turn.
        reward: The reward; until the reward function has run, the sum of `turn_rewards`.
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
    contexts: tuple[TokenLedger, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    turn_rewards: tuple[float, ...] = ()
    reward: float = 0.0
    seconds: float = 0.0
    spans: tuple[Span, ...] = ()
    score: Score | None = None
    forks: tuple[Fork, ...] = ()

    @property
    def tool_reward(self) -> float:
        """Sum of the rewards of its tool calls."""
        return self.columns.get("tool_reward", 0.0)

    @property
    def final_reward(self) -> float:
        """Sum of the final rewards of its tools."""
        return self.columns.get("trajectory_reward", 0.0)

    @property
    def user_score(self) -> float:
        """Score of its simulated user; 0.0 without one."""
        return self.columns.get("user_final_score", 0.0)

    @property
    def n_replies(self) -> int:
        """Number of replies of its simulated user."""
        return self.columns.get("user_turn", 0)

    @property
    def replies_score(self) -> float:
        """Sum of the scores of the replies."""
        return self.columns.get("user_score", 0.0)

    @property
    def token_drift(self) -> int:
        """Number of ids that differ from those of the whole conversation, encoded at once."""
        return self.columns.get("token_drift", 0)

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
        ledgers = self.contexts or ((self.ledger,) if self.ledger is not None else ())
        return sum(sum(ledger.mask) for ledger in ledgers)


def _split(text: str) -> tuple[str, str]:
    """Return the reasoning in a message of the model, and what follows it.

    The opening tag may be missing, because many chat templates end the prompt with it.
    """
    before, tag, after = text.rpartition("</think>")
    if not tag:
        after, tag, before = text.partition("<think>")  # cut off while it reasoned, if there is a tag
        return before, after
    return before.replace("<think>", "").replace("</think>", ""), after
