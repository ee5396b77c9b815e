"""Counts, statuses and durations of tool calls, in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchrl_agentic.messages import DispatchResult, Status, ToolResult, Turn

EXACT = 4096
"""Largest number of values that are all kept."""
_ERROR = 0.01
_GROWTH = (1 + _ERROR) / (1 - _ERROR)
_SMALLEST = 1e-9


class Distribution:
    """Durations and their quantiles: exact up to `EXACT` values, within 1 % for more.

    More values are counted in buckets, each 2 % wider than the one before it (DDSketch: Masson, Rim and Lee,
    "DDSketch: a fast and fully-mergeable quantile sketch with relative-error guarantees", VLDB 2019). The
    order of the values does not matter, and merged parts equal the whole. Negative, infinite and NaN values
    are ignored; in buckets, less than a nanosecond counts as 0.0.

    Args:
        values: First values, in seconds.
    """

    __slots__ = ("_buckets", "_values")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._values = array("d")
        self._buckets: Counter[int | None] | None = None
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        return len(self._values) if self._buckets is None else self._buckets.total()

    @property
    def is_exact(self) -> bool:
        """True if all values are kept."""
        return self._buckets is None

    def add(self, value: float) -> None:
        """Add a value, in seconds."""
        if not 0 <= value < math.inf:
            return
        if self._buckets is not None:
            self._buckets[_bucket(value)] += 1
            return
        self._values.append(value)
        if len(self._values) > EXACT:
            self._buckets = Counter(map(_bucket, self._values))
            self._values = array("d")

    def merge(self, other: Distribution) -> None:
        """Add all values of another distribution."""
        if other._buckets is None:
            for value in other._values:
                self.add(value)
            return
        mine = Counter(map(_bucket, self._values)) if self._buckets is None else self._buckets
        mine.update(other._buckets)
        self._buckets, self._values = mine, array("d")

    def quantile(self, q: float) -> float | None:
        """Return the value that a share `q` of the values does not exceed, or None if there are no values."""
        count = len(self)
        if not count:
            return None
        rank = round(q * (count - 1))
        if self._buckets is None:
            return sorted(self._values)[rank]
        for bucket in sorted(self._buckets, key=lambda one: -math.inf if one is None else one):
            rank -= self._buckets[bucket]
            if rank < 0:
                return _middle(bucket)
        raise AssertionError("unreachable: the rank is below the number of values")


def _bucket(value: float) -> int | None:
    """Return the number of a value's bucket, or None for the bucket of 0."""
    return None if value < _SMALLEST else math.ceil(math.log(value, _GROWTH))


def _middle(bucket: int | None) -> float:
    """Return the value that differs from each value of a bucket by at most `_ERROR` of it."""
    return 0.0 if bucket is None else 2 * _GROWTH**bucket / (_GROWTH + 1)


UNREADABLE = "(unreadable)"
"""Name under which calls without a readable tool name are counted."""
_LONGEST_NAME = 100


@dataclass(slots=True)
class ToolSummary:
    """Counts and durations of the calls of one tool.

    Attributes:
        tool: Name of the tool.
        statuses: Number of calls by status.
        run_s: Run times, in seconds.
        queue_s: Times from the start of the dispatch until the call ran, in seconds.
    """

    tool: str
    statuses: Counter[Status] = field(default_factory=Counter[Status])
    run_s: Distribution = field(default_factory=Distribution)
    queue_s: Distribution = field(default_factory=Distribution)

    @property
    def calls(self) -> int:
        """Number of calls."""
        return self.statuses.total()

    @property
    def infra(self) -> int:
        """Number of calls that failed without the model's fault."""
        return self.statuses[Status.INFRA]

    @property
    def errors(self) -> int:
        """Number of calls whose status is neither OK nor INFRA."""
        return self.calls - self.statuses[Status.OK] - self.infra

    def add(self, result: ToolResult) -> None:
        """Add a call, by its result."""
        self.statuses[result.status or Status.OK] += 1
        if result.timing is not None:
            self.run_s.add(result.timing.run_s)
            self.queue_s.add(result.timing.queue_s)

    def merge(self, other: ToolSummary) -> None:
        """Add all calls of another summary."""
        self.statuses.update(other.statuses)
        self.run_s.merge(other.run_s)
        self.queue_s.merge(other.queue_s)


def add_calls(tools: dict[str, ToolSummary], outcome: DispatchResult) -> None:
    """Add the calls of a turn to the summaries of their tools.

    Args:
        tools: Summaries by tool name, which are changed. An unknown tool gets one under the name that was
            called.
        outcome: The calls of the turn, with their results.
    """
    for call, result in zip(outcome.calls, outcome.results, strict=True):
        name = call.tool[:_LONGEST_NAME] or UNREADABLE
        tools.setdefault(name, ToolSummary(name)).add(result)


def most_called(tools: Iterable[ToolSummary]) -> list[ToolSummary]:
    """Return summaries, ordered by the number of calls, largest first."""
    return sorted(tools, key=lambda summary: (-summary.calls, summary.tool))


def summarize(turns: Iterable[Turn]) -> list[ToolSummary]:
    """Return a summary of each tool that the turns call, largest number of calls first.

    Args:
        turns: Turns of any trajectories. Calls of unknown tools are counted under the name that was called.
    """
    found: dict[str, ToolSummary] = {}
    for turn in turns:
        add_calls(found, turn.outcome)
    return most_called(found.values())
