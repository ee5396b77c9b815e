"""`wait_causes`: what the trajectories of a batch were doing while the trainer waited for them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchrl_agentic.trajectory.span import Span

BATCH = "batch"
"""Key of time in which all trajectories had ended, and the batch was being built."""
OTHER = "other"
"""Key of time between spans: parsing, rendering, and the queue of the event loop."""
_FIRST = ("engine", "user", "reward", "admission")
"""Causes that a trajectory waits for even if a tool runs at the same time, as calls that start early do."""


@dataclass(frozen=True, slots=True)
class BatchMember:
    """A trajectory of the batch that was waited for.

    Attributes:
        name: Name of the trajectory.
        began: When it began, in seconds.
        ended: When it ended, in seconds.
        spans: Its spans that overlap the wait.
    """

    name: str
    began: float
    ended: float
    spans: Sequence[Span] = ()


@dataclass(frozen=True, slots=True)
class WaitCauses:
    """The seconds of a wait, divided in two ways. The values of each mapping add up to the wait.

    Attributes:
        causes: Seconds by cause: a `Cause`, with "tool/NAME" for a tool, `BATCH` or `OTHER`.
        held: Seconds by trajectory; without those in which none was missing.
    """

    causes: Mapping[str, float] = field(default_factory=dict[str, float])
    held: Mapping[str, float] = field(default_factory=dict[str, float])


def wait_causes(
    start: float, stop: float, members: Iterable[BatchMember], own: Sequence[Span] = ()
) -> WaitCauses:
    """Divide a wait for a batch among its causes.

    At each moment the wait is divided equally among the trajectories of the batch that have not ended, and
    goes to what each of them is doing at that moment. Hence the causes say what to speed up: while many
    trajectories are sampled, a slow tool of one of them holds up nothing; when only that one is missing, all
    of the wait is the tool's.

    Args:
        start: When the wait began, in seconds.
        stop: When it ended, in seconds.
        members: Trajectories of the batch.
        own: Spans of the collector itself. During an update, what was sampled waits for it.

    Returns:
        Seconds by cause and by trajectory.
    """
    missing = [member for member in members if member.ended > start]
    shared = _Shares(start, sorted(min(member.ended, stop) for member in missing))
    causes: defaultdict[str, float] = defaultdict(float)
    held: dict[str, float] = {}
    updates = [span for span in own if span.cause == "update" and span.stop > start]
    for member in missing:
        end = min(member.ended, stop)
        below = 0.0
        for right, keys in _pieces(member, start, end, updates):
            above = shared.until(right)
            for key in keys:
                causes[key] += (above - below) / len(keys)
            below = above
        held[member.name] = below
    if stop > shared.last:
        causes[BATCH] += stop - shared.last
    return WaitCauses({key: seconds for key, seconds in causes.items() if seconds > 0}, held)


class _Shares:
    """Integral over time of 1 / (number of missing trajectories)."""

    def __init__(self, start: float, ends: Sequence[float]) -> None:
        self._times, self._sums = [start], [0.0]
        for number, end in enumerate(ends):
            self._sums.append(self._sums[-1] + (end - self._times[-1]) / (len(ends) - number))
            self._times.append(end)
        self.last = self._times[-1]

    def until(self, time: float) -> float:
        place = bisect_right(self._times, time) - 1
        if place + 1 == len(self._times):
            return self._sums[-1]
        began, ended = self._times[place : place + 2]
        below, above = self._sums[place : place + 2]
        return below + (above - below) * (time - began) / (ended - began)


def _pieces(
    member: BatchMember, start: float, stop: float, updates: Sequence[Span]
) -> Iterator[tuple[float, Sequence[str]]]:
    """Cut the time of a trajectory where a span starts or stops; yield the end and the keys of each piece."""
    begun = min(max(member.began, start), stop)
    if start < begun:
        yield begun, ("admission",)
    edges: list[tuple[float, int, int]] = []
    spans = [*member.spans, *updates]
    for number, span in enumerate(spans):
        left, right = max(span.start, begun), min(span.stop, stop)
        if left < right:
            edges += ((left, 1, number), (right, 0, number))
    running: dict[int, Span] = {}
    at = begun
    for time, starts, number in sorted(edges):
        if at < time:
            yield time, _keys(running.values())
            at = time
        if starts:
            running[number] = spans[number]
        else:
            del running[number]
    if at < stop:
        yield stop, (OTHER,)


def _keys(running: Collection[Span]) -> Sequence[str]:
    """Return what a trajectory waits for while some spans run."""
    if not running:
        return (OTHER,)
    causes = {span.cause for span in running}
    if {"engine", "update"} <= causes:
        return ("update",)
    for cause in _FIRST:
        if cause in causes:
            return (cause,)
    if tools := [f"tool/{span.name}" for span in running if span.cause == "tool"]:
        return tools
    return next(((cause,) for cause in ("tools", "update") if cause in causes), (OTHER,))
