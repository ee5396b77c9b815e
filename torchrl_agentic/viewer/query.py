"""The query line, which says what is listed: `status:timeout tool:python score<0.5 reason:max_turns text`."""

from __future__ import annotations

import difflib
import json
import math
import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torchrl_agentic.messages import JSON, Status
from torchrl_agentic.records import Summary

NUMBERS: dict[str, Callable[[Summary], float | None]] = {
    "score": lambda summary: None if summary.score is None or math.isnan(summary.score) else summary.score,
    "turns": lambda summary: summary.n_turns,
    "calls": lambda summary: summary.n_calls,
    "errors": lambda summary: summary.n_errors,
    "step": lambda summary: summary.step,
}
TEXTS: dict[str, Callable[[Summary, str], bool]] = {
    "status": lambda summary, value: value in summary.statuses,
    "tool": lambda summary, value: value in summary.tools,
    "reason": lambda summary, value: (summary.termination_reason or "none") == value,
    "group": lambda summary, value: summary.group.startswith(value),
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
    """A query that cannot be understood; the message says why, and what would be."""


@dataclass(frozen=True, slots=True)
class Term:
    """One condition: a field, a comparison, and what it may be; `is_wanted` is False behind a minus sign."""

    field: str
    comparison: str
    values: tuple[str, ...]
    is_wanted: bool = True

    def holds(self, summary: Summary) -> bool:
        """Whether a trajectory fulfils it."""
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
    """What is asked for. words: with False those that are not to be there."""

    terms: tuple[Term, ...] = ()
    words: tuple[tuple[str, bool], ...] = ()

    def holds(self, summary: Summary) -> bool:
        """Whether a trajectory fulfils all terms; its words are another matter."""
        return all(term.holds(summary) for term in self.terms)


def parse(text: str, extras: Collection[str] = ()) -> Query:
    """Read a query. extras: what else is noted of trajectories, beside the fields that all have.

    Raises:
        QueryError: it cannot be understood.
    """
    if text.count('"') % 2:
        raise QueryError('a " is opened and not closed')
    terms: list[Term] = []
    words: list[tuple[str, bool]] = []
    for token in _TOKEN.findall(text):
        field = None if token.startswith(('"', '-"')) else _FIELD.fullmatch(token)
        if field is not None:
            terms.append(_term(token, *field.groups(), extras=extras))
            continue
        word = token.removeprefix("-").replace('"', "")
        if not word:
            raise QueryError(f"{token}: what is not to be there?")
        words.append((word, not token.startswith("-")))
    return Query(tuple(terms), tuple(words))


def _term(token: str, minus: str, name: str, comparison: str, value: str, *, extras: Collection[str]) -> Term:
    known = {*NUMBERS, *TEXTS, *extras}
    if name not in known:
        near = difflib.get_close_matches(name, sorted(known), 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
        raise QueryError(f'no field {name}; {hint} Text is looked for in quotes: "{token}"')
    if name in TEXTS and comparison in ("<", "<=", ">", ">="):
        raise QueryError(f"{name} is no number: write {name}:{value or 'value'}")
    values = tuple(part for part in value.replace('"', "").split(",") if part)
    if not values:
        raise QueryError(f"{token}: what should it be? For example {name}{comparison}{_example(name)}")
    if name == "status" and (wrong := [part for part in values if part not in set(Status)]):
        raise QueryError(f"no status {wrong[0]}; there are {', '.join(Status)}")
    if name in NUMBERS and (wrong := [part for part in values if part != "none" and _number(part) is None]):
        raise QueryError(f"{token}: {wrong[0]} is no number")
    return Term(name, comparison, values, not minus)


def _example(name: str) -> str:
    return {"status": "timeout", "tool": "python", "reason": "max_turns"}.get(name, "1")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def is_id(request_id: str, wanted: str) -> bool:
    """Whether an id begins as wanted, hyphens and case left aside."""
    return request_id.replace("-", "").lower().startswith(wanted.replace("-", "").strip().lower())
