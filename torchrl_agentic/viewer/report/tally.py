"""Add up trajectories one by one, in memory that does not grow with their number."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from torchrl_agentic.messages import Status
from torchrl_agentic.records import BadLine, Dump, Groups, TrajectoryRecord
from torchrl_agentic.records.call_stats import Distribution, ToolSummary, add_calls, most_called
from torchrl_agentic.tokens.ledger import SAMPLED
from torchrl_agentic.viewer.report.statistics import (
    Moments,
    Report,
    ScoredTrajectory,
    StepReport,
    Times,
    ToolReport,
    is_measurable,
)

MOST_TOOLS = 30
MOST_REASONS = 12
MOST_RANKED = 5
"""Number of the worst and of the best trajectories."""
OTHERS = "(others)"
"""Name under which all rarer names are counted: a model can invent any number of them."""
_MOST_COMPLAINTS = 5
_LONGEST_REASON = 40


_MOMENTS = tuple(one.name for one in fields(StepReport) if one.type == "Average")


@dataclass(slots=True)
class StepTally:
    """Running totals of the trajectories of one step; see `StepReport` for the names.

    Attributes:
        counts: Numbers of trajectories: "trajectories", "unfinished", "unscored" and "not_finite".
        moments: The averaged numbers, by name.
        statuses: Number of calls by status.
        reasons: Number of trajectories by the reason of their end.
        run: Run times of all calls.
        queue: Queue times of all calls.
    """

    counts: Counter[str] = field(default_factory=Counter[str])
    moments: dict[str, Moments] = field(default_factory=lambda: {name: Moments() for name in _MOMENTS})
    statuses: Counter[str] = field(default_factory=Counter[str])
    reasons: Counter[str] = field(default_factory=Counter[str])
    run: Distribution = field(default_factory=Distribution)
    queue: Distribution = field(default_factory=Distribution)

    def add(self, record: TrajectoryRecord, version: int | None = None) -> None:
        """Add a trajectory.

        Args:
            record: The trajectory.
            version: Policy version when its batch left; None if unknown.
        """
        self.counts["trajectories"] += 1
        origin, moments = record.origin, self.moments
        if origin.seconds is not None and is_measurable(origin.seconds):
            moments["seconds"].add(origin.seconds)
        if origin.policy_versions:
            moments["policy_version"].add(origin.policy_versions[-1])
            if version is not None:
                moments["age"].add(version - origin.policy_versions[0])
        self.reasons[record.termination_reason[:_LONGEST_REASON] or "unknown"] += 1
        self._add_score(record)
        if any(turn.message.role == "output" for turn in record.turns):
            return  # a dump of texts without turns
        moments["turns"].add(len(record.turns))
        moments["calls"].add(sum(len(turn.outcome.calls) for turn in record.turns))
        self._add_calls(record)
        if record.tokens is not None:
            sampled = record.tokens.ledger.sources.count(SAMPLED)
            moments["sampled"].add(sampled)
            moments["injected"].add(len(record.tokens.ledger) - sampled)

    def _add_score(self, record: TrajectoryRecord) -> None:
        if not record.is_finished:
            self.counts["unfinished"] += 1
            return
        if record.score is None:
            self.counts["unscored"] += 1
        elif not is_measurable(record.score):
            self.counts["not_finite"] += 1
        else:
            self.moments["score"].add(record.score)
            self.moments["positive"].add(record.score > 0)
        right = record.extras.get("acc")
        if isinstance(right, int | float) and 0 <= right <= 1:
            self.moments["right"].add(right)

    def _add_calls(self, record: TrajectoryRecord) -> None:
        for turn in record.turns:
            for result in turn.outcome.results:
                status = result.status or Status.OK
                self.statuses[str(status)] += 1
                self.moments["infra"].add(status is Status.INFRA)
                if status is not Status.INFRA:
                    self.moments["errors"].add(status is not Status.OK)
                if result.timing is not None:
                    self.run.add(result.timing.run_s)
                    self.queue.add(result.timing.queue_s)

    def merge(self, other: StepTally) -> None:
        """Add all trajectories of another tally."""
        self.counts.update(other.counts)
        self.statuses.update(other.statuses)
        self.reasons.update(other.reasons)
        for name, moments in other.moments.items():
            self.moments[name].merge(moments)
        self.run.merge(other.run)
        self.queue.merge(other.queue)

    def report(self, first: int, last: int) -> StepReport:
        """Return the statistics.

        Args:
            first: First step.
            last: Last step.
        """
        return StepReport(
            first=first,
            last=last,
            trajectories=self.counts["trajectories"],
            unfinished=self.counts["unfinished"],
            unscored=self.counts["unscored"],
            not_finite=self.counts["not_finite"],
            statuses=_most_common(self.statuses),
            run=times(self.run),
            queue=times(self.queue),
            reasons=_most_common(self.reasons),
            **{name: moments.average() for name, moments in self.moments.items()},
        )


def rows_of(*tallies: Tally, most: int = 24) -> int:
    """Return how many steps (1, 2, 5, 10, …) a row must cover so that reports have at most `most` rows.

    Args:
        tallies: Tallies of the runs.
        most: Largest number of rows.
    """
    steps = {step for tally in tallies for step in tally.steps}
    sizes = (size * 10**power for power in itertools.count() for size in (1, 2, 5))
    return next(by for by in sizes if len({step // by for step in steps}) <= most)


class Tally:
    """Running totals of a run, by step and by tool. Tallies of parts can be merged.

    Attributes:
        steps: Totals by step.
        tools: Totals by tool.
        runs: Number of trajectories by id of the run.
        unused: Number of trajectories of collectors that left in no batch, and are not counted.
        broken: Number of lines that cannot be read.
    """

    def __init__(self) -> None:
        self.steps: dict[int, StepTally] = {}
        self.tools: dict[str, ToolSummary] = {}
        self.runs: Counter[str] = Counter()
        self.unused = self.broken = 0
        self._complaints: list[str] = []
        self._worst: list[ScoredTrajectory] = []
        self._best: list[ScoredTrajectory] = []

    def add(self, record: TrajectoryRecord, step: int | None = None, version: int | None = None) -> None:
        """Add a trajectory.

        Args:
            record: The trajectory.
            step: Its step, in place of the one that the record names.
            version: Policy version when its batch left; None if unknown.
        """
        step = record.step if step is None else step
        self.steps.setdefault(step, StepTally()).add(record, version)
        if record.is_finished and record.score is not None and is_measurable(record.score):
            self._rank(record, record.score, step)
        if record.run:
            self.runs[record.run] += 1
        for turn in record.turns:
            add_calls(self.tools, turn.outcome)

    def _rank(self, record: TrajectoryRecord, score: float, step: int) -> None:
        """Keep a trajectory if it is among the worst or the best."""
        if len(self._worst) >= MOST_RANKED and self._worst[-1].score < score < self._best[-1].score:
            return
        one = ScoredTrajectory(score, step, record.request_id, record.question, record.run)
        self._keep([*self._worst, one], [*self._best, one])

    def _keep(self, worst: list[ScoredTrajectory], best: list[ScoredTrajectory]) -> None:
        """Keep the worst and the best, of equal ones the first steps, in whatever order parts are merged."""
        self._worst = sorted(worst, key=lambda one: (one.score, *_place(one)))[:MOST_RANKED]
        self._best = sorted(best, key=lambda one: (-one.score, *_place(one)))[:MOST_RANKED]

    def complain(self, complaint: str) -> None:
        """Count a line that cannot be read, with its reason."""
        self.broken += 1
        self._complaints = [*self._complaints, complaint][:_MOST_COMPLAINTS]

    def merge(self, other: Tally) -> None:
        """Add all trajectories of another tally."""
        for step, tally in other.steps.items():
            self.steps.setdefault(step, StepTally()).merge(tally)
        for name, summary in other.tools.items():
            self.tools.setdefault(name, ToolSummary(name)).merge(summary)
        self.runs.update(other.runs)
        self._keep([*self._worst, *other._worst], [*self._best, *other._best])
        self.unused += other.unused
        self.broken += other.broken
        self._complaints = [*self._complaints, *other._complaints][:_MOST_COMPLAINTS]

    def report(self, name: str = "", *, by: int = 1) -> Report:
        """Return the statistics.

        Args:
            name: Name of the report.
            by: Number of steps that a row covers.
        """
        merged: dict[int, StepTally] = {}
        steps: dict[int, list[int]] = {}
        total = StepTally()
        for step in sorted(self.steps):
            merged.setdefault(step // by, StepTally()).merge(self.steps[step])
            steps.setdefault(step // by, []).append(step)
            total.merge(self.steps[step])
        ends = (min(self.steps), max(self.steps)) if self.steps else (0, 0)
        is_flat = not self._best or self._best[0].score == self._worst[0].score
        return Report(
            name,
            by,
            total.report(*ends),
            tuple(tally.report(steps[key][0], steps[key][-1]) for key, tally in merged.items()),
            tool_reports(self.tools.values()),
            self.broken,
            tuple(self._complaints),
            dict(self.runs.most_common()),
            () if is_flat else tuple(self._worst),
            () if is_flat else tuple(self._best),
            self.unused,
        )


def _place(one: ScoredTrajectory) -> tuple[int, str, str, str]:
    return one.step, one.run, one.request_id, one.question


def tool_reports(tools: Iterable[ToolSummary]) -> tuple[ToolReport, ...]:
    """Return the statistics of each tool, largest number of calls first."""
    ordered = most_called(tools)
    if len(ordered) > MOST_TOOLS:
        others = ToolSummary(OTHERS)
        for summary in ordered[MOST_TOOLS:]:
            others.merge(summary)
        ordered = [*ordered[:MOST_TOOLS], others]
    return tuple(
        ToolReport(
            tool=one.tool,
            calls=one.calls,
            errors=one.errors,
            infra=one.infra,
            statuses={str(status): count for status, count in one.statuses.most_common()},
            run=times(one.run_s),
            queue=times(one.queue_s),
        )
        for one in ordered
    )


def times(seconds: Distribution) -> Times:
    """Return the quantiles that reports show."""
    p50, p95, p99 = (seconds.quantile(q) for q in (0.5, 0.95, 0.99))
    return Times(len(seconds), p50, p95, p99, seconds.is_exact)


def _most_common(counts: Counter[str]) -> dict[str, int]:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    found = dict(ordered[:MOST_REASONS])
    if rest := sum(count for _, count in ordered[MOST_REASONS:]):
        found[OTHERS] = rest
    return found


def read_tally(
    path: str | Path, watch: Callable[[int, int], object] | None = None, *, run: str | None = None
) -> Tally:
    """Add up a dump.

    A trajectory belongs to the step of the batch in which it left, and is left out if it left in none, though
    others of its run did. Without batches, it belongs to the step in which it began, or in the name of its
    file.

    Args:
        path: A folder with a file per step, or one file.
        run: Beginning of the id of the only run to add up; None for all.
        watch: Function that is called with the number of bytes read, and of all bytes.

    Raises:
        OSError: If the folder or file does not exist or cannot be read.
        ValueError: If the folder has no .jsonl or .jsonl.zst files, nothing in it can be read, or there is no
            such run.
        MissingExtra: If a file is compressed and zstandard is not installed.
    """
    tally, others = Tally(), Counter[str]()
    groups = Groups(path)
    groups.refresh()
    with Dump(path) as dump:
        sizes = [file.path.stat().st_size for file in dump.files]
        for number, file in enumerate(dump.files):
            if watch is not None:
                watch(sum(sizes[:number]), sum(sizes))
            for record in file.records():
                if isinstance(record, BadLine):
                    tally.complain(f"{file.path.name}, line {record.number}: {record.reason}")
                elif run is not None and not record.run.startswith(run):
                    others[record.run] += 1
                else:
                    group, _ = groups.place(record.run, record.trajectory) or (None, None)
                    if group is None and record.run in groups.runs:
                        tally.unused += 1
                    elif group is None:
                        tally.add(record, record.step or file.step or 0)
                    else:
                        tally.add(record, group.step, group.policy_version)
            file.close()
    if run is not None and not tally.steps:
        known = ", ".join(name or "(no id)" for name, _ in others.most_common(_MOST_COMPLAINTS))
        raise ValueError(f"{path} has no trajectory of a run {run!r}; it has those of {known or 'no run'}")
    if tally.broken and not tally.steps:
        raise ValueError(f"{path} is not a dump of trajectories: {tally.report().complaints[0]}")
    return tally


def read_report(path: str | Path, *, by: int = 1) -> Report:
    """Return the statistics of a dump. Raises the errors of `read_tally`.

    Args:
        path: A folder with a file per step, or one file.
        by: Number of steps that a row covers.
    """
    return read_tally(path).report(str(path), by=by)
