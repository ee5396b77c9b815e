"""Compare two runs: what is better or worse in the second one, and by how much."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torchrl_agentic.messages import JSON
from torchrl_agentic.viewer.report.statistics import Average, Report, StepReport, Times, ToolReport

Kind = Literal["count", "number", "share", "seconds"]
Verdict = Literal["better", "worse", "same", ""]

STANDARD_ERRORS = 2
"""Number of standard errors from which a difference of means counts.

Trajectories count as independent, which is not quite true for those of one prompt.
"""
SLOWER, SLOWER_S, FEWEST_TIMES = 0.1, 0.001, 20
"""A difference of times counts if it exceeds a tenth and a millisecond, with this many calls in both runs."""


@dataclass(frozen=True, slots=True)
class Change:
    """A measure in two runs.

    Attributes:
        measure: Name of the measure.
        kind: Kind of the numbers.
        first: Value in the first run, or None if it is unknown.
        second: Value in the second run, or None if it is unknown.
        error: Standard error of the difference of means, or None.
        verdict: Verdict on the second run; "same" if the difference is within the noise, empty if neither is
            better or too little is known.
    """

    measure: str
    kind: Kind
    first: float | None
    second: float | None
    error: float | None = None
    verdict: Verdict = ""

    @property
    def difference(self) -> float | None:
        """The second value minus the first one, or None if one is unknown."""
        return None if self.first is None or self.second is None else self.second - self.first


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        first: Name of the first run.
        second: Name of the second run.
        total: Measures of all trajectories.
        steps: Measures by step, including steps that only one run has.
        tools: Measures by tool, including tools that only one run has.
    """

    first: str
    second: str
    total: tuple[Change, ...]
    steps: Mapping[str, tuple[Change, ...]]
    tools: Mapping[str, tuple[Change, ...]]

    @property
    def changes(self) -> Iterator[tuple[str, Change]]:
        """The measures of all trajectories, then those of each tool with its name."""
        yield from (("", change) for change in self.total)
        yield from ((tool, change) for tool, changes in self.tools.items() for change in changes)

    def to_json(self) -> dict[str, JSON]:
        """Return the comparison as plain data, with the differences."""

        def plain(changes: tuple[Change, ...]) -> list[JSON]:
            return [{**dataclasses.asdict(change), "difference": change.difference} for change in changes]

        return {
            "total": plain(self.total),
            "steps": {name: plain(changes) for name, changes in self.steps.items()},
            "tools": {name: plain(changes) for name, changes in self.tools.items()},
        }


def compare(first: Report, second: Report) -> Comparison:
    """Compare two runs.

    Args:
        first: Report of the first run.
        second: Report of the second run.

    Raises:
        ValueError: If their rows cover different numbers of steps.
    """
    if first.by != second.by:
        raise ValueError(
            f"rows of {first.by} steps cannot be compared with rows of {second.by}: pass the same `by`"
        )
    here, there = ({step.first // run.by: step for step in run.steps} for run in (first, second))
    tools = [{tool.tool: tool for tool in run.tools} for run in (first, second)]
    return Comparison(
        first.name,
        second.name,
        _step_changes(first.total, second.total),
        {
            _name(here.get(key), there.get(key)): _step_changes(here.get(key), there.get(key))
            for key in sorted(here.keys() | there.keys())
        },
        {name: _tool_changes(*(run.get(name) for run in tools)) for name in {**tools[0], **tools[1]}},
    )


def _name(*steps: StepReport | None) -> str:
    """Return the name of a row: the steps that it covers in either run."""
    known = [step for step in steps if step is not None]
    first, last = min(step.first for step in known), max(step.last for step in known)
    return str(first) if first == last else f"{first}–{last}"


_MEASURES: tuple[tuple[str, str, Kind, int], ...] = (
    ("score", "score", "number", 1),
    ("score > 0", "positive", "share", 1),
    ("right", "right", "share", 1),
    ("turns", "turns", "number", 0),
    ("calls", "calls", "number", 0),
    ("errors", "errors", "share", -1),
    ("infra", "infra", "share", -1),
    ("sampled", "sampled", "number", 0),
    ("injected", "injected", "number", 0),
)
"""Name, attribute of a `StepReport`, kind, and whether more of it is better (1), worse (-1) or neither."""


def _step_changes(first: StepReport | None, second: StepReport | None) -> tuple[Change, ...]:
    return tuple(
        _of_means(measure, kind, getattr(first, name, None), getattr(second, name, None), better)
        for measure, name, kind, better in _MEASURES
    )


def _of_means(measure: str, kind: Kind, first: Average | None, second: Average | None, better: int) -> Change:
    before, after = (None if one is None else one.mean for one in (first, second))
    errors = [None if one is None else one.error for one in (first, second)]
    error = None if None in errors else math.hypot(*(one or 0.0 for one in errors))
    verdict: Verdict = ""
    if before is not None and after is not None and better:
        if before == after or (error is not None and abs(after - before) <= STANDARD_ERRORS * error):
            verdict = "same"
        elif error is not None:
            verdict = "better" if (after - before) * better > 0 else "worse"
    return Change(measure, kind, before, after, error, verdict)


def _tool_changes(first: ToolReport | None, second: ToolReport | None) -> tuple[Change, ...]:
    calls = [None if one is None else one.calls for one in (first, second)]
    changes = [
        Change("calls", "count", calls[0], calls[1]),
        _of_means("errors", "share", _error_share(first), _error_share(second), -1),
    ]
    for measure, name, q in (
        ("run p50", "run", "p50"),
        ("run p95", "run", "p95"),
        ("queue p95", "queue", "p95"),
    ):
        changes.append(_of_times(measure, getattr(first, name, None), getattr(second, name, None), q))
    return tuple(changes)


def _error_share(tool: ToolReport | None) -> Average | None:
    """Return the share of errors among the calls whose status is not INFRA."""
    count = 0 if tool is None else tool.calls - tool.infra
    if tool is None or not count:
        return None
    share = tool.errors / count
    return Average(count, share, math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None)


def _of_times(measure: str, first: Times | None, second: Times | None, q: str) -> Change:
    before: float | None = getattr(first, q, None)
    after: float | None = getattr(second, q, None)
    verdict: Verdict = ""
    if first is None or second is None or before is None or after is None:
        return Change(measure, "seconds", before, after)
    if min(first.count, second.count) >= FEWEST_TIMES:
        smaller, larger = sorted((before, after))
        if larger - smaller <= max(SLOWER_S, SLOWER * smaller):
            verdict = "same"
        else:
            verdict = "better" if after < before else "worse"
    return Change(measure, "seconds", before, after, None, verdict)
