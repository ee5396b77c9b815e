"""`compare`: the difference of two evaluations of the same tasks, with its significance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from torchrl_agentic.evaluation.estimates import Difference, paired_difference
from torchrl_agentic.evaluation.eval_result import EvalResult, made_table, text_of
from torchrl_agentic.messages import JSON

if TYPE_CHECKING:
    from rich.table import Table

_MOST_NAMES = 10


@dataclass(frozen=True, slots=True)
class ScoreChange:
    """How the values of one scorer differ between two runs, over the tasks that both have.

    Attributes:
        first: Mean of the first run over these tasks.
        second: Mean of the second run.
        difference: Second less first, with its interval and p-value.
        better: Tasks with a higher mean in the second run.
        worse: Tasks with a lower mean in the second run.
    """

    first: float
    second: float
    difference: Difference
    better: Sequence[str]
    worse: Sequence[str]


@dataclass(frozen=True, slots=True)
class EvalComparison:
    """The difference of two evaluations.

    Attributes:
        first: Name of the first one.
        second: Name of the second one.
        changes: Change of each scorer that both have, by name.
        n_unmatched: Number of tasks that only one of them has, or that have another right answer.
    """

    first: str
    second: str
    changes: Mapping[str, ScoreChange]
    n_unmatched: int

    def table(self) -> Table:
        """Return the comparison as a table of rich."""
        rows: list[Sequence[str]] = []
        for name, change in self.changes.items():
            found = change.difference
            rows.append(
                (
                    name,
                    f"{change.first:.3f}",
                    f"{change.second:.3f}",
                    f"{found.value:+.3f}",
                    "–" if found.low is None else f"{found.low:+.3f} to {found.high:+.3f}",
                    f"{found.p_value:.3f}" if found.p_value >= 0.001 else "<0.001",
                    str(len(change.better)),
                    str(len(change.worse)),
                    str(found.n_tasks),
                )
            )
        names = "score", "first", "second", "difference", "95% interval", "p", "better", "worse", "tasks"
        return made_table(f"{self.second} compared with {self.first}, task by task", names, rows)

    @property
    def notes(self) -> Sequence[str]:
        """Lines below the table: which tasks differ, and how many could not be compared."""
        lines: list[str] = []
        for name, change in self.changes.items():
            for word, tasks in (("better", change.better), ("worse", change.worse)):
                if tasks:
                    more = f", … {len(tasks) - _MOST_NAMES} more" if len(tasks) > _MOST_NAMES else ""
                    lines.append(f"{name}, {word}: {', '.join(tasks[:_MOST_NAMES])}{more}")
        if self.n_unmatched:
            lines.append(f"{self.n_unmatched} tasks are in one of the two only, or differ, and are left out")
        if not self.changes:
            lines.append("the two share no task with a score of the same name")
        return lines

    def to_json(self) -> dict[str, JSON]:
        """Return the comparison as a JSON object."""
        changes: dict[str, JSON] = {}
        for name, change in self.changes.items():
            found = asdict(change)
            estimate = found.pop("difference")
            changes[name] = {**found, "difference": estimate.pop("value"), **estimate}
        return {
            "first": self.first,
            "second": self.second,
            "changes": changes,
            "n_unmatched": self.n_unmatched,
        }

    def __str__(self) -> str:
        return text_of(self.table(), self.notes)


def compare(first: EvalResult, second: EvalResult) -> EvalComparison:
    """Compare two evaluations of the same tasks, task by task.

    Pairs of the same task vary less than two independent samples of tasks, so that smaller differences are
    significant. Several scorers are several tests: expect one of 20 with p < 0.05 by chance.

    Args:
        first: The evaluation to compare with.
        second: The other one. Tasks are matched by their names; those with another right answer are left out.
    """
    answers = {sample.task: sample.expected for sample in second.samples}
    differing = {
        sample.task
        for sample in first.samples
        if sample.task in answers and answers[sample.task] != sample.expected
    }
    matched = ({*first.tasks} & {*second.tasks}) - differing
    changes: dict[str, ScoreChange] = {}
    for name in first.scorers:
        if name not in second.scorers:
            continue
        old = {task: some for task, some in first.values(name).items() if task in matched}
        new = second.values(name)
        difference = paired_difference(old, new)
        if difference is None:
            continue
        shared = [task for task in old if old[task] and new.get(task)]
        deltas = {task: fmean(new[task]) - fmean(old[task]) for task in shared}
        changes[name] = ScoreChange(
            fmean([fmean(old[task]) for task in shared]),
            fmean([fmean(new[task]) for task in shared]),
            difference,
            [task for task, delta in deltas.items() if delta > 0],
            [task for task, delta in deltas.items() if delta < 0],
        )
    names = (_called(first, second), _called(second, first))
    return EvalComparison(*names, changes, len({*first.tasks} | {*second.tasks}) - len(matched))


def _called(result: EvalResult, other: EvalResult) -> str:
    """Return the name of an evaluation, or its folder if both have the same name."""
    if result.name != other.name or result.out is None:
        return result.name
    return str(result.out)
