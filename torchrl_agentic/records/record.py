"""The record of one trajectory: its messages, tool calls, results, rewards and tokens."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchrl_agentic.messages import JSON, Message, ParsedCall, ToolResult, Turn
from torchrl_agentic.tokens.ledger import TokenLedger

QUESTION_CHARS = 200
"""Largest number of characters of a question in lists."""
UNFINISHED = frozenset(("failed", "abandoned", "reset", "closed", "not_begun", "user_failed"))
"""Reasons of the ends of trajectories that no trainer gets, and whose scores are those of a part."""
_USER = re.compile(r"^user\n", re.MULTILINE)
_ROLE_LINE = re.compile(r"^(?:system|assistant|tool)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Tokens of a trajectory.

    Attributes:
        ledger: Token ids, their sources and log-probabilities.
        texts: Decoded text of each span of the ledger; empty if the spans were not decoded.
    """

    ledger: TokenLedger
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a trajectory comes from, as far as the program that recorded it knows.

    Attributes:
        task: Name of the task; "" if unknown.
        group: Number of its group in the collector; None without a collector.
        index: Number in the group, counted from 0; None without a collector.
        policy_versions: Versions of the weights that sampled its tokens, ascending; empty if unknown.
        seconds: From its first request to its end; None if unknown.
    """

    task: str = ""
    group: int | None = None
    index: int | None = None
    policy_versions: tuple[int, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """One trajectory, from its reset to its end.

    Attributes:
        request_id: Id that is unique over all dumps.
        turns: The turns, with all messages between them.
        step: Training step in which the trajectory began.
        trajectory: Name of the trajectory in its environment.
        row: Its place in the batch of that environment.
        rewards: Reward of the environment for each turn; None where there is none.
        score: Score of the whole trajectory; None if unknown.
        gts: The right answer (ground truth), as the data set has it.
        extras: Other fields that a program added.
        termination_reason: One of `trajectory.reasons.REASONS`, such as "no_calls"; "terminated" or
            "truncated" if another transform ended it; "reset" or "closed" if it had not ended; "" if unknown.
        tokens: Its tokens; None if they were not recorded.
        started: Unix time of the first turn, in seconds; None if unknown.
        versions: Version of each package.
        run: Id of the run that recorded it; empty if unknown.
        origin: Its task, its group and its policy versions.
        redactions: Number of places from which a secret was removed as it was written.
    """

    request_id: str
    turns: tuple[Turn, ...]
    step: int = 0
    trajectory: str = ""
    row: int = 0
    rewards: tuple[float | None, ...] = ()
    score: float | None = None
    gts: JSON = None
    extras: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    termination_reason: str = ""
    tokens: TokenRecord | None = None
    started: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    run: str = ""
    origin: Origin = Origin()
    redactions: int = 0

    @property
    def is_finished(self) -> bool:
        """True unless the trajectory failed or was cut off, so that its score is not that of a whole one."""
        return self.termination_reason not in UNFINISHED

    @property
    def messages(self) -> Iterator[Message]:
        """All messages, in order."""
        for turn in self.turns:
            yield from turn.context
            yield turn.message
            yield from turn.messages

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the first assistant message."""
        return self.turns[0].context if self.turns else ()

    @property
    def question(self) -> str:
        """The beginning of the user's last message of the prompt, on one line; see `question_of`."""
        return question_of(self.prompt)

    @property
    def calls(self) -> Iterator[tuple[Turn, ParsedCall, ToolResult]]:
        """All tool calls, each with its turn and its result."""
        for turn in self.turns:
            for call, result in zip(turn.outcome.calls, turn.outcome.results, strict=True):
                yield turn, call, result

    @property
    def group(self) -> str:
        """Name of the group: equal for trajectories with the same prompt."""
        return group_of(plain_text(self.prompt))

    @property
    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Number of calls by status, and number of calls by tool."""
        statuses: dict[str, int] = {}
        tools: dict[str, int] = {}
        for _, call, result in self.calls:
            status = str(result.status)
            statuses[status] = statuses.get(status, 0) + 1
            tools[call.tool] = tools.get(call.tool, 0) + 1
        return statuses, tools

    @property
    def summary(self) -> Summary:
        """The fields that lists of trajectories show."""
        statuses, tools = self.counts
        return Summary(
            request_id=self.request_id,
            step=self.step,
            score=self.score,
            termination_reason=self.termination_reason,
            trajectory=self.trajectory,
            group=self.group,
            n_turns=len(self.turns),
            statuses=statuses,
            tools=tools,
            extras=self.extras,
            run=self.run,
            question=self.question,
            origin=self.origin,
            redactions=self.redactions,
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """The fields of a trajectory that lists show.

    Attributes:
        request_id: Id that is unique over all dumps.
        step: Training step in which the trajectory began.
        score: Score of the whole trajectory; None if unknown.
        termination_reason: See `TrajectoryRecord`.
        trajectory: Name of the trajectory in its environment.
        group: Name of the group: equal for trajectories with the same prompt.
        n_turns: Number of turns.
        statuses: Number of calls by status.
        tools: Number of calls by tool.
        extras: Other fields that a program added.
        run: Id of the run that recorded it; empty if unknown.
        question: See `question_of`; empty if unknown.
        origin: Its task, its group and its policy versions.
        advantage: Its advantage in the batch in which it left; None if it left in none, or that is unknown.
        redactions: Number of places from which a secret was removed as it was written.
    """

    request_id: str
    step: int
    score: float | None
    termination_reason: str
    trajectory: str
    group: str
    n_turns: int
    statuses: Mapping[str, int]
    tools: Mapping[str, int]
    extras: Mapping[str, JSON]
    run: str = ""
    question: str = ""
    origin: Origin = Origin()
    advantage: float | None = None
    redactions: int = 0

    @property
    def is_finished(self) -> bool:
        """See `TrajectoryRecord.is_finished`."""
        return self.termination_reason not in UNFINISHED

    @property
    def n_calls(self) -> int:
        """Number of calls."""
        return sum(self.statuses.values())

    @property
    def n_errors(self) -> int:
        """Number of calls whose status is not OK."""
        return self.n_calls - self.statuses.get("ok", 0)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of a dump that cannot be read.

    Attributes:
        number: Number of the line, counted from 1.
        reason: Why it cannot be read.
    """

    number: int
    reason: str


def plain_text(messages: Iterable[Message]) -> str:
    """Return messages as text: for each its role on a line, then its content."""
    return "\n".join([f"{message.role}\n{message.text}" for message in messages])


def question_of(messages: Sequence[Message]) -> str:
    """Return what a prompt asks: the beginning of the user's last message, on one line.

    Without a message of a user, it is that of the last message.

    Args:
        messages: The messages before the first assistant message.
    """
    asked = next((message for message in reversed(messages) if message.role == "user"), None)
    if asked is None:
        asked = messages[-1] if messages else None
    return "" if asked is None else shortened(asked.text)


def shortened(text: str) -> str:
    """Return the beginning of a text on one line, with at most `QUESTION_CHARS` characters."""
    line = " ".join(text[: 8 * QUESTION_CHARS].split())
    return line if len(line) <= QUESTION_CHARS else f"{line[: QUESTION_CHARS - 1]}…"


def question_in(prompt: str) -> str:
    """Return the question of a prompt that `plain_text` wrote, as `question_of` does.

    Args:
        prompt: The text, or its beginning.
    """
    found = [*_USER.finditer(prompt)]
    if not found:
        return shortened(prompt)
    rest = prompt[found[-1].end() :]
    end = _ROLE_LINE.search(rest)
    return shortened(rest if end is None else rest[: end.start()])


def group_of(prompt: str) -> str:
    """Return a short name of a prompt, which is the same for the same text."""
    return hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
