"""`SampleGroups`: the trajectories of each prompt with their advantages, and where two of them differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, TypeAlias, TypeGuard

from torchrl_agentic.records import Summary, TrajectoryRecord
from torchrl_agentic.viewer.report.statistics import is_measurable

EPS = 1e-4
"""Added to the standard deviation of a group, as by `group_advantage`."""
BEFORE_CHARS = 40
GroupKey: TypeAlias = "tuple[str, int | None, int | None, str]"
"""Run, step, number of the group in its collector, and name of the prompt; a number makes the step None."""


def group_key(summary: Summary) -> GroupKey:
    """Return the key that the samples of a prompt share.

    In a collector that is the number of the group; elsewhere, all trajectories of a step with the same prompt
    are a group.

    Args:
        summary: The trajectory.
    """
    number = summary.origin.group
    return summary.run, summary.step if number is None else None, number, summary.group


def advantages(scores: Sequence[float | None], *, eps: float = EPS) -> list[float | None]:
    """Return the advantages that `group_advantage` computes from the scores of a group.

    Args:
        scores: The scores; None, NaN, infinite and huge ones are left out.
        eps: Added to the standard deviation.

    Returns:
        The distance of each score from the mean, divided by the standard deviation; None without a score.
    """
    known = [score for score in scores if is_known(score)]
    mean, spread = mean_and_spread(known)
    return [(score - mean) / (spread + eps) if is_known(score) else None for score in scores]


def is_known(score: float | None) -> TypeGuard[float]:
    """Return whether a score can be compared: not None, NaN, infinite or huge."""
    return score is not None and is_measurable(score)


def mean_and_spread(scores: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation, exact for equal numbers; zeros without numbers."""
    if not scores:
        return 0.0, 0.0
    least = min(scores)
    mean = least + math.fsum(score - least for score in scores) / len(scores)
    return mean, math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The trajectories of one prompt.

    Attributes:
        key: Their common key.
        step: Their step.
        numbers: Number of each trajectory, as it was added, in the order of their indexes.
        advantages: Advantage of each; None if it left in no batch, or has no score.
        is_recorded: Whether the advantages are those of the batch; otherwise they are computed from the
            scores.
        mean: Mean of the known scores; None if there are none.
        spread: Their standard deviation; None if there are none.
        is_flat: Whether all of two or more scores are equal, so that the group teaches nothing.
    """

    key: GroupKey
    step: int
    numbers: tuple[int, ...]
    advantages: tuple[float | None, ...]
    is_recorded: bool
    mean: float | None
    spread: float | None
    is_flat: bool


class _Sample(NamedTuple):
    number: int
    place: int
    step: int
    score: float | None
    advantage: float | None
    is_finished: bool


class SampleGroups:
    """Collects trajectories by their prompt, in some ten bytes each."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, list[_Sample]] = {}

    def add(self, number: int, summary: Summary) -> None:
        """Add a trajectory.

        Args:
            number: Number that the caller assigns to it.
            summary: Its summary, with the advantage of its batch if that is known.
        """
        index = summary.origin.index
        self._groups.setdefault(group_key(summary), []).append(
            _Sample(
                number,
                index or 0,
                summary.step,
                summary.score,
                summary.advantage,
                summary.is_finished,
            )
        )

    def __iter__(self) -> Iterator[SampleGroup]:
        """Yield the groups, in the order of their first trajectories."""
        for key, samples in self._groups.items():
            yield _group(key, samples)


def _group(key: GroupKey, samples: Sequence[_Sample]) -> SampleGroup:
    samples = sorted(samples, key=lambda sample: (sample.place, sample.number))
    is_recorded = any(sample.advantage is not None for sample in samples)
    if is_recorded:
        # A run that is resumed repeats samples under the same names: the last one is that of the batch.
        last = {sample.place: sample.number for sample in samples if sample.advantage is not None}
        counts = [last.get(sample.place) == sample.number for sample in samples]
        found = [
            sample.advantage if is_counted else None
            for sample, is_counted in zip(samples, counts, strict=True)
        ]
    else:
        counts = [sample.is_finished for sample in samples]
        found = advantages([sample.score if sample.is_finished else None for sample in samples])
    known = [
        sample.score
        for sample, is_counted in zip(samples, counts, strict=True)
        if is_counted and is_known(sample.score)
    ]
    mean, spread = mean_and_spread(known)
    steps = [sample.step for sample, is_counted in zip(samples, counts, strict=True) if is_counted]
    return SampleGroup(
        key,
        max(steps, default=samples[0].step),
        tuple(sample.number for sample in samples),
        tuple(found),
        is_recorded,
        mean if known else None,
        spread if known else None,
        len(known) > 1 and min(known) == max(known),
    )


class SaidMessage(NamedTuple):
    """A message after the prompt.

    Attributes:
        turn: Number of its turn, counted from 0.
        role: Role of its author.
        text: Its reasoning and text.
    """

    turn: int
    role: str
    text: str


def said_after_prompt(record: TrajectoryRecord) -> list[SaidMessage]:
    """Return the messages of a trajectory after its prompt."""
    found: list[SaidMessage] = []
    for place, turn in enumerate(record.turns):
        context = turn.context if place else ()
        found += [
            SaidMessage(place, message.role, f"{message.reasoning}{message.text or message.refusal}")
            for message in (*context, turn.message, *turn.messages)
        ]
    return found


class Divergence(NamedTuple):
    """The first point where two trajectories differ.

    Attributes:
        turn: Number of the turn, counted from 0.
        role: Role of the message in the second trajectory; "" if it has ended before.
        at: Number of characters before it that both messages begin with.
        before: The last of these characters, at most `BEFORE_CHARS`.
        text: Text of the second trajectory from there on; "" if it has ended.
        other: Text of the first trajectory from there on; "" if it has ended.
    """

    turn: int
    role: str
    at: int
    before: str
    text: str
    other: str


def first_difference(first: Sequence[SaidMessage], second: Sequence[SaidMessage]) -> Divergence | None:
    """Return the first point where a trajectory differs from another one.

    Args:
        first: Messages of the one it is compared with.
        second: Its own messages.

    Returns:
        The point; None if both say the same.
    """
    for one, other in zip_longest(first, second):
        if other is None:
            return Divergence(one.turn, "", 0, "", "", one.text)
        if one is None:
            return Divergence(other.turn, other.role, 0, "", other.text, "")
        if (one.role, one.text) != (other.role, other.text):
            at = common_length(one.text, other.text) if one.role == other.role else 0
            before = other.text[max(0, at - BEFORE_CHARS) : at]
            return Divergence(other.turn, other.role, at, before, other.text[at:], one.text[at:])
    return None


def common_length(first: str, second: str) -> int:
    """Return the number of characters with which two texts begin in common.

    Args:
        first: A text.
        second: Another text.
    """
    if first == second:
        return len(first)
    low, high = 0, min(len(first), len(second))
    while low < high:  # comparing slices is much faster than comparing characters
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
