"""`DoneTasks`: the numbers of the tasks that are done, nearly all of which are below one number."""

from __future__ import annotations

from collections.abc import Iterable

from torchrl_agentic.errors import check_count


class DoneTasks:
    """A set of task numbers, of which all below some number belong to it.

    Args:
        before: All numbers below this one are done.
        later: Other numbers that are done.

    Raises:
        TypeError: If `before` is no number.
        ValueError: If `before` is negative.
    """

    def __init__(self, before: int = 0, later: Iterable[int] = ()) -> None:
        check_count("tasks_before", before, optional=False, least=0)
        self._before, self._later = before, set[int]()
        for number in later:
            self.add(number)

    def add(self, number: int) -> None:
        """Add the number of a task that is done."""
        if number >= self._before:
            self._later.add(number)
            while self._before in self._later:
                self._later.remove(self._before)
                self._before += 1

    def discard(self, number: int) -> None:
        """Remove the number of a task that is not done after all, if it is there."""
        if number < self._before:
            self._later.update(range(number + 1, self._before))
            self._before = number
        self._later.discard(number)

    def copy(self) -> DoneTasks:
        """Return an independent copy."""
        return DoneTasks(self._before, self._later)

    def to_json(self) -> dict[str, int | list[int]]:
        """Return "tasks_before", the first number that is missing, and "tasks_done", those above it."""
        return {"tasks_before": self._before, "tasks_done": sorted(self._later)}

    def __contains__(self, number: int) -> bool:
        return number < self._before or number in self._later
