"""The figures of a run: plain values that can be shown, drawn, compared or written as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchrl_agentic.messages import JSON


@dataclass(frozen=True, slots=True)
class Average:
    """The mean of so many numbers; None of none. error: its standard error, None for fewer than two.

    Of a share, the numbers are 1 and 0.
    """

    count: int
    mean: float | None
    error: float | None


@dataclass(frozen=True, slots=True)
class Times:
    """Quantiles of durations in seconds; None of none. is_exact: else they are within 1 %."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None
    is_exact: bool


@dataclass(frozen=True, slots=True)
class StepReport:
    """The figures of the trajectories that began in the steps from `first` to `last`.

    Attributes:
        score: of those that have one; NaN and infinite ones are `not_finite`, and left out.
        positive: the share with a score above 0, of the same.
        right: the share of right answers by `acc`, which verl's reward functions note; of those that have it.
        turns: per trajectory. A dump that holds only texts does not say.
        calls: per trajectory, whatever came of them.
        statuses: how many calls were answered how.
        errors: the share that was not answered OK, of the calls without those answered INFRA.
        infra: the share of calls answered INFRA, which is not the model's fault.
        run, queue: of all calls: inside the tool, and until it ran.
        sampled, injected: tokens per trajectory, where they were recorded: of the model, and all others:
            prompt, chat template, results.
        reasons: why how many ended.
    """

    first: int
    last: int
    trajectories: int
    score: Average
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

    @property
    def name(self) -> str:
        """The step, or the first and the last."""
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"

    @property
    def n_calls(self) -> int:
        """How many calls there were."""
        return sum(self.statuses.values())


@dataclass(frozen=True, slots=True)
class ToolReport:
    """The calls of one tool. errors: answered neither OK nor INFRA."""

    tool: str
    calls: int
    errors: int
    infra: int
    statuses: Mapping[str, int]
    run: Times
    queue: Times


@dataclass(frozen=True, slots=True)
class Report:
    """What a dump adds up to.

    by: each of `steps` stands for so many, from a multiple of it on. broken: lines that cannot be read;
    `complaints` says of the first ones why. runs: id of a run → how many of its trajectories there are, those
    without an id left out.
    """

    name: str
    by: int
    total: StepReport
    steps: tuple[StepReport, ...]
    tools: tuple[ToolReport, ...]
    broken: int = 0
    complaints: tuple[str, ...] = ()
    runs: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    def to_json(self) -> dict[str, JSON]:
        """Give it as plain data."""
        return dataclasses.asdict(self)


LARGEST = 1e100
"""Numbers beyond are no measurements, and their squares no numbers."""


def is_measurable(value: float) -> bool:
    """Whether a number can be averaged: no NaN, nothing infinite or beyond all measure."""
    return abs(value) <= LARGEST


@dataclass(slots=True)
class Moments:
    """How many numbers, their sum, and the sum of the squares of their distances from the mean.

    Added and merged as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances" (1979), which loses no digits where a sum of squares does.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Add a number."""
        self.merge(Moments(1, value))

    def merge(self, other: Moments) -> None:
        """Add all numbers of another one."""
        if self.count and other.count:
            distance = other.total / other.count - self.total / self.count
            self.squares += distance * distance * self.count * other.count / (self.count + other.count)
        self.squares += other.squares
        self.total += other.total
        self.count += other.count

    def average(self) -> Average:
        """Give the figures."""
        if not self.count:
            return Average(0, None, None)
        error = math.sqrt(self.squares / (self.count - 1) / self.count) if self.count > 1 else None
        return Average(self.count, self.total / self.count, error)


NONE = "–"
"""What stands where nothing is known."""


def number(value: float | None, *, sign: bool = False) -> str:
    """Write a number with about three digits that count. sign: a plus, too."""
    if value is None:
        return NONE
    size = abs(value)
    digits = ".3f" if size < 1 else ".2f" if size < 100 else ",.0f" if size < 1e9 else ".2e"
    return format(value, ("+" if sign else "") + digits)


def count(value: float | None, *, sign: bool = False) -> str:
    """Write how many there are."""
    return NONE if value is None else format(value, f"{'+' if sign else ''},.0f")


def percent(value: float | None, *, sign: bool = False) -> str:
    """Write a share; a difference of shares in percentage points."""
    return NONE if value is None else f"{100 * value:+.1f}pp" if sign else f"{100 * value:.1f}%"


def milliseconds(value: float | None, *, sign: bool = False) -> str:
    """Write seconds as milliseconds."""
    if value is None:
        return NONE
    size = abs(value)
    digits = ".2f" if size < 0.001 else ".1f" if size < 0.01 else ",.0f" if size < 1e6 else ".2e"
    return format(1000 * value, ("+" if sign else "") + digits)
