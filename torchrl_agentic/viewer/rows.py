"""What a viewer lists: the trajectories of the files of a dump, as far as they are known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pydantic_core

from torchrl_agentic.messages import JSON, fields_of
from torchrl_agentic.records import BadLine, DumpFile, Summary, TrajectoryRecord

LARGE = 2 << 20
"""Bytes from which a trajectory is read whole only when somebody asks for it: that takes a moment."""
BEGINNING = 1 << 16


class Gone(Exception):
    """A trajectory is not where it was; the message says why."""


@dataclass(eq=False, slots=True)
class Step:
    """A file of a dump. rows: those known so far, in a new list when the file begins anew.

    trouble: why no more can be read; "" if it can. is_due: whether there may be more to read.
    """

    file: DumpFile
    place: int = 0
    rows: list[Row] = field(default_factory=list["Row"])
    trouble: str = ""
    beginnings: int = 0
    is_due: bool = True

    @property
    def name(self) -> str:
        """What the file is called."""
        return self.file.name

    @property
    def label(self) -> str:
        """What is said of it: its step, if its name is one."""
        return self.name if self.file.step is None else f"step {self.file.step}"

    @property
    def progress(self) -> float:
        """How much of the file is known, from 0 to 1."""
        known = len(self.rows) / len(self.file) if len(self.file) else 1.0
        return 1.0 if self.trouble else self.file.scanned * known


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """A trajectory in a list: where it stands, and what lists show of it. score: None if it is NaN, too."""

    step: Step
    index: int
    size: int
    summary: Summary | BadLine
    beginnings: int
    score: float | None

    def line(self, limit: int | None = None) -> bytes:
        """Read its bytes, or the first ones.

        Raises:
            Gone: they are not there any more.
        """
        self._check()
        try:
            return self.step.file.line(self.index, limit)
        except OSError as error:
            raise Gone(f"it cannot be read any more: {error.strerror}") from None

    def record(self) -> TrajectoryRecord | BadLine:
        """Read it.

        Raises:
            Gone: it is not there any more.
        """
        self._check()
        try:
            return self.step.file.record(self.index)
        except OSError as error:
            raise Gone(f"it cannot be read any more: {error.strerror}") from None

    def _check(self) -> None:
        file = self.step.file
        if self.index >= len(file) and self.step.trouble:
            raise Gone(self.step.trouble)
        if file.beginnings != self.beginnings or self.index >= len(file):
            raise Gone(f"{file.path.name} was written anew, or cut, since it was listed")

    def beginning(self) -> Mapping[str, JSON]:
        """Read its first fields, the last of them cut off.

        Raises:
            Gone: it is not there any more.
        """
        head = self.line(BEGINNING)
        try:
            found: JSON = pydantic_core.from_json(head, allow_partial="trailing-strings")
        except ValueError:
            found = None
        return fields_of(found) or {"line": head.decode("utf-8", "surrogateescape")}


def read_up(step: Step, budget: int, most: int) -> None:
    """Read up to so many more bytes of a file, and up to so many summaries of what is new.

    Raises:
        OSError: the file is gone, or cannot be read.
        MissingExtra: it is compressed, and zstandard is not installed.
    """
    file = step.file
    if len(step.rows) >= len(file):
        step.is_due = file.scan(budget)
    if file.beginnings != step.beginnings:
        step.beginnings, step.rows = file.beginnings, []
    rows = step.rows
    if rows and len(rows) <= len(file) and rows[-1].size != file.size(len(rows) - 1):
        rows.pop()  # the last line has grown
    for index in range(len(rows), min(len(rows) + most, len(file))):
        summary = file.summary(index)
        score = None if isinstance(summary, BadLine) else summary.score
        known = None if score is None or math.isnan(score) else score
        rows.append(Row(step, index, file.size(index), summary, file.beginnings, known))
    step.is_due = step.is_due or len(rows) < len(file)


def label(row: Row) -> str:
    """Name a trajectory."""
    summary = row.summary
    if isinstance(summary, BadLine):
        return f"line {summary.number}: {summary.reason}"
    return summary.trajectory or summary.request_id or json.dumps(row.index)
