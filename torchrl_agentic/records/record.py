"""The record of a trajectory: what was said, called and answered, and what it was worth."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torchrl_agentic.messages import JSON, Message, ParsedCall, ToolResult, Turn
from torchrl_agentic.tokens.ledger import TokenLedger


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The tokens of a trajectory. texts: one per span of the ledger; empty where nobody decoded them."""

    ledger: TokenLedger
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """One trajectory, from its reset to its end.

    Attributes:
        request_id: unique over all dumps.
        step: the training step in which it began.
        trajectory: its name in its environment; `row` is its place in the batch there.
        turns: what the model said, what it called, what came of it; with all messages between.
        rewards: of the environment, one per turn; None where nobody gave any.
        score: what the whole was worth; None: not known.
        gts: the right answer, as the data set has it.
        extras: whatever else was noted.
        termination_reason: "stop_tool", "no_calls", "max_turns", "user", "terminated", "truncated"; "reset"
            or "closed" where it had not ended. "" if unknown.
        started: Unix time in seconds of the first turn; None if unknown.
        versions: package → version.
        run: The id of the run that recorded it; empty in dumps of earlier versions.
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

    @property
    def messages(self) -> Iterator[Message]:
        """All messages, in their order."""
        for turn in self.turns:
            yield from turn.context
            yield turn.message
            yield from turn.messages

    @property
    def prompt(self) -> tuple[Message, ...]:
        """What it began with."""
        return self.turns[0].context if self.turns else ()

    @property
    def calls(self) -> Iterator[tuple[Turn, ParsedCall, ToolResult]]:
        """All calls, with their turns and results."""
        for turn in self.turns:
            for call, result in zip(turn.outcome.calls, turn.outcome.results, strict=True):
                yield turn, call, result

    @property
    def group(self) -> str:
        """What trajectories that began with the same messages have in common."""
        return group_of(plain_text(self.prompt))

    @property
    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """How many of its calls had each status, and how many were of each tool."""
        statuses: dict[str, int] = {}
        tools: dict[str, int] = {}
        for _, call, result in self.calls:
            status = str(result.status)
            statuses[status] = statuses.get(status, 0) + 1
            tools[call.tool] = tools.get(call.tool, 0) + 1
        return statuses, tools

    @property
    def summary(self) -> Summary:
        """What lists of trajectories show of it."""
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
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """What lists of trajectories show of one. statuses, tools: how many of its calls."""

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

    @property
    def n_calls(self) -> int:
        """How many calls there were."""
        return sum(self.statuses.values())

    @property
    def n_errors(self) -> int:
        """How many calls were not answered OK."""
        return self.n_calls - self.statuses.get("ok", 0)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of a dump that cannot be read, and why. number: from 1."""

    number: int
    reason: str


def plain_text(messages: Iterable[Message]) -> str:
    """Write messages as text: for each its role on a line, then its content."""
    return "\n".join([f"{message.role}\n{message.text}" for message in messages])


def group_of(prompt: str) -> str:
    """Give a short name of a prompt, the same for the same text."""
    return hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
