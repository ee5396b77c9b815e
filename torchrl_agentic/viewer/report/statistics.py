"""The statistics of a run, as plain values that can be shown, drawn, compared or written as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchrl_agentic.messages import JSON


@dataclass(frozen=True, slots=True)
class Average:
    """The mean of some numbers. For a share, the numbers are 1 and 0.

    Attributes:
        count: How many numbers there are.
        mean: Their mean, or None if there are none.
        error: Standard error of the mean, or None for fewer than two numbers.
    """

    count: int
    mean: float | None
    error: float | None

    @property
    def spread(self) -> float | None:
        """Standard deviation of the numbers, or None for fewer than two."""
        return None if self.error is None else self.error * math.sqrt(self.count)


@dataclass(frozen=True, slots=True)
class Times:
    """Quantiles of durations in seconds; None if there are no durations.

    Attributes:
        count: Number of durations.
        p50: Median.
        p95: 95th percentile.
        p99: 99th percentile.
        is_exact: Whether the quantiles are exact; otherwise they are within 1 %.
    """

    count: int
    p50: float | None
    p95: float | None
    p99: float | None
    is_exact: bool


@dataclass(frozen=True, slots=True)
class StepReport:
    """Statistics of the trajectories that began in the steps from `first` to `last`.

    Attributes:
        first: First step.
        last: Last step.
        trajectories: Number of trajectories.
        score: Scores, except missing, NaN and infinite ones, and those of trajectories that did not end.
        unfinished: Number of trajectories that did not end, because they failed or were cut off.
        unscored: Number of the others without a score.
        not_finite: Number of trajectories whose score is NaN or infinite.
        positive: Share of scores above 0.
        right: Share of correct answers by `acc`, which verl's reward functions record, where it is known.
        turns: Turns per trajectory; unknown for dumps of texts.
        calls: Calls per trajectory, of any status.
        statuses: Number of calls by status.
        errors: Share of calls that are not OK, among the calls whose status is not INFRA.
        infra: Share of calls with status INFRA, which is not the model's fault.
        run: Run times of all calls.
        queue: Queue times of all calls.
        sampled: Sampled tokens per trajectory, where tokens were recorded.
        injected: Other tokens per trajectory: prompt, chat template and results.
        reasons: Number of trajectories by the reason of their end.
        seconds: Duration of a trajectory in seconds, where a collector recorded it.
        policy_version: Newest version of the weights that sampled a token of a trajectory, where known.
        age: Updates between the oldest sampled token of a trajectory and its batch, where known.
    """

    first: int
    last: int
    trajectories: int
    score: Average
    unfinished: int
    unscored: int
    not_finite: int
    positive: Average
    right: Average
    turns: Average
    calls: Average
    statuses: Mapping[str, int]
    errors: Average
    infra: Average
    run: Times
    queue: Times
    sampled: Average
    injected: Average
    reasons: Mapping[str, int]
    seconds: Average
    policy_version: Average
    age: Average

    @property
    def name(self) -> str:
        """The step, or the first and the last step."""
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"

    @property
    def n_calls(self) -> int:
        """Number of calls."""
        return sum(self.statuses.values())


@dataclass(frozen=True, slots=True)
class ToolReport:
    """Statistics of the calls of one tool.

    Attributes:
        tool: Name of the tool.
        calls: Number of calls.
        errors: Number of calls whose status is neither OK nor INFRA.
        infra: Number of calls with status INFRA.
        statuses: Number of calls by status.
        run: Run times.
        queue: Queue times.
    """

    tool: str
    calls: int
    errors: int
    infra: int
    statuses: Mapping[str, int]
    run: Times
    queue: Times


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """A trajectory among the worst or the best.

    Attributes:
        score: Its score.
        step: Its step.
        request_id: Its id.
        question: The question; see `question_of`.
        run: Id of its run.
    """

    score: float
    step: int
    request_id: str
    question: str
    run: str


@dataclass(frozen=True, slots=True)
class Report:
    """Statistics of a dump.

    Attributes:
        name: Name of the dump.
        by: Number of steps that each of `steps` covers.
        total: Statistics of all steps.
        steps: Statistics by step, ascending.
        tools: Statistics by tool, largest number of calls first.
        broken: Number of lines that cannot be read.
        complaints: Why the first ones cannot be read.
        runs: Number of trajectories by id of the run; trajectories without an id are left out.
        worst: The trajectories with the lowest scores, the lowest first; the first ones among equals.
        best: Those with the highest scores, the highest first; empty if all scores are equal.
        unused: Number of trajectories of collectors that left in no batch, and are not counted.
    """

    name: str
    by: int
    total: StepReport
    steps: tuple[StepReport, ...]
    tools: tuple[ToolReport, ...]
    broken: int = 0
    complaints: tuple[str, ...] = ()
    runs: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    worst: tuple[ScoredTrajectory, ...] = ()
    best: tuple[ScoredTrajectory, ...] = ()
    unused: int = 0

    def to_json(self) -> dict[str, JSON]:
        """Return the report as plain data."""
        return dataclasses.asdict(self)


LARGEST = 1e100
"""Largest absolute value that is averaged; the squares of larger numbers overflow."""


def is_measurable(value: float) -> bool:
    """Return whether a number can be averaged: not NaN, not infinite, not too large."""
    return abs(value) <= LARGEST


@dataclass(slots=True)
class Moments:
    """Count, sum, and sum of squared distances from the mean of some numbers.

    Computed as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances" (1979), which avoids the cancellation of a plain sum of squares.

    Attributes:
        count: How many numbers there are.
        total: Their sum.
        squares: Sum of their squared distances from the mean.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Add a number."""
        self.merge(Moments(1, value))

    def merge(self, other: Moments) -> None:
        """Add all numbers of another instance."""
        if self.count and other.count:
            distance = other.total / other.count - self.total / self.count
            self.squares += distance * distance * self.count * other.count / (self.count + other.count)
        self.squares += other.squares
        self.total += other.total
        self.count += other.count

    def average(self) -> Average:
        """Return mean and standard error."""
        if not self.count:
            return Average(0, None, None)
        error = math.sqrt(self.squares / (self.count - 1) / self.count) if self.count > 1 else None
        return Average(self.count, self.total / self.count, error)


NONE = "–"
"""Text of an unknown value."""


def number(value: float | None, *, sign: bool = False) -> str:
    """Format a number with about three significant digits.

    Args:
        value: The number, or None if it is unknown.
        sign: Whether to write a plus sign too.
    """
    if value is None:
        return NONE
    size = abs(value)
    digits = ".3f" if size < 1 else ".2f" if size < 100 else ",.0f" if size < 1e9 else ".2e"
    return format(value, ("+" if sign else "") + digits)


def count(value: float | None, *, sign: bool = False) -> str:
    """Format a count.

    Args:
        value: The count, or None if it is unknown.
        sign: Whether to write a plus sign too.
    """
    return NONE if value is None else format(value, f"{'+' if sign else ''},.0f")


def percent(value: float | None, *, sign: bool = False) -> str:
    """Format a share as a percentage, or a difference of shares in percentage points.

    Args:
        value: The share, or None if it is unknown.
        sign: Whether it is a difference.
    """
    return NONE if value is None else f"{100 * value:+.1f}pp" if sign else f"{100 * value:.1f}%"


def milliseconds(value: float | None, *, sign: bool = False) -> str:
    """Format seconds as milliseconds.

    Args:
        value: The seconds, or None if they are unknown.
        sign: Whether to write a plus sign too.
    """
    if value is None:
        return NONE
    size = abs(value)
    digits = ".2f" if size < 0.001 else ".1f" if size < 0.01 else ",.0f" if size < 1e6 else ".2e"
    return format(1000 * value, ("+" if sign else "") + digits)
