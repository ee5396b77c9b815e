"""`Listing`, the rows that match a query, sorted, as more of them are read."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence

from torchrl_agentic.records import BadLine
from torchrl_agentic.viewer.layout import Needle, count
from torchrl_agentic.viewer.query import LARGE, Query, Row, Step
from torchrl_agentic.viewer.render_record import Block, bad_line, beginning, conversation

SORTS = ("none", "score ascending", "score descending")
NO_MASK = re.compile("(?!)")


def in_order(rows: Iterable[Row], sort: str) -> list[Row]:
    """Sort rows by score. Rows without a score, or with NaN, come last in both directions.

    Args:
        rows: The rows.
        sort: Order, one of `SORTS`.
    """
    rows = sorted(rows, key=lambda row: (row.step.place, row.index))
    if sort == "none":
        return rows
    known = [row for row in rows if row.score is not None]
    known.sort(key=operator.attrgetter("score"), reverse=sort == "score descending")
    return known + [row for row in rows if row.score is None]


def blocks_of(row: Row, mask: re.Pattern[str], *, whole: bool = False) -> list[Block]:
    """Return a trajectory as blocks; of a large one, only the beginning.

    Args:
        row: The trajectory.
        mask: Regular expression of text that is shown as a star.
        whole: Whether to read large trajectories completely.

    Raises:
        Gone: If the trajectory has been removed.
    """
    if row.size > LARGE and not whole:
        return beginning(row.beginning(), row.size)
    record = row.record()
    if isinstance(record, BadLine):
        return bad_line(record, row.line(4096).decode("utf-8", "surrogateescape"))
    advantage = None if isinstance(row.summary, BadLine) else row.summary.advantage
    return conversation(record, mask, advantage)


def matches(row: Row, needle: Needle, mask: re.Pattern[str]) -> int:
    """Return how often the searched words occur in the visible text of a trajectory.

    Args:
        row: The trajectory.
        needle: The words.
        mask: Regular expression of text that is shown as a star.

    Raises:
        Gone: If the trajectory has been removed.
    """
    if row.size <= LARGE and not needle.may_be_in(row.line()):
        return 0
    return count(blocks_of(row, mask), needle)


class Listing:
    """The rows of one step or of all that match a query.

    Args:
        query: Condition of the rows.
        sort: Order, one of `SORTS`.
        step: The only step to list; None for all.
        mask: Regular expression of text that is shown as a star.

    Attributes:
        shown: The matching rows, sorted. The list is replaced, never changed.
    """

    def __init__(self, query: Query, sort: str, step: Step | None, mask: re.Pattern[str] = NO_MASK) -> None:
        self.query, self.sort, self.step = query, sort, step
        self.shown: Sequence[Row] = []
        self._mask = mask
        self._words = [(Needle(words), is_wanted) for words, is_wanted in query.words]
        self._seen: dict[Step, tuple[Sequence[Row], int]] = {}
        self._last: dict[Step, Row] = {}
        self._let: list[Row] = []
        self._pending = 0

    def take(self, steps: Sequence[Step], most: int) -> bool:
        """Check more rows.

        Args:
            steps: All steps.
            most: Largest number of rows to check.

        Returns:
            Whether there were any, or `shown` has changed.
        """
        self._forget(steps)
        taken = list(self._new(steps if self.step is None else [self.step], most))
        for row in taken:
            if self._lets(row):
                self._let.append(row)
                self._pending += 1
        # Sorting takes time proportional to all rows, so that it is not done for each new one.
        if self._pending and (not taken or self._pending > len(self._let) // 16):
            self.shown, self._pending = in_order(self._let, self.sort), 0
            return True
        return bool(taken)

    def _forget(self, steps: Sequence[Step]) -> None:
        """Remove the rows of files that were rewritten or removed, and lines that have grown."""
        there = set(map(id, steps))
        for step, (rows, taken) in list(self._seen.items()):
            if id(step) not in there or step.rows is not rows:
                del self._seen[step]
                lost = set(map(id, rows))
            elif taken and self._last[step] is not rows[taken - 1]:
                lost = {id(self._last[step])}
                self._seen[step] = rows, taken - 1
            else:
                continue
            self._let = [row for row in self._let if id(row) not in lost]
            self._pending = len(self._let) + 1

    def _new(self, steps: Iterable[Step], most: int) -> Iterator[Row]:
        for step in steps:
            rows = step.rows
            _, begin = self._seen.get(step, (rows, 0))
            fresh = rows[begin : begin + most]
            if fresh:
                self._seen[step] = rows, begin + len(fresh)
                self._last[step] = fresh[-1]
            yield from fresh
            most -= len(fresh)
            if most <= 0:
                return

    def _lets(self, row: Row) -> bool:
        summary = row.summary
        if self.query.terms and (isinstance(summary, BadLine) or not self.query.holds(summary)):
            return False
        return all((matches(row, needle, self._mask) > 0) is wanted for needle, wanted in self._words)
