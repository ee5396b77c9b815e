"""`RowNumbers`, which gives each live trajectory a row number of its own where there is no batch."""

from __future__ import annotations

import heapq


class RowNumbers:
    """Numbers from 0 on; each is in use once at a time.

    Attributes:
        count: Number of different numbers that were given out so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._free: list[int] = []

    def take(self) -> int:
        """Return the lowest number that is free."""
        if self._free:
            return heapq.heappop(self._free)
        self.count += 1
        return self.count - 1

    def give_back(self, number: int) -> None:
        """Free a number.

        Args:
            number: A number from `take` that has not been given back.
        """
        heapq.heappush(self._free, number)
