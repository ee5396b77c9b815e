"""Watch a collector: let it run dry every few minutes, take a reading, check the books, and print a line."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path
from typing import Any

from soak.accounts import Accounts
from soak.readings import Reading, growth, left_over, take

POLL_S = 0.5


class Feed:
    """Endless tasks, which can be held back so that the collector runs dry.

    Args:
        accounts: The books, where each task is entered.
        task_of: Returns the task of a number.
    """

    def __init__(self, accounts: Accounts, task_of: Callable[[int], Any]) -> None:
        self._accounts, self._task_of = accounts, task_of
        self._left = math.inf
        self._is_over = False
        self._changed = asyncio.Event()

    async def __aiter__(self) -> AsyncGenerator[Any]:
        for number in itertools.count():
            while self._left < 1 and not self._is_over:
                self._changed.clear()
                await self._changed.wait()
            if self._is_over:
                return
            self._left -= 1
            self._accounts.tasks += 1
            yield self._task_of(number)

    def allow(self, count: float) -> None:
        """Give out so many tasks from now on, and no more.

        Args:
            count: Number of tasks; infinity for all.
        """
        self._left = count
        self._changed.set()

    def end(self) -> None:
        """Give out no more tasks."""
        self._is_over = True
        self._changed.set()


class Watch:
    """Readings of one collector, in its whole life.

    Args:
        name: Name of the run, for the table.
        accounts: The books.
        feed: The tasks of the collector.
        folder: Where the program creates its temporary folders.
        groups_per_batch: Number of groups in a batch of the collector.
        idle_limit_s: Seconds after which a collector without tasks must be idle.
        gauges: Numbers that must be 0 while the collector is idle, by name.
        engine: Ids of the processes of the engine.

    Attributes:
        readings: Readings so far.
        faults: A line for each thing that is wrong.
    """

    def __init__(
        self,
        name: str,
        accounts: Accounts,
        feed: Feed,
        folder: Path,
        *,
        groups_per_batch: int,
        idle_limit_s: float,
        gauges: Callable[[], dict[str, int]] = dict,
        engine: Collection[int] = (),
    ) -> None:
        self.name, self.accounts, self.feed, self.folder = name, accounts, feed, folder
        self._per_batch, self._idle_limit_s, self._gauges = groups_per_batch, idle_limit_s, gauges
        self._engine = engine
        self.readings: list[Reading] = []
        self.faults: list[str] = []

    async def run(self, collector: Any, *, seconds: float, period_s: float) -> None:
        """Take a reading every period, and end the tasks after so many seconds.

        Args:
            collector: The collector, which something else reads from.
            seconds: Length of the run, by the clock of the event loop.
            period_s: Seconds between two readings.
        """
        time = asyncio.get_running_loop().time
        began = time()
        try:
            while (left := seconds - (time() - began)) > 0:
                await asyncio.sleep(min(left, period_s))
                await self._run_dry(collector)
                self._read(collector, time() - began)
                if self.faults:
                    return
                self.feed.allow(math.inf)
        finally:
            self.feed.end()

    async def _run_dry(self, collector: Any) -> None:
        """Hold the tasks back until every one has left in a batch or was dropped."""
        time = asyncio.get_running_loop().time
        limit = time() + self._idle_limit_s
        self.feed.allow(0)
        calm = 0
        while time() < limit:
            await asyncio.sleep(POLL_S)
            figures = collector.stats.snapshot()
            late = self.accounts.late
            is_calm = not figures["in_flight"] and figures["batches"]["complete_groups"] == late
            calm = calm + 1 if is_calm else 0
            if calm >= 3 and not late:
                return
            if calm >= 3:  # a batch needs a few groups more
                self.feed.allow(self._per_batch - late % self._per_batch)
                calm = 0
        self.faults.append(f"the collector is not idle after {self._idle_limit_s:g} s:\n{collector.stats}")

    def check(self, collector: Any) -> dict[str, Any]:
        """Check that an idle collector holds nothing, and return its statistics."""
        figures = collector.stats.snapshot()
        self.accounts.check_idle(figures)
        self.faults += [line for line in self.accounts.faults if line not in self.faults]
        self.faults += [f"{count} {name} left" for name, count in self._gauges().items() if count]
        return figures

    def _read(self, collector: Any, at_s: float) -> None:
        figures = self.check(collector)
        self.readings.append(take(at_s, self.folder, self._engine))
        self._print(figures)

    def _print(self, figures: dict[str, Any]) -> None:
        reading = self.readings[-1]
        cells = {
            "minute": f"{reading.at_s / 60:.1f}",
            "MiB": f"{reading.memory_mib:.1f}",
            "below": f"{reading.children_mib:.1f}",
            "engine": f"{reading.engine_mib:.0f}",
            **reading.counts,
            **self.accounts.columns(figures),
            "dropped": self.accounts.dropped,
            "batches": figures["batches"]["n"],
            "requests": self.accounts.requests["begun"],
            "calls": self.accounts.calls.total(),
        }
        if len(self.readings) % 10 == 1:
            print(" ".join(f"{name:>8}" for name in cells))
        print(" ".join(f"{cell:>8}" for cell in cells.values()), flush=True)

    def verdict(self, before: Reading, after: Reading) -> list[str]:
        """Return a line for each thing that is wrong with the run, and print a summary.

        Args:
            before: Reading after an earlier collector of the same kind was closed.
            after: Reading after this one was closed.
        """
        found = [*self.faults, *growth(self.readings), *left_over(before, after)]
        books = self.accounts
        calls = ", ".join(f"{count:,} {status}" for status, count in books.calls.most_common())
        requests = ", ".join(f"{count:,} {name}" for name, count in books.requests.most_common())
        print(f"{self.name}: {books.begun:,} trajectories, {books.turns:,} turns")
        print(f"  requests: {requests}")
        print(f"  calls: {calls}")
        print(f"  {len(self.readings)} readings; " + ("nothing is wrong" if not found else "WRONG:"))
        for line in found:
            print(f"  - {line}")
        return found
