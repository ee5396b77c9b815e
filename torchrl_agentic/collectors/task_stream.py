"""`TaskStream`: tasks for training, epoch after epoch, in an order that can be resumed."""

from __future__ import annotations

import functools
import hashlib
import logging
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torchrl_agentic.errors import check_count
from torchrl_agentic.trajectory.task import Task

logger = logging.getLogger(__name__)
KEPT_GROUPS = 16
"""Number of groups of a task whose rewards a `TaskStream` keeps one by one."""


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a `TaskStream`, as its curriculum gets it.

    Attributes:
        epoch: Number of the epoch, counted from 0.
        n_read: Number of tasks read so far, in all epochs.
        tasks: The tasks that are to come in this epoch, in order.
        rewards: Name of a task → the rewards of each of its last `KEPT_GROUPS` groups, in the order in which
            they left. Tasks without a group are missing.
        rng: Random numbers that depend only on the seed of the stream and on `n_read`.
        means: Name of a task → the mean reward of all of its trajectories so far. Tasks without one are
            missing.
    """

    epoch: int
    n_read: int
    tasks: tuple[Task, ...]
    rewards: Mapping[str, Sequence[Sequence[float]]]
    rng: random.Random
    means: Mapping[str, float]

    def mean_reward(self, task: Task) -> float | None:
        """Return the mean reward of all trajectories of a task so far; None before its first group."""
        return self.means.get(task.name)


class _Rewards:
    """The rewards of one task: those of its last groups, and the sum of all."""

    __slots__ = ("count", "groups", "total")

    def __init__(self, groups: Iterable[Sequence[float]] = (), total: float = 0.0, count: int = 0) -> None:
        self.groups: deque[list[float]] = deque((list(group) for group in groups), KEPT_GROUPS)
        self.total, self.count = total, count

    def add(self, rewards: Iterable[float]) -> None:
        """Add the rewards of a group."""
        group = [float(reward) for reward in rewards]
        self.groups.append(group)
        self.total += sum(group)
        self.count += len(group)

    def remove(self, rewards: Sequence[float]) -> None:
        """Remove the rewards of a group that was added as one of the last."""
        group = [float(reward) for reward in rewards]
        self.groups.reverse()
        self.groups.remove(group)  # the last one of those that are equal
        self.groups.reverse()
        self.total -= sum(group)
        self.count -= len(group)

    def copies(self) -> list[list[float]]:
        """Return copies of the rewards of the last groups."""
        return [[*group] for group in self.groups]


_STATE = frozenset((
    "tasks", "seed", "epoch", "n_read", "place", "has_begun", "order", "asked_at", "unfinished", "rewards",
    "reward_sums",
))  # fmt: skip
"""Keys of the state of a `TaskStream`."""

Curriculum: TypeAlias = Callable[[Progress], Sequence[Task] | None]
"""Returns the tasks to come in this epoch: reordered, left out or repeated; None leaves them as they are."""


class TaskStream(Iterable[Task]):
    """Tasks in epochs, each in a new random order that depends only on the seed and the number of the epoch.

    Pass it as `tasks=` to `AgentCollector`, through `TaskLoader` to an environment, or iterate over it. One
    reader at a time: a second iteration continues where the first one is.

    A state continues exactly where it was saved. A collector reads tasks ahead; those whose groups had not
    left in a batch are read again, in their order, before new ones. Outside of a collector, a task is done
    when it has been read. The state of the collector contains that of the stream.

    Args:
        tasks: The tasks, with distinct names, or rows for `Task.of`.
        epochs: Number of epochs; None: no end.
        seed: Seed of the orders; None: the order of `tasks` in every epoch.
        curriculum: Called with a `Progress` when an epoch begins, on the thread that reads. It returns the
            tasks to come in this epoch, in order: easy ones first, without those that are solved, hard ones
            twice. None leaves them as they are. If it leaves none at the beginning of an epoch, the stream
            ends.
        every: Call the curriculum also after each so many tasks, with the rest of the epoch; None: once per
            epoch.

    Attributes:
        tasks: The tasks.
        epoch: Number of the current epoch, counted from 0.
        n_read: Number of tasks read so far, in all epochs.

    Raises:
        ValueError: If there are no tasks, two have one name, or a number is out of range.
        TypeError: If a task or an argument has the wrong type.
    """

    def __init__(
        self,
        tasks: Iterable[Any],
        *,
        epochs: int | None = None,
        seed: int | None = 0,
        curriculum: Curriculum | None = None,
        every: int | None = None,
    ) -> None:
        check_count("epochs", epochs)
        check_count("every", every)
        if curriculum is not None and not callable(curriculum):
            raise TypeError(f"curriculum is a function of a Progress; got {type(curriculum).__name__}")
        if every is not None and curriculum is None:
            raise ValueError("every= is for a curriculum: pass curriculum= too")
        given = cast("object", tasks)
        if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            raise TypeError(f"tasks is an iterable of tasks or rows; got {type(tasks).__name__}")
        self.tasks = tuple(Task.of(row, number) for number, row in enumerate(tasks))
        if not self.tasks:
            raise ValueError("there are no tasks")
        self._indices = {task.name: index for index, task in enumerate(self.tasks)}
        if len(self._indices) < len(self.tasks):
            seen: set[str] = set()
            twice = next(task.name for task in self.tasks if task.name in seen or seen.add(task.name))
            raise ValueError(f"two tasks are named {twice!r}; load_tasks makes names distinct")
        self._epochs, self._seed = epochs, seed
        self._curriculum, self._every = curriculum, every
        self._reading, self._lock = threading.RLock(), threading.RLock()
        self.epoch = self.n_read = 0
        self._order: Sequence[int] | None = None  # of the epoch, as indices; None: it has not begun
        self._has_ended = False  # because the curriculum left no task
        self._is_altered = False  # by the curriculum, so that the seed does not determine the order
        self._place = self._asked_at = 0
        self._again: deque[tuple[int, int]] = deque()  # number and index of tasks that are read again
        self._unfinished: dict[int, int] = {}  # of the tasks that a reader has taken
        self._rewards: defaultdict[str, _Rewards] = defaultdict(_Rewards)

    def __iter__(self) -> Iterator[Task]:
        while (found := self._take(finishes=True)) is not None:
            yield found[1]

    def reader(self) -> TaskReader:
        """Return a reader that reads ahead: its tasks count as done when they leave; see `TaskReader`."""
        with self._reading, self._lock:
            self._again.extendleft(sorted(self._unfinished.items(), reverse=True))
            self._unfinished.clear()
        return TaskReader(functools.partial(self._take, finishes=False), self._leave, self._take_back)

    def record(self, name: str, rewards: Iterable[float]) -> None:
        """Keep the rewards of a group, for the curriculum; a collector does so by itself.

        Args:
            name: Name of the task.
            rewards: Rewards of the trajectories of the group.

        Raises:
            ValueError: If there is no such task.
        """
        if name not in self._indices:
            raise ValueError(f"there is no task {name!r} in this stream")
        with self._lock:
            self._rewards[name].add(rewards)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the rewards, as values for JSON."""
        with self._lock:
            return {
                "tasks": self._fingerprint(),
                "seed": self._seed,
                "epoch": self.epoch,
                "n_read": self.n_read,
                "place": self._place,
                "has_begun": self._order is not None,
                "order": [*self._order] if self._order is not None and self._is_altered else None,
                "asked_at": self._asked_at,
                "unfinished": [[*one] for one in sorted((*self._unfinished.items(), *self._again))],
                "rewards": {name: one.copies() for name, one in self._rewards.items()},
                "reward_sums": {name: [one.total, one.count] for name, one in self._rewards.items()},
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where a state was saved, with the seed of that time.

        Args:
            state_dict: Result of `state_dict`.

        Raises:
            ValueError: If the state is of a stream of other tasks, or of something else.
        """
        missing = _STATE - state_dict.keys()
        if missing:
            raise ValueError(f"this is no state of a TaskStream: it lacks {', '.join(sorted(missing))}")
        if state_dict["tasks"] != self._fingerprint():
            raise ValueError(
                f"the state is of other tasks: it was saved with {state_dict['tasks'][0]} tasks, and there "
                f"are {len(self.tasks)}, or their names or their order differ. Load the same data set in the "
                "same way, with the same limit and shuffle"
            )
        with self._reading, self._lock:
            self._seed = state_dict["seed"]
            self.epoch, self.n_read = state_dict["epoch"], state_dict["n_read"]
            self._place, self._asked_at = state_dict["place"], state_dict["asked_at"]
            order = state_dict["order"]
            self._is_altered = order is not None
            self._order = self._shuffled() if order is None and state_dict["has_begun"] else order
            self._unfinished.clear()
            self._again = deque((number, index) for number, index in state_dict["unfinished"])
            self._rewards.clear()
            for name, groups in state_dict["rewards"].items():
                self._rewards[name] = _Rewards(groups, *state_dict["reward_sums"][name])

    def _fingerprint(self) -> list[Any]:
        """Return the number of tasks, and a hash of their names."""
        names = "\0".join(task.name for task in self.tasks)
        return [len(self.tasks), hashlib.sha256(names.encode("utf-8", "surrogatepass")).hexdigest()[:16]]

    def _shuffled(self) -> list[int]:
        """Return the order of the epoch before the curriculum."""
        order = list(range(len(self.tasks)))
        if self._seed is not None:
            random.Random(f"{self._seed}/{self.epoch}").shuffle(order)
        return order

    def _leave(self, number: int, rewards: Sequence[float]) -> None:
        """Mark a task as done, and keep the rewards of its group."""
        with self._lock:
            index = self._unfinished.pop(number, None)
            if index is not None and rewards:
                self.record(self.tasks[index].name, rewards)

    def _take_back(self, number: int, name: str, rewards: Sequence[float]) -> None:
        """Mark a task as not done after all, and forget the rewards of its group."""
        with self._lock:
            self._unfinished[number] = self._indices[name]
            if rewards:
                self._rewards[name].remove(rewards)
                if not self._rewards[name].groups:
                    del self._rewards[name]

    def _take(self, *, finishes: bool) -> tuple[int, Task] | None:
        """Return number and value of the next task, or None after the last one.

        Args:
            finishes: Whether it is done at once, rather than when a reader says so.
        """
        with self._reading:
            if not self._again and not self._prepare():
                return None
            with self._lock:
                if self._again:
                    number, index = self._again.popleft()
                else:
                    assert self._order is not None
                    number, index = self.n_read, self._order[self._place]
                    self._place += 1
                    self.n_read += 1
                if not finishes:
                    self._unfinished[number] = index
            return number, self.tasks[index]

    def _prepare(self) -> bool:
        """Begin an epoch and ask the curriculum where that is due; return False after the last task."""
        while True:
            if self._order is None:
                if self._has_ended or (self._epochs is not None and self.epoch >= self._epochs):
                    return False
                order = self._ask(self._shuffled())
                if not order:
                    logger.warning("epoch %d: the curriculum left no task; the stream ends", self.epoch)
                    self._has_ended = True
                    return False
            elif self._every is not None and self.n_read - self._asked_at >= self._every:
                order = self._ask(self._order[self._place :])
            else:
                order = self._order
            if self._place < len(order):
                return True
            with self._lock:
                self.epoch, self._place, self._order, self._is_altered = self.epoch + 1, 0, None, False

    def _ask(self, rest: Sequence[int]) -> Sequence[int]:
        """Set and return the tasks to come in this epoch, after the curriculum has seen them."""
        order, is_altered = rest, self._place > 0 or self._is_altered
        if self._curriculum is not None and rest:
            with self._lock:
                rewards = {name: one.copies() for name, one in self._rewards.items()}
                means = {name: one.total / one.count for name, one in self._rewards.items() if one.count}
            rng = random.Random(f"{self._seed}/curriculum/{self.n_read}")
            tasks = tuple(self.tasks[index] for index in rest)
            chosen = self._curriculum(Progress(self.epoch, self.n_read, tasks, rewards, rng, means))
            if chosen is not None:
                order, is_altered = [self._index(task) for task in chosen], True
        if order or self._order is not None:
            with self._lock:
                self._order, self._place, self._asked_at = order, 0, self.n_read
                self._is_altered = is_altered
        return order

    def _index(self, task: Task) -> int:
        index = self._indices.get(task.name) if isinstance(cast("object", task), Task) else None
        if index is None:
            raise ValueError(f"the curriculum returned a task that is not in the stream: {task!r:.200}")
        return index


class TaskReader(Iterator[Task]):
    """Reads a `TaskStream` ahead: a task is done when `leave` says so, not when it is read.

    Args:
        take: Returns number and task of the next one; None after the last one.
        leave: Called with the number of a task that is done, and the rewards of its group.
        take_back: Called with number and name of a task that is not done after all, and the rewards of its
            group.
    """

    def __init__(
        self,
        take: Callable[[], tuple[int, Task] | None],
        leave: Callable[[int, Sequence[float]], None],
        take_back: Callable[[int, str, Sequence[float]], None],
    ) -> None:
        self._take, self._leave, self._take_back = take, leave, take_back
        self._numbers: list[int] = []

    def __next__(self) -> Task:
        found = self._take()
        if found is None:
            raise StopIteration
        self._numbers.append(found[0])
        return found[1]

    def number(self, place: int) -> int:
        """Return the number of a task in the stream, which is the same if it is read again.

        Args:
            place: Number of the task among those that this reader has read, counted from 0.
        """
        return self._numbers[place]

    def leave(self, place: int, rewards: Sequence[float] = ()) -> None:
        """Mark a task as done.

        Args:
            place: Number of the task among those that this reader has read, counted from 0.
            rewards: Rewards of its group; none if the group was dropped.
        """
        self._leave(self._numbers[place], rewards)

    def take_back(self, place: int, name: str, rewards: Sequence[float] = ()) -> None:
        """Mark a task as not done after all, because the consumer of its group was interrupted.

        Args:
            place: Number of the task among those that this reader has read, counted from 0.
            name: Name of the task.
            rewards: The rewards that `leave` got.
        """
        self._take_back(self._numbers[place], name, rewards)
