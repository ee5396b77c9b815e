"""Queries over trajectories, such as `status:timeout score<0.5`, and the rows and steps that they select."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import pydantic_core

from torchrl_agentic.messages import JSON, Status, fields_of
from torchrl_agentic.records import BadLine, DumpFile, Groups, Summary, TrajectoryRecord
from torchrl_agentic.text import nearest

LARGE = 2 << 20
"""Size from which a trajectory is only read completely when the user asks for it, in bytes."""
BEGINNING = 1 << 16


class Gone(Exception):
    """A trajectory has been removed or replaced; the message says why."""


@dataclass(eq=False, slots=True)
class Step:
    """A file of a dump.

    Attributes:
        file: The file.
        groups: The groups of the dump, with the batch in which each was yielded.
        place: Position among all steps.
        rows: The rows read so far; a new list when the file begins again.
        trouble: Why the file cannot be read; empty if it can.
        beginnings: Value of `DumpFile.beginnings` that the rows belong to.
        is_due: Whether there may be more to read.
    """

    file: DumpFile
    groups: Groups
    place: int = 0
    rows: list[Row] = field(default_factory=list["Row"])
    trouble: str = ""
    beginnings: int = 0
    is_due: bool = True

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.file.name

    @property
    def label(self) -> str:
        """The step, as "step 3", or the name of the file."""
        return self.name if self.file.step is None else f"step {self.file.step}"

    @property
    def progress(self) -> float:
        """Part of the file that has been read, from 0 to 1."""
        known = len(self.rows) / len(self.file) if len(self.file) else 1.0
        return 1.0 if self.trouble else self.file.scanned * known


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """A trajectory in a list.

    Attributes:
        step: Its step.
        index: Its number in the file.
        size: Its size in bytes.
        written: The fields shown in lists, as they are in the file.
        beginnings: Value of `DumpFile.beginnings` when it was read.
        score: Its score; None if it is unknown or NaN.
    """

    step: Step
    index: int
    size: int
    written: Summary | BadLine
    beginnings: int
    score: float | None

    @property
    def summary(self) -> Summary | BadLine:
        """The fields shown in lists, with the step and the advantage from its batch, if it was in one."""
        written = self.written
        return written if isinstance(written, BadLine) else self.step.groups.located(written)

    def line(self, limit: int | None = None) -> bytes:
        """Read the bytes of the trajectory, or the first `limit` of them.

        Raises:
            Gone: If the trajectory has been removed.
        """
        self._check()
        try:
            return self.step.file.line(self.index, limit)
        except OSError as error:
            raise Gone(f"the file can no longer be read: {error.strerror}") from None

    def record(self) -> TrajectoryRecord | BadLine:
        """Read the trajectory.

        Raises:
            Gone: If the trajectory has been removed.
        """
        self._check()
        try:
            return self.step.file.record(self.index)
        except OSError as error:
            raise Gone(f"the file can no longer be read: {error.strerror}") from None

    def _check(self) -> None:
        file = self.step.file
        if self.index >= len(file) and self.step.trouble:
            raise Gone(self.step.trouble)
        if file.beginnings != self.beginnings or self.index >= len(file):
            raise Gone(f"{file.path.name} was rewritten or cut since it was listed")

    def beginning(self) -> Mapping[str, JSON]:
        """Read the first fields of the trajectory; the last one is cut off.

        Raises:
            Gone: If the trajectory has been removed.
        """
        head = self.line(BEGINNING)
        try:
            found: JSON = pydantic_core.from_json(head, allow_partial="trailing-strings")
        except ValueError:
            found = None
        return fields_of(found) or {"line": head.decode("utf-8", "surrogateescape")}


def read_up(step: Step, budget: int, most: int) -> None:
    """Read more bytes of a file, and the summaries of new trajectories.

    Args:
        step: The file.
        budget: Largest number of bytes to scan.
        most: Largest number of summaries to read.

    Raises:
        OSError: If the file is gone or cannot be read.
        MissingExtra: If the file is compressed and zstandard is not installed.
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
    """Return the name of a trajectory, or the reason why it cannot be read."""
    summary = row.summary
    if isinstance(summary, BadLine):
        return f"line {summary.number}: {summary.reason}"
    return summary.trajectory or summary.request_id or json.dumps(row.index)


NUMBERS: dict[str, Callable[[Summary], float | None]] = {
    "score": lambda summary: None if summary.score is None or math.isnan(summary.score) else summary.score,
    "turns": lambda summary: summary.n_turns,
    "calls": lambda summary: summary.n_calls,
    "errors": lambda summary: summary.n_errors,
    "redactions": lambda summary: summary.redactions,
    "step": lambda summary: summary.step,
    "advantage": lambda summary: summary.advantage,
}
TEXTS: dict[str, Callable[[Summary, str], bool]] = {
    "status": lambda summary, value: value in summary.statuses,
    "tool": lambda summary, value: value in summary.tools,
    "reason": lambda summary, value: (summary.termination_reason or "none") == value,
    "group": lambda summary, value: summary.group.startswith(value) or str(summary.origin.group) == value,
    "run": lambda summary, value: (summary.run or "none").startswith(value),
    "task": lambda summary, value: value in (summary.origin.task, str(summary.extras.get("task"))),
    "id": lambda summary, value: is_id(summary.request_id, value),
    "name": lambda summary, value: value.lower() in summary.trajectory.lower(),
}
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ":": operator.eq,
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TOKEN = re.compile(r'(?:"[^"]*"|[^\s"])+')
_FIELD = re.compile(r"(-?)([A-Za-z_][\w.-]*?)(<=|>=|!=|[<>=:])(.*)", re.DOTALL)


class QueryError(ValueError):
    """A query that cannot be parsed; the message says what would be valid."""


@dataclass(frozen=True, slots=True)
class Term:
    """One condition of a query.

    Attributes:
        field: Name of a field.
        comparison: Operator, one of `COMPARISONS`.
        values: Accepted values.
        is_wanted: False after a minus sign.
    """

    field: str
    comparison: str
    values: tuple[str, ...]
    is_wanted: bool = True

    def holds(self, summary: Summary) -> bool:
        """Return whether a trajectory fulfils the condition."""
        return any(self._is(summary, value) for value in self.values) is self.is_wanted

    def _is(self, summary: Summary, value: str) -> bool:
        if self.field in TEXTS:
            return TEXTS[self.field](summary, value) is (self.comparison != "!=")
        if self.field in NUMBERS:
            return _compare(NUMBERS[self.field](summary), self.comparison, value)
        return _compare(summary.extras.get(self.field), self.comparison, value)


def _compare(found: JSON, comparison: str, value: str) -> bool:
    if found is None or value == "none":
        return (found is None and value == "none") is (comparison != "!=") and comparison in (":", "=", "!=")
    number = _number(value)
    if isinstance(found, int | float) and not isinstance(found, bool) and number is not None:
        return COMPARISONS[comparison](float(found), number)
    said = found if isinstance(found, str) else json.dumps(found)
    return comparison in (":", "=", "!=") and (said == value) is (comparison != "!=")


@dataclass(frozen=True, slots=True)
class Query:
    """A parsed query.

    Attributes:
        terms: Conditions on fields.
        words: Searched words; False for words that must not occur.
    """

    terms: tuple[Term, ...] = ()
    words: tuple[tuple[str, bool], ...] = ()

    @property
    def names_step(self) -> bool:
        """True if a condition is about the step, so that the query applies to all steps."""
        return any(term.field == "step" for term in self.terms)

    def holds(self, summary: Summary) -> bool:
        """Return whether a trajectory fulfils all terms. Words are checked by `Listing`."""
        return all(term.holds(summary) for term in self.terms)


def parse(text: str, extras: Collection[str] = ()) -> Query:
    """Parse a query.

    Args:
        text: The query, as the user typed it.
        extras: Names of extra fields, beside the fields that all trajectories have.

    Raises:
        QueryError: If the query cannot be parsed.
    """
    if text.count('"') % 2:
        raise QueryError('a " is missing: quotes come in pairs')
    terms: list[Term] = []
    words: list[tuple[str, bool]] = []
    for token in _TOKEN.findall(text):
        field = None if token.startswith(('"', '-"')) else _FIELD.fullmatch(token)
        if field is not None:
            terms.append(_term(token, *field.groups(), extras=extras))
            continue
        word = token.removeprefix("-").replace('"', "")
        if not word:
            raise QueryError(f"{token}: a word must follow the minus sign")
        words.append((word, not token.startswith("-")))
    return Query(tuple(terms), tuple(words))


def _term(token: str, minus: str, name: str, comparison: str, value: str, *, extras: Collection[str]) -> Term:
    known = {*NUMBERS, *TEXTS, *extras}
    if name not in known:
        near = nearest(name, sorted(known))
        hint = f"did you mean {near}?" if near else f"fields: {', '.join(sorted(known))}."
        raise QueryError(f'no field {name}; {hint} To search text, quote it: "{token}"')
    if name in TEXTS and comparison in ("<", "<=", ">", ">="):
        raise QueryError(f"{name} is not a number: write {name}:{value or 'value'}")
    values = tuple(part for part in value.replace('"', "").split(",") if part)
    if not values:
        raise QueryError(f"{token}: a value is missing, as in {name}{comparison}{_example(name)}")
    if name == "status" and (wrong := [part for part in values if part not in set(Status)]):
        raise QueryError(f"no status {wrong[0]}; expected one of {', '.join(Status)}")
    if name in NUMBERS and (wrong := [part for part in values if part != "none" and _number(part) is None]):
        raise QueryError(f"{token}: {wrong[0]} is not a number")
    return Term(name, comparison, values, not minus)


def _example(name: str) -> str:
    return {"status": "timeout", "tool": "python", "reason": "max_turns"}.get(name, "1")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def is_id(request_id: str, wanted: str) -> bool:
    """Return whether a request id has a prefix, regardless of hyphens and case.

    Args:
        request_id: The id.
        wanted: The text.
    """
    return request_id.replace("-", "").lower().startswith(wanted.replace("-", "").strip().lower())
