"""Admission of groups: ages stay within the bound, nothing is discarded, short groups are not preferred."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from helpers.admission_runs import Run, flat, simulate
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.collectors.admission import GroupAdmission

GROUPS = 100_000


def most_in_time(deadlines: list[int], first: int, batch: int) -> int:
    """Return how many groups can leave by their deadlines, by matching groups to places in batches."""
    places: dict[tuple[int, int], int] = {}

    def placed(group: int, tried: set[tuple[int, int]]) -> bool:
        for version in range(first, deadlines[group] + 1):
            for place in range(batch):
                spot = (version, place)
                if spot in tried:
                    continue
                tried.add(spot)
                if spot not in places or placed(places[spot], tried):
                    places[spot] = group
                    return True
        return False

    return sum(placed(group, set()) for group in range(len(deadlines)))


class Model:
    """Apply the rules to a plain list of groups, and compare `GroupAdmission` after each event."""

    def __init__(self, batch: int, staleness: int, version: int) -> None:
        self.batch, self.staleness, self.version = batch, staleness, version
        self.admission = GroupAdmission(batch, staleness, version)
        self.open: dict[int, int] = {}
        self.done: set[int] = set()
        self.untrained = 0
        self.left: list[int] = []
        self.dropped: list[int] = []
        self.is_ended = False

    def deadlines(self, groups: Iterable[int]) -> list[int]:
        return [self.open[number] + self.staleness for number in groups]

    def by_age(self, groups: Iterable[int]) -> list[int]:
        return sorted(groups, key=lambda number: (self.open[number], number))

    def begin(self, rng: random.Random) -> None:
        room = len(self.open) + self.untrained < (1 + self.staleness) * self.batch and not self.is_ended
        assert self.admission.can_begin == room
        if not room:
            with pytest.raises(RuntimeError, match="no group may begin now"):
                self.admission.begin()
            return
        number = self.admission.begin()
        assert number == len(self.open) + len(self.left) + len(self.dropped)
        self.open[number] = self.version

    def finish(self, rng: random.Random) -> None:
        if running := sorted(self.open.keys() - self.done):
            number = rng.choice(running)
            self.admission.finish(number)
            self.done.add(number)

    def drop(self, rng: random.Random) -> None:
        if self.open:
            number = rng.choice(sorted(self.open))
            self.admission.drop(number)
            del self.open[number]
            self.done.discard(number)
            self.dropped.append(number)

    def restart(self, rng: random.Random) -> None:
        if self.open:
            self.restarted(rng.choice(sorted(self.open)))

    def restarted(self, number: int) -> None:
        self.admission.restart(number)
        self.open[number] = self.version
        self.done.discard(number)

    def take(self, rng: random.Random) -> None:
        expected = self.by_age(self.done)[: self.batch]
        rest = self.deadlines(self.open.keys() - set(expected))
        is_last = self.is_ended and self.done == self.open.keys()
        is_due = len(expected) == self.batch or is_last
        is_due = is_due and min(self.deadlines(expected), default=self.version) >= self.version
        is_due = is_due and most_in_time(rest, self.version + 1, self.batch) == len(rest)
        batch = self.admission.take()
        assert batch == (expected if is_due else None)
        for number in batch or ():
            assert self.version - self.open.pop(number) <= self.staleness
            self.done.remove(number)
            self.left.append(number)
            self.untrained += 1

    def update(self, rng: random.Random) -> None:
        self.version += rng.choice([1, 1, 1, 2])
        self.admission.update(self.version)
        self.untrained = 0

    def resume(self, rng: random.Random) -> None:
        self.admission.resume()
        self.untrained = 0

    def restart_overdue(self, rng: random.Random) -> None:
        overdue = self.admission.overdue
        assert overdue == self.by_age(overdue)
        most = most_in_time(self.deadlines(self.open), self.version, self.batch)
        assert len(overdue) == len(self.open) - most, "no more groups restart than must"
        kept = self.deadlines(self.open.keys() - set(overdue))
        assert most_in_time(kept, self.version, self.batch) == len(kept)
        for number in overdue:
            self.restarted(number)

    def finish_all(self, rng: random.Random) -> None:
        """Finish what runs, and as much as may begin: a batch must leave."""
        self.restart_overdue(rng)
        while self.admission.can_begin:
            self.begin(rng)
        while self.open.keys() - self.done:
            self.finish(rng)
        if self.untrained == 0 or self.is_ended:
            before, rest = len(self.left), len(self.open)
            self.take(rng)
            assert len(self.left) - before == min(self.batch, rest), "finished groups must leave"

    def end(self, rng: random.Random) -> None:
        self.admission.end()
        self.is_ended = True

    def check_counts(self) -> None:
        admission = self.admission
        assert admission.version == self.version
        assert (admission.finished, admission.unfinished) == (len(self.done), len(self.open) - len(self.done))
        assert (admission.handed_out, admission.dropped) == (len(self.left), len(self.dropped))
        assert admission.begun == len(self.open) + len(self.left) + len(self.dropped)
        assert [admission.age(number) for number in self.open] == [
            self.version - version for version in self.open.values()
        ]
        assert len(set(self.left + self.dropped)) == len(self.left) + len(self.dropped), "a group leaves once"


EVENTS = {
    Model.begin: 30, Model.finish: 30, Model.take: 20, Model.update: 6, Model.restart_overdue: 3,
    Model.resume: 3, Model.drop: 2, Model.restart: 3, Model.finish_all: 1,
}  # fmt: skip
"""How often each event happens, beside the others."""


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_every_decision_is_that_of_a_plain_model(batch: int, staleness: int, seed: int):
    rng = random.Random(f"{batch} {staleness} {seed}")
    model = Model(batch, staleness, version=seed % 3)
    for event in (*rng.choices([*EVENTS], [*EVENTS.values()], k=400), Model.end):
        event(model, rng)
        model.check_counts()
    for event in rng.choices([*EVENTS], [*EVENTS.values()], k=100):
        event(model, rng)
        model.check_counts()


@pytest.mark.parametrize(
    ("staleness", "batch", "in_flight", "drops"),
    [
        (0, 8, 8, 0.0),
        (1, 8, 16, 0.0),
        (1, 32, 40, 0.02),
        (2, 1, 3, 0.0),
        (4, 16, 80, 0.01),
    ],
)
def test_a_hundred_thousand_groups_leave_once_and_in_time_and_unbiased(
    staleness: int, batch: int, in_flight: int, drops: float
):
    admission = GroupAdmission(batch, staleness)
    run = simulate(admission, GROUPS, in_flight=in_flight, drops=drops)
    left = flat(run.batches)
    assert max(run.ages) == staleness
    assert not run.restarted, "no work is thrown away"
    assert sorted(left + run.dropped) == list(range(GROUPS)), "every group leaves once, or is dropped"
    assert len(set(left)) == len(left)
    assert (admission.begun, admission.handed_out, admission.dropped) == (GROUPS, len(left), len(run.dropped))
    assert (admission.finished, admission.unfinished) == (0, 0)
    assert all(len(each) == batch for each in run.batches[:-1])
    assert bool(run.dropped) == bool(drops)
    check_prefixes(run, staleness, batch)


def check_prefixes(run: Run, staleness: int, batch: int) -> None:
    """Check the promise that bounds any bias.

    The first n batches contain all groups that began `staleness` updates before the last of them, and only
    groups among the first (n + staleness) * batch offered ones. So at most staleness * batch of the first
    n * batch groups are exchanged for later ones.
    """
    lost = sorted(run.dropped)
    offered = sorted(set(range(len(run.durations))) - set(lost))
    by_version: dict[int, list[int]] = {}
    for number in offered:
        by_version.setdefault(run.begun_at[number], []).append(number)
    left: set[int] = set()
    for n, (numbers, version) in enumerate(zip(run.batches, run.versions, strict=True), 1):
        left.update(numbers)
        assert left.issuperset(by_version.pop(version - staleness, [])), "a group that became due left"
        assert max(numbers) < (n + staleness) * batch + bisect_right(lost, max(numbers))
        if n % 1000 == 0:
            assert len(left.difference(offered[: n * batch])) <= staleness * batch
            trained = sorted(run.durations[number] for number in left)
            first = sorted(run.durations[number] for number in offered[: n * batch])
            lengths = (*first[:: batch * 16], *first[-9:])
            distances = [abs(bisect_right(trained, each) - bisect_right(first, each)) for each in lengths]
            assert max(distances) <= staleness * batch, "the distributions differ by no more than that"


def test_staleness_0_gives_the_batches_of_a_synchronous_loop():
    run = simulate(GroupAdmission(5, 0), 23, in_flight=5)
    assert [sorted(batch) for batch in run.batches] == [
        [0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 18, 19], [20, 21, 22],
    ]  # fmt: skip
    assert run.batches == [sorted(batch) for batch in run.batches], "oldest first"
    assert [{run.begun_at[number] for number in batch} for batch in run.batches] == [{0}, {1}, {2}, {3}, {4}]
    assert set(run.ages) == {0}


@given(st.integers(1, 9), st.integers(0, 60), st.integers(1, 20), st.integers())
def test_staleness_0_keeps_the_order_for_all_durations(batch: int, groups: int, in_flight: int, seed: int):
    run = simulate(GroupAdmission(batch, 0), groups, in_flight=in_flight, seed=seed)
    assert run.batches == [list(range(groups))[at : at + batch] for at in range(0, groups, batch)]


@given(
    staleness=st.integers(0, 5) | st.none(),
    batch=st.integers(1, 9),
    groups=st.integers(0, 200),
    in_flight=st.integers(1, 40),
    drops=st.sampled_from([0.0, 0.1, 0.9]),
    updates=st.lists(st.integers(0, 3), min_size=1),
    seed=st.integers(),
)
def test_all_groups_leave_in_time_however_often_the_weights_change(
    staleness: int | None,
    batch: int,
    groups: int,
    in_flight: int,
    drops: float,
    updates: list[int],
    seed: int,
):
    run = simulate(
        GroupAdmission(batch, staleness),
        groups,
        in_flight=in_flight,
        drops=drops,
        updates=lambda number: updates[number % len(updates)],
        train_s=lambda number: number % 7,
        seed=seed,
    )
    assert sorted(flat(run.batches) + run.dropped) == list(range(groups))
    assert all(len(each) == batch for each in run.batches[:-1])
    assert staleness is not None or not run.restarted
    if staleness is not None:
        assert max(run.ages, default=0) <= staleness


@given(st.integers(0, 4), st.integers(1, 6), st.integers(2, 12), st.integers())
def test_a_group_leaves_at_its_place_or_up_to_max_staleness_batches_earlier(
    staleness: int, batch: int, batches: int, seed: int
):
    """If groups begin as soon as they may, group i leaves with batch i // B at the latest."""
    everything = (1 + staleness) * batch
    run = simulate(GroupAdmission(batch, staleness), batches * batch, in_flight=everything, seed=seed)
    for n, numbers in enumerate(run.batches):
        for number in numbers:
            assert number // batch - staleness <= n <= max(staleness, number // batch)


def test_a_straggler_is_waited_for_only_when_it_is_due():
    admission = GroupAdmission(2, 1)
    for number in (admission.begin() for _ in range(4)):
        if number:
            admission.finish(number)
    assert not admission.can_begin
    assert admission.take() == [1, 2], "the straggler, 0, is due after one more update"
    admission.update(1)
    assert [admission.begin(), admission.begin()] == [4, 5]
    admission.finish(4)
    assert admission.take() is None, "3 and 4 would leave 0 behind, which is due now"
    assert not admission.overdue
    admission.finish(0)
    assert admission.take() == [0, 3]


def test_a_dropped_group_is_replaced_by_a_later_one():
    admission = GroupAdmission(2, 0)
    assert [admission.begin(), admission.begin()] == [0, 1]
    admission.finish(1)
    admission.drop(0)
    assert admission.can_begin
    admission.finish(admission.begin())
    assert admission.take() == [1, 2]


def test_a_finished_group_that_is_dropped_or_restarted_does_not_leave():
    admission = GroupAdmission(1, 2)
    for number in (admission.begin() for _ in range(3)):
        admission.finish(number)
    admission.drop(0)
    admission.restart(1)
    assert admission.take() == [2]
    assert admission.take() is None
    admission.finish(1)
    assert admission.take() == [1]


def test_the_trainer_gets_further_batches_of_the_same_version_if_it_does_not_update():
    admission = GroupAdmission(2, 0)
    for expected in ([0, 1], [2, 3], [4, 5]):
        for number in (admission.begin() for _ in range(2)):
            admission.finish(number)
        assert admission.take() == expected
        assert not admission.can_begin, "the trainer may be about to update"
        admission.resume()
    assert admission.version == 0


def test_groups_that_extra_updates_made_too_old_restart_finished_ones_last():
    admission = GroupAdmission(2, 1)
    for _ in range(4):
        admission.begin()
    admission.finish(3)
    admission.update(1)
    assert admission.overdue == [1, 2], "2 of the 4 can leave in time: the finished one, and the oldest"
    for number in admission.overdue:
        admission.restart(number)
    assert not admission.overdue
    admission.update(2)
    assert admission.take() is None
    assert admission.overdue == [0, 3], "both are too old"


def test_a_finished_group_that_is_too_old_never_leaves():
    admission = GroupAdmission(1, 0)
    admission.finish(admission.begin())
    admission.update(1)
    assert admission.take() is None
    assert admission.overdue == [0]
    admission.restart(0)
    admission.finish(0)
    assert admission.take() == [0]


def test_the_last_batch_is_short_and_an_empty_one_follows():
    admission = GroupAdmission(3, 1)
    admission.end()
    assert admission.take() == []
    admission = GroupAdmission(3, 1)
    numbers = [admission.begin() for _ in range(4)]
    admission.end()
    assert not admission.can_begin
    for number in numbers[:3]:
        admission.finish(number)
    assert admission.take() == [0, 1, 2]
    assert admission.take() is None, "group 3 is not finished"
    admission.finish(3)
    assert [admission.take(), admission.take(), admission.take()] == [[3], [], []]


def test_without_a_bound_on_age_max_begun_bounds_the_groups():
    admission = GroupAdmission(2, None, max_begun=3)
    numbers = [admission.begin() for _ in range(3)]
    assert not admission.can_begin
    for number in numbers[1:]:
        admission.finish(number)
    for version in range(1, 100):
        admission.update(version)
    assert not admission.overdue
    assert admission.take() == [1, 2]
    assert not admission.can_begin
    admission.update(100)
    assert [admission.begin(), admission.begin()] == [3, 4]
    assert not admission.can_begin
    unbounded = GroupAdmission(1, None)
    assert [unbounded.begin() for _ in range(1000)] == list(range(1000))
    assert unbounded.can_begin


MISUSES: list[tuple[Callable[[GroupAdmission], Any], str]] = [
    (lambda admission: admission.finish(0), "group 0 is finished already"),
    (lambda admission: admission.finish(9), "group 9 never began"),
    (lambda admission: admission.restart(-1), "group -1 never began"),
    (lambda admission: (admission.take(), admission.drop(0)), "group 0 has left or was dropped"),
    (lambda admission: admission.update(5), "above 5; got 5"),
]


@pytest.mark.parametrize(("misuse", "words"), MISUSES)
def test_misuse_is_an_error(misuse: Callable[[GroupAdmission], Any], words: str):
    admission = GroupAdmission(1, 1, version=5)
    admission.finish(admission.begin())
    with pytest.raises(ValueError, match=words):
        misuse(admission)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1), "groups_per_batch must be 1 or more, and whole; got 0"),
        ((1.5, 1), "groups_per_batch must be 1 or more"),
        ((1, -1), "max_staleness must be 0 or more, and whole, or None for no limit; got -1"),
        ((1, 1, -1), "version must be 0 or more, and whole; got -1"),
    ],
)
def test_wrong_numbers_are_refused(arguments: tuple[Any, ...], words: str):
    with pytest.raises(ValueError, match=words):
        GroupAdmission(*arguments)
    with pytest.raises(ValueError, match=r"max_begun must be at least groups_per_batch, 4, .*; got 3"):
        GroupAdmission(4, 1, max_begun=3)
