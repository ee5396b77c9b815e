"""`RolloutLoop`: begins groups of trajectories, replaces failed ones, and hands out batches of whole groups.

It lives on one event loop. `Admission` and `Capacity` decide what may begin and leave; this module acts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrl_agentic.collectors.admission import Admission
from torchrl_agentic.collectors.agent import Agent
from torchrl_agentic.collectors.capacity import Capacity, Slot
from torchrl_agentic.collectors.failures import FailureKind, FailurePolicy, failure_kind
from torchrl_agentic.collectors.requests import Requests, is_cancelling
from torchrl_agentic.collectors.span import Cause, Span
from torchrl_agentic.collectors.stats import CANCELLED, CollectorStats
from torchrl_agentic.collectors.task import Task, Trajectory
from torchrl_agentic.collectors.trajectory import Reward, TrajectoryRun
from torchrl_agentic.dispatch.threads import WorkerThreads

logger = logging.getLogger(__name__)

CLOSE_LIMIT_S = 30.0
"""Seconds that cancelled trajectories may take to end, longer than tools may take to close."""


class CollectorError(RuntimeError):
    """The collector cannot go on; the cause is the failure that ended it."""


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Options of a `RolloutLoop`; see `AgentCollector` for their meaning."""

    group_size: int = 1
    max_new_tokens: int = 1024
    trajectory_timeout: float | None = None
    quorum: int | None = None
    reward: Reward | None = None
    speculate: bool = False


@dataclass(eq=False, slots=True)
class Group:
    """The trajectories of one task.

    Attributes:
        number: Number of the group, counted from 0.
        task: The task.
        place: Number of the task in the order of the tasks, counted from 0.
        done: Trajectories that have ended, in the order of their index once the group is whole.
        running: Tasks of the others, by index.
        attempts: Number of trajectories that failed and were replaced.
        is_whole: Whether it waits for its batch or has left; further trajectories do not count.
    """

    number: int
    task: Task
    place: int
    done: list[Trajectory] = field(default_factory=list[Trajectory])
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, asyncio.Task[None]])
    attempts: int = 0
    is_whole: bool = False


class RolloutLoop:
    """The trajectories of a collector, on the event loop that is running when it is created.

    Args:
        agent: What the trajectories share.
        requests: Requests to the engine.
        tasks: Tasks or rows of a data set, sync or async, read as they are needed.
        admission: Decides which groups begin and leave.
        capacity: Decides how many trajectories run at once.
        failures: Decides what follows when a trajectory fails.
        stats: Gets everything that happens.
        prefix: Part of the names of trajectories that is unique in the process.
        max_finished: Number of whole groups that may wait for their batch before no more begin.
        skipped: Numbers of the tasks that are skipped, counted from 0 in the order of `tasks`.
        options: See `LoopOptions`.
    """

    def __init__(
        self,
        agent: Agent,
        requests: Requests,
        tasks: Iterable[Any] | AsyncIterable[Any],
        *,
        admission: Admission,
        capacity: Capacity,
        failures: FailurePolicy,
        stats: CollectorStats,
        prefix: str,
        max_finished: int,
        skipped: frozenset[int] = frozenset(),
        options: LoopOptions,
    ) -> None:
        self._agent, self._requests, self._tasks = agent, requests, tasks
        self._admission, self._capacity, self._stats = admission, capacity, stats
        self._failures = failures
        self._prefix, self._max_finished, self._options = prefix, max_finished, options
        self._done_tasks = set(skipped)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._groups: dict[int, Group] = {}
        self._waiting: deque[tuple[Group, int]] = deque()
        self._own_tasks: list[asyncio.Task[None]] = []
        self._trajectories: set[asyncio.Task[None]] = set()
        self._reader = WorkerThreads(1)
        self._last_failure: BaseException | None = None
        self._has_whole_groups = False
        self._error: BaseException | None = None
        self._taking = asyncio.Lock()
        self._is_closed = False

    async def next_batch(self) -> list[Group] | None:
        """Return the groups of the next batch, oldest first, as soon as it may leave; None after the last.

        Raises:
            CollectorError: If a failure ended the collector, or the tasks raise.
        """
        async with self._taking:
            if not self._own_tasks and not self._is_closed:
                self._own_tasks = [
                    self._loop.create_task(self._begin_groups()),
                    self._loop.create_task(self._start_trajectories()),
                ]
            self._follow_version()
            self._admission.resume()
            self._changed.set()
            self._stats.wait_began()
            taken: list[int] | None = None

            def is_ready() -> bool:
                nonlocal taken
                if self._error is None and not self._is_closed:
                    taken = self._take()
                return taken is not None or self._error is not None or self._is_closed

            try:
                await self._until(is_ready)
                groups = [self._groups.pop(number) for number in taken or ()]
                self._leave(groups)
            finally:
                self._stats.wait_ended()
            if self._error is None and not groups and not self._is_closed and not self._has_whole_groups:
                self._error = self._last_failure  # every group was dropped
            if self._error is not None:
                raise CollectorError(f"the collector ended: {self._error}") from self._error
            return groups or None

    def _leave(self, groups: Sequence[Group]) -> None:
        """Count groups that leave in a batch."""
        self._done_tasks.update(group.place for group in groups)
        trajectories = [trajectory for group in groups for trajectory in group.done]
        if not trajectories:
            return
        versions: Counter[int] = Counter()
        for trajectory in trajectories:
            if trajectory.ledger is not None:
                versions.update(trajectory.ledger.versions)
        del versions[-1]
        now = self._admission.version
        ages = {now - version: count for version, count in versions.items()}
        names = [trajectory.name for trajectory in trajectories]
        self._stats.batch(names, tokens=versions.total(), ages=ages)

    def tasks_done(self) -> set[int]:
        """Return the numbers of the tasks whose groups have left or were dropped."""
        return set(self._done_tasks)

    def _take(self) -> list[int] | None:
        self._follow_version()
        for number in self._admission.overdue:
            self._restart(self._groups[number])
        return self._admission.take()

    async def update(self, weights: Any, push: Callable[[], object] | None = None) -> int:
        """Load new weights; what was handed out counts as trained on, and running trajectories continue.

        Args:
            weights: As the engine takes them.
            push: Loads the weights instead of the engine; see `Requests.update`.

        Returns:
            The new policy version.
        """
        start = self._loop.time()
        version = await self._requests.update(weights, push)
        self._follow_version()
        self._stats.add(Span("update", start, self._loop.time(), version=version))
        self._changed.set()
        return version

    async def close(self) -> None:
        """Cancel all trajectories, and close what they hold open; may be called again."""
        self._is_closed = True
        self._changed.set()
        running = {*self._trajectories, *self._own_tasks}
        for task in running:
            task.cancel()
        if running:
            _, late = await asyncio.wait(running, timeout=CLOSE_LIMIT_S)
            if late:
                logger.error("%d trajectories do not end although they were cancelled", len(late))
        self._groups.clear()
        self._waiting.clear()
        await self._agent.close()
        self._reader.close()
        self._stats.stop()

    def _follow_version(self) -> None:
        """Pass updates on to the admission, also those that another collector made."""
        version = self._requests.engine.version
        if version > self._admission.version:
            self._admission.update(version)

    async def _until(self, is_true: Callable[[], bool]) -> None:
        """Wait until a condition holds that changes only with `_changed`."""
        while not is_true():
            self._changed.clear()
            await self._changed.wait()

    def _fail(self, error: BaseException) -> None:
        """End the collector; the next request for a batch raises the error."""
        self._error = self._error or error
        self._changed.set()

    async def _begin_groups(self) -> None:
        """Begin groups as admission and capacity allow, until the tasks end."""
        try:
            async with contextlib.aclosing(_each(self._tasks, self._reader)) as rows:
                number = -1
                while True:
                    start = self._loop.time()
                    await self._until(self._may_begin)
                    if (row := await anext(rows, _END)) is _END:
                        break
                    number += 1
                    if number not in self._done_tasks:
                        self._begin_group(number, row, start)
            self._admission.end()
            self._changed.set()
        except asyncio.CancelledError as error:
            if is_cancelling():
                raise
            self._fail(error)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self._fail(error)

    def _begin_group(self, number: int, row: Any, start: float) -> None:
        """Begin the group of a task; drop a task that cannot be read."""
        try:
            task = Task.of(row, number)
        except (TypeError, ValueError) as error:
            self._refuse(number, error)
            return
        self._stats.add(Span("admission", start, self._loop.time(), name=task.name))
        self._follow_version()
        group = Group(self._admission.begin(), task, number)
        self._groups[group.number] = group
        self._waiting.extend((group, index) for index in range(self._options.group_size))
        self._changed.set()

    def _refuse(self, number: int, error: Exception) -> None:
        """Drop a task that cannot be read, or end the collector."""
        self._stats.failure("task")
        self._last_failure = error
        verdict = self._failures.fail(-1, 0, "task")
        self._done_tasks.add(number)
        if verdict.action == "raise":
            raise error
        logger.error("task %d is dropped, since %s: %s", number, verdict.reason, error)
        self._stats.count("dropped")

    def _may_begin(self) -> bool:
        return (
            not self._waiting
            and self._capacity.free > 0
            and self._admission.can_begin
            and self._admission.finished < self._max_finished
        )

    async def _start_trajectories(self) -> None:
        """Start the trajectories of groups that have begun, as the capacity allows."""
        while True:
            await self._until(lambda: bool(self._waiting) and self._capacity.free > 0)
            group, index = self._waiting.popleft()
            if self._groups.get(group.number) is group:
                slot = self._capacity.enter()
                task = self._loop.create_task(self._run(group, index, slot))
                group.running[index] = task
                self._trajectories.add(task)
                task.add_done_callback(self._trajectories.discard)
                # A task that is cancelled before its first step never runs its own cleanup.
                task.add_done_callback(lambda _, slot=slot: slot.leave())
            self._changed.set()
            await asyncio.sleep(0)  # the trajectory may ask the engine before the next one starts

    async def _run(self, group: Group, index: int, slot: Slot) -> None:
        """Run one trajectory of a group, and decide what follows from its end."""
        attempt = f"~{group.attempts}" if group.attempts else ""
        name = f"{group.task.name}/{group.number}.{index}{attempt}@{self._prefix}"
        self._stats.trajectory_began(name, str(group.number))
        run = TrajectoryRun(
            self._agent,
            self._requests,
            group.task,
            name=name,
            index=index,
            max_new_tokens=self._options.max_new_tokens,
            reward=self._options.reward,
            speculate=self._options.speculate,
            observer=_Observer(self._stats, slot, self._changed.set),
        )
        reason, is_kept, failure = "", False, None
        try:
            async with asyncio.timeout(self._options.trajectory_timeout):
                trajectory = await run.run()
            if self._is_open(group):
                reason, is_kept = trajectory.reason, True
                group.done.append(trajectory)
        except asyncio.CancelledError as error:
            if is_cancelling():
                raise
            failure = failure_kind(error, run.phase), error
            reason = failure[0]
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            failure = failure_kind(error, run.phase), error
            reason = failure[0]
        finally:
            slot.leave()
            group.running.pop(index, None)
            if not reason:  # cancelled
                reason = CANCELLED if group.is_whole else "abandoned"
            self._stats.trajectory_ended(name, reason, is_kept=is_kept)
            self._changed.set()
        if not self._is_open(group):
            return
        if failure is not None:
            self._handle_failure(group, index, name, *failure)
            return
        self._failures.succeed()
        if len(group.done) >= (self._options.quorum or self._options.group_size):
            self._complete(group)

    def _is_open(self, group: Group) -> bool:
        """Return True if a group still takes trajectories."""
        return self._groups.get(group.number) is group and not group.is_whole

    def _complete(self, group: Group) -> None:
        """Mark a group as whole; with a quorum, cancel those that are not needed."""
        group.is_whole = self._has_whole_groups = True
        for task in list(group.running.values()):
            task.cancel()
        self._forget_waiting(group)
        group.done.sort(key=lambda trajectory: trajectory.index)
        self._failures.forget(group.number)
        self._admission.finish(group.number)

    def _handle_failure(
        self, group: Group, index: int, name: str, kind: FailureKind, error: BaseException
    ) -> None:
        """Replace a failed trajectory, drop its group, or end the collector."""
        self._stats.failure(kind)
        self._last_failure = error
        verdict = self._failures.fail(group.number, index, kind)
        if verdict.action == "raise":
            self._fail(error)
        elif verdict.action == "replace":
            logger.warning("trajectory %s failed (%s; %s): %r", name, kind, verdict.reason, error)
            group.attempts += 1
            self._stats.count("replaced")
            self._waiting.appendleft((group, index))
        else:
            logger.error(
                "trajectory %s failed (%s); its group is dropped, since %s",
                name,
                kind,
                verdict.reason,
                exc_info=error,
            )
            self._drop(group)

    def _drop(self, group: Group) -> None:
        """Drop a group; the next one takes its place."""
        del self._groups[group.number]
        self._done_tasks.add(group.place)
        self._abandon(group)
        self._admission.drop(group.number)
        self._stats.count("dropped")

    def _restart(self, group: Group) -> None:
        """Begin a group again that has become too old."""
        new = self._groups[group.number] = Group(
            group.number, group.task, group.place, attempts=group.attempts + 1
        )
        self._abandon(group)
        self._failures.forget(group.number)
        self._admission.restart(group.number)
        self._waiting.extend((new, index) for index in range(self._options.group_size))
        self._changed.set()

    def _abandon(self, group: Group) -> None:
        """Cancel the trajectories of a group, and forget those that have ended."""
        for task in list(group.running.values()):
            task.cancel()
        self._forget_waiting(group)
        for trajectory in group.done:
            self._stats.trajectory_ended(trajectory.name, trajectory.reason, is_kept=False)

    def _forget_waiting(self, group: Group) -> None:
        self._waiting = deque(item for item in self._waiting if item[0] is not group)


class _Observer:
    """Passes what a trajectory does on to the statistics and to the capacity."""

    __slots__ = ("_notify", "_slot", "_stats")

    def __init__(self, stats: CollectorStats, slot: Slot, notify: Callable[[], None]) -> None:
        self._stats, self._slot, self._notify = stats, slot, notify

    def doing(self, name: str, cause: Cause, detail: str = "") -> None:
        """Note what a trajectory does from now on."""
        if cause == "engine":
            self._slot.ask()
        self._stats.doing(name, cause, detail)

    def add(self, span: Span) -> None:
        """Add a span that has ended."""
        if span.cause == "engine":
            self._slot.answered()
            self._notify()  # another trajectory may ask the engine now
        self._stats.add(span)


async def _each(tasks: Iterable[Any] | AsyncIterable[Any], threads: WorkerThreads) -> AsyncGenerator[Any]:
    """Yield the items of a sync or async iterable; one that may block is read on a thread."""
    if isinstance(tasks, AsyncIterable):
        async for item in tasks:
            yield item
    elif isinstance(tasks, Sequence):
        for item in tasks:
            yield item
    else:
        iterator = await threads.run(lambda: iter(tasks))
        while (item := await threads.run(lambda: next(iterator, _END))) is not _END:
            yield item


_END: Any = object()
