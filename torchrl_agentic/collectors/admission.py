"""Decide which groups begin, how many trajectories are open, and which groups leave as a batch.

`GroupAdmission` keeps groups from becoming too old; `Capacity` keeps the engine busy while tools run.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from types import TracebackType
from typing import Literal

from torchrl_agentic.errors import check_count

MAX_FACTOR = 16
"""Largest number of open trajectories with "auto", as a multiple of the engine's concurrent requests."""
HEADROOM = 1 / 8
"""Share of the engine's concurrent requests that should wait in it, so that it never runs short."""
GROWTH = 1 / 2
"""How much an answer raises the limit if it leaves the engine short of requests, in trajectories."""
DECAY = 1 / 16
"""How much an answer lowers a limit that is not used, in trajectories."""


class GroupAdmission:
    """Bound the age of groups without discarding any and without preferring short ones.

    The age of a group is the policy version at which it is handed out, less the version at which it began.
    Each weight update is expected to follow one batch of `B = groups_per_batch` groups. Three rules together
    keep every age within `max_staleness`:

    1. A group begins only while fewer than `(1 + max_staleness) * B` groups have begun and are not trained
       on. A group counts as trained on at the weight update behind its batch, not when it is handed out.
    2. The oldest finished groups leave first.
    3. A batch leaves only if the groups that stay can meet their deadlines: for each k, at most `k * B` of
       them are due within k updates (earliest deadline first). Otherwise the batch waits for older groups.

    If all groups are finished, rule 3 holds for the oldest `B` of them, so that waiting always ends. The
    first n batches contain every group that began `max_staleness` updates earlier, and no other than the
    first `(n + max_staleness) * B` groups, dropped ones left out. So at most `max_staleness * B` groups are
    exchanged for later ones, however many batches there are: the lengths that are trained on are those that
    began. With `max_staleness=0`, the batches are those of a synchronous loop.

    The caller takes a batch when the trainer asks for it, and no earlier: a batch that waits becomes older.

    Args:
        groups_per_batch: Number of groups in a batch.
        max_staleness: Largest age of a group in updates; None for no bound.
        version: Current policy version.
        max_begun: Largest number of groups that have begun and are not trained on, at least
            `groups_per_batch`; None for the bound that `max_staleness` implies, or no bound if that is None
            too.

    Attributes:
        version: Current policy version.
        begun: Number of groups that have begun so far, dropped ones included.
        handed_out: Number of groups handed out so far.
        dropped: Number of groups dropped so far.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If a number is too small or not whole.
    """

    def __init__(
        self,
        groups_per_batch: int,
        max_staleness: int | None,
        version: int = 0,
        *,
        max_begun: int | None = None,
    ) -> None:
        check_count("groups_per_batch", groups_per_batch, optional=False)
        check_count("max_staleness", max_staleness, least=0)
        check_count("version", version, optional=False, least=0)
        check_count("max_begun", max_begun)
        if max_begun is not None and max_begun < groups_per_batch:
            raise ValueError(
                f"max_begun must be at least groups_per_batch, {groups_per_batch}, or no batch is ever "
                f"complete; got {max_begun}"
            )
        self.version = int(version)
        self.begun = 0
        self.handed_out = 0
        self.dropped = 0
        self._batch = int(groups_per_batch)
        self._max_staleness = None if max_staleness is None else int(max_staleness)
        bounds = [] if max_begun is None else [int(max_begun)]
        if self._max_staleness is not None:
            bounds.append((1 + self._max_staleness) * self._batch)
        self._max_begun = min(bounds, default=None)
        self._trained = 0
        self._versions: dict[int, int] = {}
        """Version at which each group began that has not left, by number."""
        self._sizes: Counter[int] = Counter()
        """Number of these groups by version."""
        self._finished: list[tuple[int, int]] = []
        """(version, number) of each of these groups that is finished, sorted: the oldest is first."""
        self._is_ended = False

    @property
    def finished(self) -> int:
        """Number of groups that are finished and have not left."""
        return len(self._finished)

    @property
    def unfinished(self) -> int:
        """Number of groups that have begun and are neither finished nor dropped."""
        return len(self._versions) - len(self._finished)

    @property
    def can_begin(self) -> bool:
        """True if a new group may begin now."""
        if self._is_ended:
            return False
        return self._max_begun is None or self.begun - self.dropped - self._trained < self._max_begun

    def begin(self) -> int:
        """Begin a group under the current policy version.

        Returns:
            Number of the group: 0, 1, and so on.

        Raises:
            RuntimeError: If `can_begin` is False.
        """
        if not self.can_begin:
            reason = (
                "the tasks have ended" if self._is_ended else f"{self._max_begun} groups are not trained on"
            )
            raise RuntimeError(f"no group may begin now, because {reason}; check can_begin first")
        number = self.begun
        self.begun += 1
        self._enter(number)
        return number

    def restore(self, version: int) -> int:
        """Enter a group that began in an earlier process, whatever `can_begin` says.

        Args:
            version: Policy version at which it began, at most the current one.

        Returns:
            Number of the group, as `begin` counts them.

        Raises:
            ValueError: If `version` is above the current one, or negative.
        """
        check_count("version", version, optional=False, least=0)
        if version > self.version:
            raise ValueError(f"a group that began has at most the version {self.version}; got {version}")
        number = self.begun
        self.begun += 1
        self._enter(number, version)
        return number

    def finish(self, number: int) -> None:
        """Record that all trajectories of a group have ended, so that it may leave.

        Args:
            number: Number of the group.

        Raises:
            ValueError: If the group is finished already, has left or never began.
        """
        entry = (self._version(number), number)
        if self._place(entry) is not None:
            raise ValueError(f"group {number} is finished already")
        insort(self._finished, entry)

    def drop(self, number: int) -> None:
        """Abandon a group; a later group takes its place in a batch.

        Args:
            number: Number of the group, finished or not.

        Raises:
            ValueError: If the group has left or never began.
        """
        self._remove(number)
        self.dropped += 1

    def restart(self, number: int) -> None:
        """Begin a group again under the current policy version, so that its age is 0.

        Args:
            number: Number of the group, finished or not.

        Raises:
            ValueError: If the group has left or never began.
        """
        self._remove(number)
        self._enter(number)

    def age(self, number: int) -> int:
        """Return the age that a group would have if it were handed out now, in updates.

        Args:
            number: Number of a group that has not left.
        """
        return self.version - self._version(number)

    def take(self) -> list[int] | None:
        """Hand out the next batch.

        Returns:
            Numbers of its groups, oldest first; None if no batch may leave now. After `end`, the last batch
            may be short, and an empty one means that all groups have left.
        """
        if self.finished < self._batch and not (self._is_ended and not self.unfinished):
            return None
        batch = self._finished[: self._batch]
        if not self._leaves_time(batch):
            return None
        del self._finished[: self._batch]
        for _, number in batch:
            self._forget(number)
        self.handed_out += len(batch)
        return [number for _, number in batch]

    def update(self, version: int) -> None:
        """Record a weight update: the groups handed out so far count as trained on.

        Args:
            version: The new policy version.

        Raises:
            ValueError: If `version` is not above the current one.
        """
        check_count("version", version, optional=False)
        if version <= self.version:
            raise ValueError(f"an update leads to a version above {self.version}; got {version}")
        self.version = int(version)
        self._trained = self.handed_out

    def resume(self) -> None:
        """Record that the trainer asks for a batch without an update in between.

        The weights are the same, so the groups handed out so far need not count any longer.
        """
        self._trained = self.handed_out

    def end(self) -> None:
        """Record that there are no more tasks: no group begins from now on."""
        self._is_ended = True

    @property
    def overdue(self) -> list[int]:
        """Groups that must restart, because they cannot all be handed out in time, oldest first.

        There are such groups only after more than one update since the previous batch. Finished groups are
        kept rather than unfinished ones, and older groups rather than newer ones.
        """
        if self._max_staleness is None or self._is_feasible(self._sizes, self.version):
            return []
        finished = {number for _, number in self._finished}
        keep: Counter[int] = Counter()
        late: list[int] = []
        by_value = sorted(
            self._versions, key=lambda number: (number not in finished, self._versions[number], number)
        )
        for number in by_value:
            version = self._versions[number]
            keep[version] += 1
            if not self._is_feasible(keep, self.version):
                keep[version] -= 1
                late.append(number)
        return sorted(late, key=lambda number: (self._versions[number], number))

    def _leaves_time(self, batch: list[tuple[int, int]]) -> bool:
        """Check that a batch is young enough, and that the others can be handed out after later updates."""
        if self._max_staleness is None or not batch:
            return True
        if self.version - batch[0][0] > self._max_staleness:
            return False
        return self._is_feasible(self._sizes - Counter(version for version, _ in batch), self.version + 1)

    def _is_feasible(self, sizes: Counter[int], first: int) -> bool:
        """Check that groups meet their deadlines if one batch leaves at each version from `first` on."""
        assert self._max_staleness is not None
        due = 0
        for version in sorted(sizes):
            due += sizes[version]
            if due > max(0, version + self._max_staleness - first + 1) * self._batch:
                return False
        return True

    def _enter(self, number: int, version: int | None = None) -> None:
        version = self.version if version is None else int(version)
        self._versions[number] = version
        self._sizes[version] += 1

    def _remove(self, number: int) -> None:
        """Remove a group that has not left."""
        place = self._place((self._version(number), number))
        if place is not None:
            del self._finished[place]
        self._forget(number)

    def _forget(self, number: int) -> None:
        version = self._versions.pop(number)
        self._sizes[version] -= 1
        if not self._sizes[version]:
            del self._sizes[version]

    def _version(self, number: int) -> int:
        """Return the version at which a group began that has not left."""
        if number not in self._versions:
            state = "has left or was dropped" if 0 <= number < self.begun else "never began"
            raise ValueError(f"group {number} {state}")
        return self._versions[number]

    def _place(self, entry: tuple[int, int]) -> int | None:
        """Return the index of a finished group in `_finished`, or None if the group is not finished."""
        place = bisect_left(self._finished, entry)
        return place if place < len(self._finished) and self._finished[place] == entry else None


class Capacity:
    """Bound the number of open trajectories.

    A trajectory heads for the engine when it begins, is away while its tools, simulated user or reward run,
    and returns to the engine until it ends. With "auto", trajectories begin while fewer than
    `engine_concurrent * (1 + HEADROOM)` are at the engine, whatever share of their time they are away.

    That alone would open more and more of them while tools hang, and flood the engine when all return. So a
    limit on open trajectories grows as slowly as it must: by `GROWTH` with each answer that leaves the engine
    short of requests. Since answers come from requests, the growth ends when nothing returns from the tools:
    n requests lead to n / (1 - GROWTH) answers, that is, to n more trajectories. While tools work, the number
    doubles with each round of calls until the engine is busy. A limit that is not used decays.

    No clock is involved. If the KV cache of the engine holds fewer requests than it works on at once, fewer
    are wanted: `RequestPermits` finds out how many fit.

    Args:
        limit: Largest number of open trajectories, or "auto".
        engine_concurrent: Number of requests that the engine works on at once.

    Attributes:
        open: Number of trajectories that have begun and not ended.
        at_engine: Number of open trajectories that are at the engine or head for it.
        max_open: Largest number of open trajectories: `limit`, or `MAX_FACTOR * engine_concurrent`.
        fitting: Number of requests that the KV cache of the engine holds; None: at least `engine_concurrent`.
    """

    def __init__(self, limit: int | Literal["auto"], *, engine_concurrent: int) -> None:
        check_count("engine_concurrent", engine_concurrent, optional=False)
        self._is_fixed = limit != "auto"
        if limit != "auto":
            if isinstance(limit, str):
                raise ValueError(f"limit is a number of trajectories or 'auto'; got {limit!r}")
            check_count("limit", limit, optional=False)
        self._concurrent = int(engine_concurrent)
        self.open = 0
        self.at_engine = 0
        self.fitting: int | None = None
        self.max_open = MAX_FACTOR * self._concurrent if limit == "auto" else int(limit)
        self._limit = float(self.max_open if self._is_fixed else self.wanted)

    @property
    def wanted(self) -> int:
        """Number of trajectories that should be at the engine; more than it works on at once."""
        fitting = self._concurrent if self.fitting is None else min(self.fitting, self._concurrent)
        return math.ceil(fitting * (1 + HEADROOM))

    @property
    def limit(self) -> int:
        """Number of trajectories that may be open now; "auto" adapts it."""
        return int(self._limit)

    @property
    def free(self) -> int:
        """Number of further trajectories that may begin now."""
        room = self.limit - self.open
        if not self._is_fixed:
            room = min(room, self.wanted - self.at_engine)
        return max(0, room)

    def enter(self) -> TrajectorySlot:
        """Begin a trajectory, which heads for the engine.

        Raises:
            RuntimeError: If `free` is 0.
        """
        if not self.free:
            raise RuntimeError(f"no trajectory may begin now, because {self.open} are open; check free first")
        self.open += 1
        self.at_engine += 1
        return TrajectorySlot(self)

    def observe_answer(self) -> None:
        """Adapt the limit after an answer, which `TrajectorySlot.answered` reports."""
        if self._is_fixed:
            return
        if self._limit >= self.open + 1:
            self._limit = max(self._limit - DECAY, self.open + 1, self.wanted)
        elif self.at_engine < self.wanted:
            self._limit = min(self._limit + GROWTH, self.max_open)


class TrajectorySlot:
    """Place of one open trajectory in a `Capacity`, which `Capacity.enter` returns.

    Each method may be called in any state. As a context manager, it leaves at the end of the block.

    Args:
        capacity: The capacity that the place is part of.

    Attributes:
        is_open: Whether the trajectory has not ended.
        is_at_engine: Whether the trajectory is at the engine or heads for it.
    """

    __slots__ = ("_capacity", "is_at_engine", "is_open")

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self.is_open = True
        self.is_at_engine = True

    def ask(self) -> None:
        """Record that the trajectory asks the engine."""
        if self.is_open and not self.is_at_engine:
            self.is_at_engine = True
            self._capacity.at_engine += 1

    def answered(self) -> None:
        """Record that the engine answered, and the trajectory is away until it asks again.

        An answer that a weight update aborted is no answer: the trajectory stays at the engine.
        """
        if self.is_at_engine:
            self._away()
            self._capacity.observe_answer()

    def leave(self) -> None:
        """Record that the trajectory ended, for whatever reason."""
        if self.is_open:
            self._away()
            self.is_open = False
            self._capacity.open -= 1

    def _away(self) -> None:
        if self.is_at_engine:
            self.is_at_engine = False
            self._capacity.at_engine -= 1

    def __enter__(self) -> TrajectorySlot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
