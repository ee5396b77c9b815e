"""`Curve`: a quantity of a training run over its steps, from its trajectories or from the trainer's log."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from torchrl_agentic.viewer.report.statistics import Average, Moments, Report, StepReport
from torchrl_agentic.viewer.samples import SampleGroup

MOST_POINTS = 1000
"""Largest number of points of a curve; of more, every second, third, … is shown."""
MOST_METRICS = 60
"""Largest number of curves of a trainer's log."""
MOST_BYTES = 64 << 20
"""Number of bytes that are read from the beginning of a file of metrics."""
STEP_COLUMNS = ("step", "global_step", "_step", "iteration", "iter", "update", "epoch")
METRICS = "metrics.csv"

Unit = Literal["", "share", "seconds"]


class Point(NamedTuple):
    """A value at a step.

    Attributes:
        step: The step.
        value: The value, such as a mean.
        spread: Standard deviation of the averaged numbers; None if unknown.
        n_values: How many numbers were averaged; 0 if unknown.
    """

    step: int
    value: float
    spread: float | None = None
    n_values: int = 0


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity over the steps.

    Attributes:
        name: Name of the quantity.
        points: The known values, by ascending step.
        unit: How values are written.
    """

    name: str
    points: tuple[Point, ...]
    unit: Unit = ""


_MEASURES: Sequence[tuple[str, Unit, Callable[[StepReport], Average]]] = (
    ("Score", "", lambda step: step.score),
    ("Share of scores above 0", "share", lambda step: step.positive),
    ("Share of right answers", "share", lambda step: step.right),
    ("Turns per trajectory", "", lambda step: step.turns),
    ("Calls per trajectory", "", lambda step: step.calls),
    ("Share of failed calls", "share", lambda step: step.errors),
    ("Sampled tokens per trajectory", "", lambda step: step.sampled),
    ("Injected tokens per trajectory", "", lambda step: step.injected),
    ("Seconds per trajectory", "seconds", lambda step: step.seconds),
    ("Policy version", "", lambda step: step.policy_version),
    ("Age of the oldest token, in updates", "", lambda step: step.age),
)


def curves(report: Report) -> list[Curve]:
    """Return the curves of a run; those without a known value are left out.

    Args:
        report: The report of its trajectories, by steps.
    """
    found: list[Curve] = []
    for name, unit, measure in _MEASURES:
        points = tuple(_points(report.steps, measure, with_spread=unit != "share"))
        if points:
            found.append(Curve(name, points, unit))
    return found


def _points(
    steps: Iterable[StepReport], measure: Callable[[StepReport], Average], *, with_spread: bool
) -> Iterator[Point]:
    for step in steps:
        average = measure(step)
        if average.mean is not None:
            spread = average.spread if with_spread else None
            yield Point(step.first, average.mean, spread, average.count)


def group_curves(groups: Iterable[SampleGroup]) -> list[Curve]:
    """Return the curves of the groups of a run: how much their samples differ.

    Args:
        groups: The groups; those of a single sample are left out.
    """
    steps: dict[int, tuple[Moments, Moments]] = {}
    groups = list(groups)
    is_recorded = any(group.is_recorded for group in groups)
    for group in groups:
        is_whole = group.is_recorded or not is_recorded  # others have not left in a batch
        if is_whole and len(group.numbers) > 1 and group.spread is not None:
            spread, flat = steps.setdefault(group.step, (Moments(), Moments()))
            spread.add(group.spread)
            flat.add(group.is_flat)
    found: list[tuple[str, Unit]] = [
        ("Spread of scores within a group", ""),
        ("Share of groups with equal scores", "share"),
    ]
    return [
        Curve(
            name,
            thinned(
                [
                    Point(step, average.mean, None, average.count)
                    for step in sorted(steps)
                    if (average := steps[step][place].average()).mean is not None
                ]
            ),
            unit,
        )
        for place, (name, unit) in enumerate(found)
        if steps
    ]


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> tuple[Point, ...]:
    """Return at most about `most` points: every n-th, and the last.

    Args:
        points: The points.
        most: Largest number of points, without the last.
    """
    every = max(1, math.ceil(len(points) / most))
    found = list(points[::every])
    if found and found[-1] is not points[-1]:
        found.append(points[-1])
    return tuple(found)


def read_metrics(folder: Path) -> list[Curve]:
    """Read the scalars that a trainer wrote into a folder.

    Two forms are known: "metrics.csv", a table with a header and a column of steps, and the folders of
    TorchRL's CSVLogger, "scalars/NAME.csv" or "EXPERIMENT/scalars/NAME.csv" with lines of step and value.

    Args:
        folder: The folder.

    Returns:
        A curve for each scalar, at most `MOST_METRICS`; lines that are not numbers are skipped.
    """
    found: dict[str, dict[int, float]] = {}
    table = folder / METRICS
    if table.is_file():
        for name, step, value in _table(table):
            found.setdefault(name, {})[step] = value
    roots = [folder / "scalars", *(one / "scalars" for one in _folders(folder))]
    experiments = [root for root in roots if root.is_dir()]
    for root in experiments:
        for path in sorted(root.rglob("*.csv"))[:MOST_METRICS]:
            name = path.relative_to(root).as_posix().removesuffix(".csv")
            if len(experiments) > 1 and root.parent != folder:
                name = f"{root.parent.name}: {name}"
            for step, value in _scalars(path):
                found.setdefault(name, {})[step] = value
    return [
        Curve(name, thinned([Point(step, values[step]) for step in sorted(values)]))
        for name, values in list(found.items())[:MOST_METRICS]
        if values
    ]


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(one for one in folder.iterdir() if one.is_dir())
    except OSError:
        return []


def _rows(path: Path) -> Iterator[list[str]]:
    """Yield the rows of a file of comma-separated values, as far as it can be read."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES).decode("utf-8-sig", "replace")
        yield from csv.reader(text.splitlines())
    except (OSError, csv.Error):
        return


def _table(path: Path) -> Iterator[tuple[str, int, float]]:
    rows = _rows(path)
    header = [name.strip() for name in next(rows, list[str]())]
    lower = [name.lower() for name in header]
    column = next((lower.index(name) for name in STEP_COLUMNS if name in lower), None)
    for number, row in enumerate(rows):
        step = number if column is None else _number(row[column] if column < len(row) else "")
        if step is None:
            continue
        for place, (name, text) in enumerate(zip(header, row, strict=False)):
            value = _number(text)
            if place != column and name and value is not None:
                yield name, int(step), value


def _scalars(path: Path) -> Iterator[tuple[int, float]]:
    for row in _rows(path):
        if len(row) != 2:
            continue
        step, value = _number(row[0]), _number(row[1])
        if step is not None and value is not None:
            yield int(step), value


def _number(text: str) -> float | None:
    """Return a finite number that fits a page, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) <= 1e100 else None
