"""A simulated collector and trainer around `GroupAdmission`, with groups of heavy-tailed durations."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from torchrl_agentic.collectors.admission import GroupAdmission


@dataclass
class Run:
    """Record of a simulated collector and trainer."""

    durations: list[float]
    batches: list[list[int]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    restarted: list[int] = field(default_factory=list)
    begun_at: dict[int, int] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)


def heavy_tailed(rng: random.Random) -> float:
    """Return seconds with a median of 1 and a 99th percentile of 30."""
    return rng.lognormvariate(0.0, 1.462)


def simulate(
    admission: GroupAdmission,
    groups: int,
    *,
    in_flight: int,
    train_s: Callable[[int], float] = lambda _: 2.0,
    drops: float = 0.0,
    updates: Callable[[int], int] = lambda _: 1,
    seed: int = 0,
) -> Run:
    """Run groups of heavy-tailed durations on a simulated clock, until all have left.

    Args:
        admission: The state machine.
        groups: Number of tasks.
        in_flight: Largest number of groups that run at once.
        train_s: Time that training takes, by number of the batch.
        drops: Share of groups that fail when they end.
        updates: Number of updates after a batch, by its number.
        seed: Seed of durations and failures.
    """
    rng = random.Random(seed)
    run = Run([])
    events: list[tuple[float, int, int]] = []  # (time, number, version); -1: the trainer asks
    running: set[int] = set()
    now, asks = 0.0, True
    while True:
        while len(running) < in_flight and admission.can_begin and len(run.durations) < groups:
            number = admission.begin()
            assert number == len(run.durations), "groups are numbered in order"
            run.durations.append(heavy_tailed(rng))
            run.begun_at[number] = admission.version
            running.add(number)
            heapq.heappush(events, (now + run.durations[number], number, admission.version))
        if len(run.durations) == groups:
            admission.end()
        if asks:
            batch = admission.take()
            if batch == []:
                break
            if batch is not None:
                asks = False
                run.ages += [admission.version - run.begun_at[number] for number in batch]
                run.versions.append(admission.version)
                run.batches.append(batch)
                heapq.heappush(events, (now + train_s(len(run.batches)), -1, 0))
        assert events, "nothing runs, and no batch leaves: the loop is stuck"
        now, number, version = heapq.heappop(events)
        if number == -1:
            count = updates(len(run.batches))
            for _ in range(count):
                admission.update(admission.version + 1)
            if not count:
                admission.resume()
            for late in admission.overdue:
                admission.restart(late)
                run.restarted.append(late)
                run.begun_at[late] = admission.version
                if late not in running:
                    running.add(late)
                heapq.heappush(events, (now + run.durations[late], late, admission.version))
            asks = True
        elif run.begun_at[number] == version:  # else it was restarted
            running.remove(number)
            if rng.random() < drops:
                admission.drop(number)
                run.dropped.append(number)
            else:
                admission.finish(number)
    return run


def flat(batches: list[list[int]]) -> list[int]:
    """Return the numbers of all batches, in their order."""
    return [number for batch in batches for number in batch]
