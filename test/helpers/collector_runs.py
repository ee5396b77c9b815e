"""Runs of a collector that are made up: a clock that is set, and the statistics of a few batches."""

from __future__ import annotations

from collections.abc import Callable

from torchrl_agentic.collectors.stats import CollectorStats
from torchrl_agentic.collectors.timeline import TimelineWriter
from torchrl_agentic.messages import Status
from torchrl_agentic.trajectory.span import Span


class SetClock:
    """A clock that shows the time that a test sets.

    Attributes:
        now: The time, in seconds.
    """

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def stats_of(clock: SetClock, *, timeline: TimelineWriter | None = None) -> CollectorStats:
    """Create statistics of a collector with two groups per batch and an engine for four requests.

    Args:
        clock: The clock.
        timeline: Writer of the timelines.
    """
    return CollectorStats(clock, groups_per_batch=2, max_concurrent=4, timeline=timeline)


def one_batch(
    stats: CollectorStats,
    clock: SetClock,
    *,
    n_groups: int = 2,
    group_size: int = 2,
    n_turns: int = 1,
    batch: int = 0,
    slow_s: float = 20.0,
) -> list[str]:
    """Let the trajectories of a batch run, which the trainer waits for; return their names.

    In each turn, a trajectory is sampled for 1 s (10 tokens), and then runs `search` for 1 s. At last it is
    sampled for 1 s again, and its reward takes 1 s. The last search of the last trajectory takes `slow_s`
    instead, and fails. The trainer waits from the 2nd second on, until 1 s after the batch is complete.

    Args:
        stats: The statistics.
        clock: Their clock.
        n_groups: Number of groups.
        group_size: Number of trajectories in a group.
        n_turns: Number of turns with a search.
        batch: Number of the batch, for the names and the policy version.
        slow_s: Duration of the slow search, in seconds.
    """
    start = clock.now
    names = [f"b{batch}/g{group}/{n}" for group in range(n_groups) for n in range(group_size)]
    events: list[tuple[float, Callable[[], object]]] = [(start + 2, stats.wait_began)]
    for place, name in enumerate(names):
        at, group = start, f"b{batch}/g{place // group_size}"
        events.append((at, lambda name=name, group=group: stats.trajectory_began(name, group)))
        for turn in range(n_turns + 1):
            engine = Span("engine", at, at + 1, name, "", turn, batch, 10, "stop")
            events.append((at, lambda name=name: stats.request_began(name)))
            events.append((at + 1, lambda span=engine: (stats.add(span), stats.request_ended())))
            at += 1
            if turn == n_turns:
                break
            is_slow = place == len(names) - 1 and turn == n_turns - 1
            took, status = (slow_s, Status.TIMEOUT.name) if is_slow else (1.0, Status.OK.name)
            spans = [
                Span("tool", at, at + took, name, "search", turn, batch, status=status),
                Span("tools", at, at + took, name, "", turn, batch),
            ]
            events.append((at, lambda name=name: stats.doing(name, "tools", "search")))
            events.append((at + took, lambda spans=spans: [stats.add(span) for span in spans]))
            at += took
        reward = Span("reward", at, at + 1, name, "", n_turns, batch)
        events.append((at, lambda name=name: stats.doing(name, "reward")))
        events.append((at + 1, lambda span=reward: stats.add(span)))
        events.append((at + 1, lambda name=name: stats.trajectory_ended(name, "no_calls")))
    for time, happen in sorted(events, key=lambda event: event[0]):
        clock.now = time
        happen()
    n_tokens = 10 * (n_turns + 1) * len(names)
    stats.batch(names, tokens=n_tokens, ages={0: n_tokens - 10, 1: 10})
    clock.now += 1
    stats.wait_ended()
    return names
