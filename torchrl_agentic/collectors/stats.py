"""`CollectorStats`: why a trainer waits for its next batch, and what the engine and the trajectories do."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from torchrl_agentic.collectors.stats_table import scalars_of, table_of
from torchrl_agentic.collectors.timeline import BatchTimeline, TimelineRow, TimelineWriter
from torchrl_agentic.collectors.wait_causes import BATCH, OTHER, BatchMember, WaitCauses, wait_causes
from torchrl_agentic.messages import JSON
from torchrl_agentic.text import truncate
from torchrl_agentic.trajectory.span import Cause, Span

if TYPE_CHECKING:
    from rich.live import Live

    from torchrl_agentic.collectors.admission import Capacity
    from torchrl_agentic.collectors.request_permits import RequestPermits

Event: TypeAlias = Literal["aborted", "resumed", "replaced", "dropped", "early", "restarted"]
"""What `CollectorStats.count` counts.

"aborted": answers that an update or a lost engine ended. "resumed": answers that were continued. "replaced":
trajectories that began again after a failure. "dropped": groups that left no rows. "early": tool calls that
started while the model still wrote.
"restarted": trajectories that began again because their worker had died.
"""

_MOST_NAMES = 200  # of tools, reasons and failures: models invent names
_OTHERS = "(others)"
_MOST_ENDED = 65_536  # trajectories that have ended and are in no batch yet
_SPANS_PER_WAIT = 256  # per trajectory; for the attribution of a wait
_SPANS_PER_ROW = 2_000  # per trajectory; for a timeline
_OWN_SPANS = 1_024
_BATCHES = 16  # batches of which the ages of tokens are kept
_OLDEST = 99  # updates; older tokens count as this old
_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A trajectory that holds up the next batch.

    Attributes:
        name: Name of the trajectory.
        group: Name of its group.
        seconds: Time since it began.
        doing: What it does now, such as "engine", "tool python" or "reward"; "after engine" if unknown.
        doing_s: Time since it began to do so.
        turn: Number of its turn, counted from 0.
    """

    name: str
    group: str
    seconds: float
    doing: str
    doing_s: float
    turn: int


@dataclass(slots=True)
class _Trajectory:
    """A trajectory that runs, or has ended and is in no batch yet."""

    name: str
    group: str
    began: float
    spans: deque[Span]
    doing: str
    since: float
    ended: float | None = None
    reason: str = ""
    tokens: int = 0
    turn: int = 0
    n_spans: int = 0


class _EngineUse:
    """Integrals over time of the requests that an engine works on, in total and over the last minute."""

    def __init__(self, now: float) -> None:
        self.requests = 0
        self.tokens = 0
        self._at = now
        self._idle = self._area = 0.0
        self._marks: deque[tuple[float, float, float, int]] = deque(maxlen=int(_WINDOW_S) + 1)
        self._marks.append((now, 0.0, 0.0, 0))
        self._start = now

    def advance(self, now: float) -> None:
        """Add the time since the last change."""
        passed = max(0.0, now - self._at)
        self._area += passed * self.requests
        self._idle += passed if self.requests == 0 else 0.0
        self._at = max(self._at, now)
        if self._at - self._marks[-1][0] >= 1.0:
            self._marks.append((self._at, self._idle, self._area, self.tokens))

    def figures(self, *, is_windowed: bool) -> dict[str, float]:
        """Return rates since the start, or since about a minute ago."""
        at, idle, area, tokens = (self._start, 0.0, 0.0, 0)
        if is_windowed:
            recent = (mark for mark in reversed(self._marks) if mark[0] <= self._at - _WINDOW_S)
            at, idle, area, tokens = next(recent, self._marks[0])
        passed = self._at - at
        if passed <= 0:
            return {"tokens_per_s": 0.0, "idle": 0.0, "mean_requests": 0.0}
        return {
            "tokens_per_s": (self.tokens - tokens) / passed,
            "idle": (self._idle - idle) / passed,
            "mean_requests": (self._area - area) / passed,
        }


@dataclass(slots=True)
class _Wait:
    """Waits of the consumer: the running one, the sums, and the causes of the last one."""

    began: float | None = None
    number: int = 0
    has_batch: bool = False
    seconds: float = 0.0
    causes: dict[str, float] = field(default_factory=dict[str, float])
    last: WaitCauses = field(default_factory=WaitCauses)
    last_s: float = 0.0


class CollectorStats:
    """Statistics of a collector: waits by cause, stragglers, ages of tokens, and use of the engine.

    The collector calls its methods on the thread of its event loop; each costs a few microseconds, except
    `batch`. Any thread may read. Memory is bounded by the number of trajectories that run or wait for their
    batch.

    The trainer waits between `wait_began` and `wait_ended`. At each `batch`, the wait is divided among the
    causes by `wait_causes`.

    >>> print(collector.stats)                           # a table
    >>> with collector.stats.live(): ...                 # the same, while it runs
    >>> for name, value in collector.stats.scalars().items():
    ...     logger.log_scalar(name, value, step=step)    # any logger of torchrl.record

    Args:
        clock: Function that returns the time in seconds, such as the `time` of the event loop.
        groups_per_batch: Number of groups in a batch.
        group_size: Number of trajectories that make a group complete; None if a group is complete as soon
            as none of its trajectories runs.
        max_concurrent: Number of requests that the engine works on at once; None if unknown.
        timeline: Writer of the spans of each batch; None for no timeline. `stop` closes it.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        groups_per_batch: int = 1,
        group_size: int | None = None,
        max_concurrent: int | None = None,
        timeline: TimelineWriter | None = None,
    ) -> None:
        self._clock = clock
        self._groups_per_batch = groups_per_batch
        self._group_size = group_size
        self._max_concurrent = max_concurrent
        self._timeline = timeline
        self._lock = threading.RLock()
        self._start = clock()
        self._stopped: float | None = None
        self._engine = _EngineUse(self._start)
        self._capacity: Capacity | None = None
        self._permits: RequestPermits | None = None
        self._wait = _Wait()
        self._known: dict[str, _Trajectory] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._groups: dict[str, dict[str, None]] = {}
        self._own: deque[Span] = deque(maxlen=_OWN_SPANS)
        self._seconds: dict[str, float] = {}
        self._calls: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._reasons: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._ages: deque[Counter[int]] = deque(maxlen=_BATCHES)
        self._n_left = self._n_tokens_left = 0
        self._n_began = self._n_ended = self._n_batches = self._n_groups = self._n_trained = 0
        self._first_batch = 0
        self._version = 0

    def begin(
        self,
        clock: Callable[[], float],
        *,
        capacity: Capacity | None = None,
        permits: RequestPermits | None = None,
        first_batch: int = 0,
    ) -> None:
        """Begin to count time, by another clock.

        Args:
            clock: Function that returns the time in seconds.
            capacity: Bounds the number of trajectories in flight; None: nothing is shown of it.
            permits: Holds requests back while the KV cache of the engine is full, or None.
            first_batch: Number of the first batch in the timelines.
        """
        with self._lock:
            self._capacity, self._permits = capacity, permits
            self._first_batch = first_batch
            self._clock = clock
            self._start = clock()
            self._engine = _EngineUse(self._start)

    def add(self, span: Span) -> None:
        """Add a span that has ended."""
        with self._lock:
            took = max(0.0, span.stop - span.start)
            self._version = max(self._version, span.version)
            key: str = span.cause
            if span.cause == "tool":
                name = _among(self._calls, span.name)
                key = f"tool/{name}"
                calls = self._calls[name]
                calls["n"] += 1
                calls[f"status/{span.status.lower()}"] += 1
            elif span.cause == "engine":
                self._engine.tokens += span.tokens
                self._engine.advance(self._now())
            _add(self._seconds, key, took)
            if not span.trajectory:
                self._own.append(span)
            elif (trajectory := self._known.get(span.trajectory)) is not None:
                self._keep(trajectory, span)

    def _keep(self, trajectory: _Trajectory, span: Span) -> None:
        trajectory.turn = max(trajectory.turn, span.turn)
        if span.cause == "engine":
            trajectory.tokens += span.tokens
        if span.cause != "tool":
            trajectory.doing, trajectory.since = f"after {span.cause}", span.stop
        if self._timeline is not None or self._wait.began is not None:
            trajectory.spans.append(span)
            trajectory.n_spans += 1

    def trajectory_began(self, name: str, group: str = "") -> None:
        """Add a trajectory to those in flight, in place of an earlier one of that name.

        Args:
            name: Name of the trajectory.
            group: Name of its group; its own name by default.
        """
        with self._lock:
            now, group = self._now(), group or name
            if (before := self._known.get(name)) is not None:
                self._n_ended += before.ended is None
                self._forget(name)
            most = _SPANS_PER_WAIT if self._timeline is None else _SPANS_PER_ROW
            self._known[name] = _Trajectory(name, group, now, deque(maxlen=most), "beginning", now)
            self._groups.setdefault(group, {})[name] = None
            self._n_began += 1

    def trajectory_ended(self, name: str, reason: str, *, is_kept: bool = True) -> None:
        """Remove a trajectory from those in flight.

        Call it again with `is_kept=False` for trajectories that had ended before their group was dropped.

        Args:
            name: Name of the trajectory.
            reason: Why it ended.
            is_kept: Whether it waits for its batch. False for one that failed, or was replaced or cancelled.
        """
        with self._lock:
            trajectory = self._known.get(name)
            if trajectory is None:
                return
            if trajectory.ended is None:
                trajectory.ended, trajectory.reason = self._now(), reason
                self._n_ended += 1
                self._reasons[_among(self._reasons, reason)] += 1
                self._ended[name] = None
            if not is_kept:
                self._forget(name)
            if len(self._ended) > _MOST_ENDED:
                self._forget(next(iter(self._ended)))

    def _forget(self, name: str) -> None:
        trajectory = self._known.pop(name)
        self._ended.pop(name, None)
        names = self._groups[trajectory.group]
        del names[name]
        if not names:
            del self._groups[trajectory.group]

    def doing(self, name: str, cause: Cause, detail: str = "") -> None:
        """Note what a trajectory does from now on; its end comes as a span.

        Args:
            name: Name of the trajectory.
            cause: What it does.
            detail: Names of the tools or of the user; "" otherwise.
        """
        with self._lock:
            if (trajectory := self._known.get(name)) is not None:
                trajectory.doing = f"{cause} {detail}".rstrip()
                trajectory.since = self._now()

    def request_began(self, name: str = "") -> None:
        """Count a request that the engine got.

        Args:
            name: Name of the trajectory, which is `doing` "engine" from now on; "" for none.
        """
        with self._lock:
            self._engine.advance(self._now())
            self._engine.requests += 1
            if name:
                self.doing(name, "engine")

    def request_ended(self) -> None:
        """Count a request that the engine answered, aborted or refused."""
        with self._lock:
            self._engine.advance(self._now())
            self._engine.requests = max(0, self._engine.requests - 1)

    def wait_began(self) -> None:
        """Note that the consumer waits for a batch that is not ready. Further calls change nothing."""
        with self._lock:
            if self._wait.began is None:
                self._wait.began = self._now()
                self._wait.number += 1
                self._wait.has_batch = False
                self._wait.last, self._wait.last_s = WaitCauses(), 0.0

    def wait_ended(self) -> None:
        """Note that the consumer got its batch, or waits no more."""
        with self._lock:
            now, wait = self._now(), self._wait
            if wait.began is not None:
                rest = now - wait.began
                self._add_wait(
                    WaitCauses({BATCH if wait.has_batch else OTHER: rest} if rest > 0 else {}), now
                )
                wait.began = None

    def _add_wait(self, found: WaitCauses, now: float) -> None:
        """Add the parts of a wait that lasted until now, and begin the rest of it."""
        wait = self._wait
        assert wait.began is not None
        last = dict(wait.last.causes)
        for cause, seconds in found.causes.items():
            key = _among(wait.causes, cause)
            _add(wait.causes, key, seconds)
            _add(last, key, seconds)
        wait.last = WaitCauses(last, {**wait.last.held, **found.held})
        wait.last_s += now - wait.began
        wait.seconds += now - wait.began
        wait.began = now

    def batch(self, names: Iterable[str], *, tokens: int, ages: Mapping[int, int]) -> None:
        """Add a batch, at the moment in which it is complete.

        Args:
            names: Names of its trajectories.
            tokens: Number of its sampled tokens.
            ages: Number of its sampled tokens by age, which is the number of updates since they were sampled.
        """
        with self._lock:
            now, began = self._now(), self._wait.began
            rows = [self._known[name] for name in names if name in self._known]
            ends = {row.name: now if row.ended is None else row.ended for row in rows}
            found = WaitCauses()
            if began is None:
                self._wait.last, self._wait.last_s = found, 0.0
            else:
                members = [
                    BatchMember(row.name, row.began, ends[row.name], [s for s in row.spans if s.stop > began])
                    for row in rows
                ]
                found = wait_causes(began, now, members, tuple(self._own))
                self._add_wait(found, now)
                self._wait.has_batch = True
            self._n_batches += 1
            self._n_groups += len({row.group for row in rows})
            self._n_trained += tokens
            histogram: Counter[int] = Counter()
            for age, count in ages.items():
                histogram[min(age, _OLDEST)] += count
            self._ages.append(histogram)
            self._n_left += len(rows)
            self._n_tokens_left += sum(row.tokens for row in rows)
            if self._timeline is not None:
                start = min([row.began for row in rows], default=now)
                self._timeline.write(
                    BatchTimeline(
                        self._first_batch + self._n_batches - 1,
                        start,
                        now,
                        began,
                        found.causes,
                        histogram,
                        tuple(span for span in self._own if span.stop > start),
                        [
                            TimelineRow(
                                row.name,
                                row.group,
                                row.began,
                                ends[row.name],
                                row.reason,
                                row.tokens,
                                found.held.get(row.name, 0.0),
                                row.n_spans - len(row.spans),
                                row.spans,
                            )
                            for row in rows
                        ],
                    )
                )
            for row in rows:
                self._forget(row.name)

    def failure(self, kind: str) -> None:
        """Count a failure, such as "timeout", "engine" or "reward"."""
        with self._lock:
            self._failures[_among(self._failures, kind)] += 1

    def count(self, event: Event, n: int = 1) -> None:
        """Count events.

        Args:
            event: Kind of the event.
            n: Number of events.
        """
        with self._lock:
            self._events[event] += n

    def stop(self) -> None:
        """Stop the clock, and close the timeline, after the collector has shut down."""
        with self._lock:
            self.wait_ended()
            if self._stopped is None:
                self._stopped = self._now()
        if self._timeline is not None:
            self._timeline.close()

    def _now(self) -> float:
        return self._clock() if self._stopped is None else self._stopped

    def stragglers(self, n: int = 5) -> list[Straggler]:
        """Return the trajectories that hold up the next batch, the one that began first at first.

        They belong to the oldest groups that are not complete, as many groups as the next batch still lacks.

        Args:
            n: Largest number of trajectories.
        """
        with self._lock:
            now = self._now()
            incomplete = [names for names in self._groups.values() if not self._is_complete(names)]
            lacking = self._groups_per_batch - (len(self._groups) - len(incomplete))
            members = [self._known[name] for names in incomplete[: max(1, lacking)] for name in names]
            late = [each for each in members if each.ended is None]
            late.sort(key=lambda each: each.began)
            return [
                Straggler(
                    each.name, each.group, now - each.began, each.doing, max(0.0, now - each.since), each.turn
                )
                for each in late[:n]
            ]

    def _is_complete(self, names: Collection[str]) -> bool:
        if len(names) < (self._group_size or 0):
            return False  # others have not begun
        return all(self._known[name].ended is not None for name in names)

    def snapshot(self) -> dict[str, JSON]:
        """Return all figures as JSON; durations are in seconds."""
        with self._lock:
            now = self._now()
            self._engine.advance(now)
            total, recent = (self._engine.figures(is_windowed=windowed) for windowed in (False, True))
            requests, wait = self._engine.requests, self._wait
            waiting = 0.0 if wait.began is None else now - wait.began
            most = requests if self._max_concurrent is None else self._max_concurrent
            late = self.stragglers()
            ages = sum(self._ages, Counter[int]())
            return {
                "seconds": now - self._start,
                "version": self._version,
                "in_flight": self._n_began - self._n_ended,
                "engine": {
                    "requests": min(requests, most),
                    "queued": max(0, requests - most),
                    "max_concurrent": self._max_concurrent,
                    "idle": recent["idle"],
                    "idle_total": total["idle"],
                    "mean_requests": recent["mean_requests"],
                    "mean_requests_total": total["mean_requests"],
                },
                "capacity": _capacity_figures(self._capacity, self._permits),
                "tokens": {
                    "sampled": self._engine.tokens,
                    "trained": self._n_trained,
                    "per_s": recent["tokens_per_s"],
                    "per_s_total": total["tokens_per_s"],
                    "per_trajectory": self._n_tokens_left / self._n_left if self._n_left else None,
                },
                "batches": {
                    "n": self._n_batches,
                    "groups": self._n_groups,
                    "trajectories": self._n_left,
                    "complete_groups": sum(map(self._is_complete, self._groups.values())),
                    "groups_per_batch": self._groups_per_batch,
                },
                "seconds_by_cause": _falling(self._seconds),
                "calls": {name: _calls(calls) for name, calls in self._calls.items()},
                "wait": {
                    "n": wait.number,
                    "seconds": wait.seconds + waiting,
                    "now": waiting,
                    "causes": _falling(wait.causes),
                    "last_seconds": wait.last_s,
                    "last_causes": _falling(wait.last.causes),
                    "last_held": _falling(wait.last.held, 5),
                },
                "ages": {
                    "last": _sorted(self._ages[-1]) if self._ages else {},
                    "recent": _sorted(ages),
                },
                "reasons": dict(self._reasons),
                "failures": dict(self._failures),
                "events": dict(self._events),
                "stragglers": [
                    {
                        "name": each.name,
                        "group": each.group,
                        "seconds": each.seconds,
                        "doing": each.doing,
                        "doing_s": each.doing_s,
                        "turn": each.turn,
                    }
                    for each in late
                ],
            }

    def scalars(self) -> dict[str, float]:
        """Return the figures that are worth a curve, by names such as "collector/tokens_per_s".

        "collector/wait" is the wait for the last batch, and "collector/wait/CAUSE" its parts. The rates and
        "collector/engine_idle" are those of the last minute. "collector/seconds/CAUSE" are sums over all
        trajectories since the start, in which "tools" includes each "tool/NAME". Special characters in names
        become "_".
        """
        return scalars_of(self.snapshot())

    def __call__(self) -> dict[str, float]:
        """Return the scalars, as `stats()` of TorchRL's collectors does for its monitors."""
        return self.scalars()

    def __str__(self) -> str:
        return table_of(self.snapshot())

    def live(self, *, refresh_per_second: float = 4.0) -> Live:
        """Return a panel that shows these statistics in the terminal: `with stats.live(): ...`.

        Args:
            refresh_per_second: How often the panel is drawn.
        """
        from torchrl_agentic.collectors.panel import collector_panel

        return collector_panel(self, refresh_per_second=refresh_per_second)


def _among(names: Mapping[str, object], name: str) -> str:
    """Return a name under which to count: the name, or that of all others once there are many."""
    if name in names:
        return name
    name = truncate(name, 200)
    return name if name in names or len(names) < _MOST_NAMES else _OTHERS


def _capacity_figures(capacity: Capacity | None, permits: RequestPermits | None) -> dict[str, JSON]:
    """Return how many trajectories may be open, and what the engine reports of its KV cache."""
    pressure = None if permits is None else permits.pressure
    return {
        "open": None if capacity is None else capacity.open,
        "limit": None if capacity is None else capacity.limit,
        "held_back": 0 if permits is None else permits.waiting,
        "kv_use": None if pressure is None else pressure.kv_use,
        "preempted": None if pressure is None else pressure.preempted,
    }


def _add(sums: dict[str, float], name: str, seconds: float) -> None:
    sums[name] = sums.get(name, 0.0) + seconds


def _falling(sums: Mapping[str, float], most: int | None = None) -> dict[str, JSON]:
    """Return the largest values, the largest first."""
    return dict(sorted(sums.items(), key=lambda item: -item[1])[:most])


def _calls(counts: Counter[str]) -> dict[str, JSON]:
    statuses = {key.removeprefix("status/"): n for key, n in counts.items() if key != "n"}
    return {"n": counts["n"], "statuses": statuses}


def _sorted(ages: Counter[int]) -> dict[str, JSON]:
    return {str(age): count for age, count in sorted(ages.items())}
