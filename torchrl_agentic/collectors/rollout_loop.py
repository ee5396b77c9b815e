"""`RolloutLoop`: begins groups of trajectories, replaces failed ones, and hands out batches of whole groups.

It lives on one event loop. `GroupAdmission` and `Capacity` decide what may begin and leave; this module acts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

from torchrl_agentic.collectors.admission import Capacity, GroupAdmission, TrajectorySlot
from torchrl_agentic.collectors.branching import Branch, Branching, Forking
from torchrl_agentic.collectors.collector_state import CollectorState, GroupState
from torchrl_agentic.collectors.done_tasks import DoneTasks
from torchrl_agentic.collectors.failure_log import FailureLog
from torchrl_agentic.collectors.failures import FailedTask, FailureKind, FailurePolicy, failure_kind
from torchrl_agentic.collectors.requests import Requests, is_cancelling
from torchrl_agentic.collectors.scored_record import Reward, record_again
from torchrl_agentic.collectors.stats import CollectorStats
from torchrl_agentic.collectors.task_stream import TaskStream
from torchrl_agentic.collectors.trajectory_run import TrajectoryRun
from torchrl_agentic.collectors.workers import Run, Runs, WorkerLost, WorkerRun, WorkersFailed
from torchrl_agentic.dispatch import Session
from torchrl_agentic.dispatch.event_loop import WorkerThreads
from torchrl_agentic.dispatch.user_code import describe, root_error
from torchrl_agentic.engines.base import EngineUnusable
from torchrl_agentic.records import Origin
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.trajectory.span import Cause, Span
from torchrl_agentic.trajectory.spec import TrajectorySpec
from torchrl_agentic.trajectory.task import Task
from torchrl_agentic.trajectory.training_rows import training_rows
from torchrl_agentic.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

CLOSE_LIMIT_S = 30.0
"""Seconds that cancelled trajectories may take to end, longer than tools may take to close."""
Phase: TypeAlias = Literal["task", "trajectory", "reward"]
_PHASES: tuple[Phase, ...] = get_args(Phase)
MAX_LOSSES = 3
"""Number of times that a trajectory may be lost with its worker before that counts as its failure."""


SHUT_DOWN = (
    "this collector was shut down, by shutdown(), aclose() or the end of its `with` block, before its tasks "
    "ended. Create a new AgentCollector; new.load_state_dict(old.state_dict()) skips the tasks that have left"
)


class CollectorError(RuntimeError):
    """The collector cannot go on: a failure ended it, which is the cause, or it was shut down."""


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Options of a `RolloutLoop`; see `AgentCollector` for their meaning."""

    group_size: int = 1
    max_new_tokens: int = 1024
    trajectory_timeout: float | None = None
    reward: Reward | None = None
    speculate: bool = False
    failure_hook: Callable[[FailedTask], object] | None = None
    branching: Branching | None = None


@dataclass(eq=False, slots=True)
class Group:
    """The trajectories of one task.

    Attributes:
        number: Number of the group, counted from 0.
        task: The task.
        place: Number of the task in the order of the tasks, counted from 0.
        label: Number of the group for its readers, the same in a run that is resumed.
        version: Policy version at which it began.
        done: Trajectories that have ended, in the order of their index once the group is whole.
        running: Tasks of the others, by their number, which is the index unless they are branches.
        attempts: Number of trajectories that failed and were replaced.
        losses: Number of times that a trajectory was lost with its worker, by index.
        again: Attempts of trajectories that begin again under their keys, by index: those that ran in an
            earlier process, or on a worker that died.
        runs: Those that run, by index, with their attempts: the value of `attempts` when they began.
        branches: Places of its trajectories in their trees, by number; empty if they never fork.
        n_begun: Number of trajectories with a number, branches included.
    """

    number: int
    task: Task
    place: int
    label: int
    version: int
    done: list[Trajectory] = field(default_factory=list[Trajectory])
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, asyncio.Task[None]])
    attempts: int = 0
    losses: Counter[int] = field(default_factory=Counter[int])
    again: dict[int, int] = field(default_factory=dict[int, int])
    runs: dict[int, tuple[int, Run]] = field(default_factory=dict[int, "tuple[int, Run]"])
    branches: dict[int, Branch] = field(default_factory=dict[int, Branch])
    n_begun: int = 0


class RolloutLoop:
    """The trajectories of a collector, on the event loop that is running when it is created.

    Args:
        spec: The stages, and what the trajectories share.
        requests: Requests to the engine.
        tasks: Tasks or rows of a data set, sync or async, read as they are needed. A `TaskStream` hears which
            groups have left, with their rewards.
        admission: Decides which groups begin and leave.
        capacity: Decides how many trajectories run at once.
        failures: Decides what follows when a trajectory fails.
        stats: Gets everything that happens.
        prefix: Part of the names of trajectories that is unique in the process.
        max_finished: Number of whole groups that may wait for their batch before no more begin.
        skipped: Numbers of the tasks that are skipped, counted from 0 in the order of `tasks`; None: no task.
        saved: State of an earlier process, whose groups are continued, or None.
        options: See `LoopOptions`.
        runs: Creates the trajectories; None: they run on this event loop.
    """

    def __init__(
        self,
        spec: TrajectorySpec,
        requests: Requests,
        tasks: Iterable[Any] | AsyncIterable[Any],
        *,
        admission: GroupAdmission,
        capacity: Capacity,
        failures: FailurePolicy,
        stats: CollectorStats,
        prefix: str,
        max_finished: int,
        skipped: DoneTasks | None = None,
        saved: CollectorState | None = None,
        options: LoopOptions,
        runs: Runs | None = None,
    ) -> None:
        self._saved = {} if saved is None else {one.label: one for one in saved.groups}
        """Groups of the earlier process that have not been taken over yet, by label, in its order."""
        self._restored = {one.label: admission.restore(one.version) for one in self._saved.values()}
        self._suffix = "" if saved is None else f"+{secrets.token_hex(3)}"
        """End of the names in a process that follows an earlier one, which may have used them already."""
        self._spec, self._requests = spec, requests
        self._runs = runs
        self._stream = tasks.reader() if isinstance(tasks, TaskStream) else None
        self._tasks = tasks if self._stream is None else self._stream
        self._admission, self._capacity, self._stats = admission, capacity, stats
        self._failures = failures
        self._prefix, self._max_finished, self._options = prefix, max_finished, options
        self._done_tasks = DoneTasks() if skipped is None else skipped.copy()
        self._loop = asyncio.get_running_loop()
        self._batch_changed, self._start_changed = asyncio.Event(), asyncio.Event()
        self._groups: dict[int, Group] = {}
        self._waiting: deque[tuple[Group, int]] = deque()
        self._own_tasks: list[asyncio.Task[None]] = []
        self._trajectories: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._reader = WorkerThreads(1)
        self._last_failure: BaseException | None = None
        self._has_whole_groups = False
        self._error: BaseException | None = None
        self._why = ""  # it ended with that error, if the error does not say it
        self._log = FailureLog(logger)
        self._taking = asyncio.Lock()
        self._returned: deque[Sequence[Group]] = deque()
        """Batches whose consumers were interrupted before they had them."""
        self._has_read_all = self._is_exhausted = self._is_closed = False

    async def next_batch(self) -> Sequence[Group] | None:
        """Return the groups of the next batch, oldest first, as soon as it may leave; None after the last.

        Raises:
            CollectorError: If a failure ended the collector, the tasks raise, or it was closed before they
                ended.
        """
        async with self._taking:
            if self._returned:
                groups = self._returned.popleft()
                self._finish_tasks(groups)
                return groups
            if not self._own_tasks and not self._is_closed:
                self._own_tasks = [
                    self._loop.create_task(self._begin_groups()),
                    self._loop.create_task(self._start_trajectories()),
                ]
                if self._requests.permits is not None:
                    self._own_tasks.append(
                        self._loop.create_task(self._requests.permits.follow(self._start_changed.set))
                    )
            self._follow_version()
            self._admission.resume()
            self._wake()
            self._stats.wait_began()
            taken: list[int] | None = None

            def is_ready() -> bool:
                nonlocal taken
                if self._error is None and not self._is_closed:
                    taken = self._take()
                return taken is not None or self._error is not None or self._is_closed

            try:
                await _until(is_ready, self._batch_changed)
                groups = [self._groups.pop(number) for number in taken or ()]
                self._leave(groups)
            finally:
                self._stats.wait_ended()
            if self._error is None and not groups and not self._is_closed:
                self._is_exhausted = True
                error = self._last_failure
                if error is not None and not self._has_whole_groups and self._options.failure_hook is None:
                    self._fail(error, f"all groups were dropped. {describe(error)}\n{error}")
            self.has_ended()
            return groups or None

    def has_ended(self) -> bool:
        """Return True if the tasks have ended and all batches have left.

        Raises:
            CollectorError: If a failure ended the collector, or it was closed before the tasks ended.
        """
        if self._error is not None:
            raise CollectorError(f"the collector ended: {self._why or self._error}") from self._error
        if self._is_closed and not self._is_exhausted:
            raise CollectorError(SHUT_DOWN)
        return self._is_exhausted

    def take_back(self, groups: Sequence[Group]) -> None:
        """Note that a consumer was interrupted before it had its batch, which the next request returns.

        Args:
            groups: The groups of the batch.
        """
        for group in groups:
            self._done_tasks.discard(group.place)
            if self._stream is not None:
                self._stream.take_back(group.place, group.task.name, _rewards(group))
        if not self._is_closed:
            self._returned.append(groups)

    def _leave(self, groups: Sequence[Group]) -> None:
        """Count groups that leave in a batch."""
        self._finish_tasks(groups)
        trajectories = [trajectory for group in groups for trajectory in group.done]
        if not trajectories:
            return
        versions: Counter[int] = Counter()
        for group in groups:
            for row in training_rows(group.done):
                versions.update(row.ledger.versions[row.start :])
        del versions[-1]
        now = self._admission.version
        ages = {now - version: count for version, count in versions.items()}
        names = [trajectory.name for trajectory in trajectories]
        self._stats.batch(names, tokens=versions.total(), ages=ages)

    def _finish_tasks(self, groups: Sequence[Group]) -> None:
        """Note that groups have left."""
        for group in groups:
            self._finish_task(group.place, _rewards(group))

    def _finish_task(self, place: int, rewards: Sequence[float] = ()) -> None:
        """Note that the group of a task has left, or was dropped and has no rewards."""
        self._done_tasks.add(place)
        if self._stream is not None:
            self._stream.leave(place, rewards)

    def tasks_done(self) -> DoneTasks:
        """Return the numbers of the tasks whose groups have left or were dropped."""
        return self._done_tasks

    def state(self) -> CollectorState:
        """Return what has begun and not left; on the event loop of the trajectories. Costs O(tokens)."""
        self._follow_version()
        groups = [
            GroupState(group.label, group.task.name, group.version, group.attempts, *_begun(group))
            for group in (*itertools.chain(*self._returned), *self._groups.values())
        ]
        groups += self._saved.values()
        return CollectorState(self._admission.version, tuple(sorted(groups, key=lambda group: group.label)))

    def _take(self) -> list[int] | None:
        self._follow_version()
        if self._saved:  # older than all others, and not yet read
            return None
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
        self._wake()
        return version

    async def close(self, error: BaseException | None = None) -> None:
        """Cancel all trajectories, and close what they hold open; may be called again.

        Args:
            error: The error that ended the collector, for further requests of batches; None: it was shut
                down.
        """
        self._is_closed = True
        if self._error is None and not isinstance(error, CollectorError):
            self._error = error
        self._returned.clear()
        self._wake()
        self._is_exhausted = self._is_exhausted or (self._has_read_all and not self._groups)
        running = {*self._trajectories, *self._own_tasks}
        for task in running:
            task.cancel()
        if running:
            _, late = await asyncio.wait(running, timeout=CLOSE_LIMIT_S)
            if late:
                logger.error("%d trajectories do not end although they were cancelled", len(late))
        self._groups.clear()
        self._waiting.clear()
        if self._runs is not None:
            await self._runs.close()
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_LIMIT_S)
        await self._spec.close()
        self._reader.close()
        self._stats.stop()

    def _follow_version(self) -> None:
        """Pass updates on to the admission, also those that another collector made."""
        version = self._requests.version
        if version > self._admission.version:
            self._admission.update(version)

    def _wake(self) -> None:
        """Wake all that wait: for a batch, or to begin a group or a trajectory."""
        self._batch_changed.set()
        self._start_changed.set()

    def _fail(self, error: BaseException, why: str = "") -> None:
        """End the collector; the next request for a batch raises the error."""
        if self._error is None:
            self._error, self._why = error, why
        self._wake()

    async def _begin_groups(self) -> None:
        """Begin groups as admission and capacity allow, until the tasks end."""
        try:
            async with contextlib.aclosing(_each(self._tasks, self._reader)) as rows:
                number = -1
                while True:
                    start = self._loop.time()
                    await _until(lambda: bool(self._saved) or self._may_begin(), self._start_changed)
                    if (row := await anext(rows, _END)) is _END:
                        break
                    number += 1
                    if number in self._done_tasks:
                        continue
                    label = number if self._stream is None else self._stream.number(number)
                    saved = self._saved.pop(label, None)
                    if saved is not None:
                        self._restore_group(saved, number, row)
                        continue
                    await _until(self._may_begin, self._start_changed)
                    self._begin_group(number, label, row, start)
                    await asyncio.sleep(0)  # rows that are all dropped let others run
            if self._saved:
                missing = next(iter(self._saved.values()))
                raise ValueError(
                    f"the state has a group of task {missing.label}, {missing.task!r}, but the tasks ended "
                    "before it: pass the tasks that the state was saved with"
                )
            self._admission.end()
            self._has_read_all = True
            self._wake()
        except asyncio.CancelledError as error:
            if is_cancelling():
                raise
            self._fail(error)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self._fail(error)

    def _restore_group(self, saved: GroupState, place: int, row: Any) -> None:
        """Continue a group that had begun in an earlier process."""
        task = Task.of(row, place)
        if task.name != saved.task:
            raise ValueError(
                f"the state has a group of task {saved.label}, {saved.task!r}, but that task is now "
                f"{task.name!r}: pass the tasks that the state was saved with, in the same order"
            )
        number, has_trees = self._restored[saved.label], self._options.branching is not None
        done = [] if has_trees else [replace(one, task=task) for one in saved.finished]
        group = Group(number, task, place, saved.label, saved.version, done, attempts=saved.attempts)
        self._groups[number] = group
        if has_trees:
            self._begin_trajectories(group)
            return
        group.again = dict(saved.running)
        for one in done:
            self._stats.trajectory_began(one.name, str(number))
            self._stats.trajectory_ended(one.name, one.reason)
            has_reward = self._options.reward is not None or self._spec.has_rewards
            origin = Origin(task.name, number, one.index)
            record_again(one, self._spec, origin=origin, has_reward=has_reward)
        if len(done) >= self._options.group_size:
            self._complete(group)
        else:
            ended = {one.index for one in done}
            left = (index for index in range(self._options.group_size) if index not in ended)
            self._waiting.extend((group, index) for index in left)
        self._wake()

    def _begin_group(self, number: int, label: int, row: Any, start: float) -> None:
        """Begin the group of a task; drop a task that cannot be read."""
        try:
            task = Task.of(row, number)
        except (TypeError, ValueError) as error:
            self._refuse(number, error)
            return
        self._stats.add(Span("admission", start, self._loop.time(), name=task.name))
        self._follow_version()
        version = self._admission.version
        group = Group(self._admission.begin(), task, number, label, version)
        self._groups[group.number] = group
        self._begin_trajectories(group)

    def _begin_trajectories(self, group: Group) -> None:
        """Queue the trajectories of a group, which are the roots of its trees."""
        size, branching = self._options.group_size, self._options.branching
        group.n_begun = size
        if branching is not None:
            group.branches = {index: Branch(index, branching.n_leaves) for index in range(size)}
        self._waiting.extend((group, index) for index in range(size))
        self._wake()

    def _refuse(self, number: int, error: Exception) -> None:
        """Drop a task that cannot be read, or end the collector."""
        self._stats.failure("task")
        self._last_failure = error
        verdict = self._failures.fail(
            -1 - number, 0, "task", type(error), is_overtaken=self._is_overtaken("task")
        )
        self._finish_task(number)
        if verdict.action == "raise":
            self._fail(error, f"{verdict.reason}. Task {number}: {error}")
            raise error
        self._stats.count("dropped")
        if self._options.failure_hook is not None:
            self._options.failure_hook(FailedTask(number, None, "task", error))
            return
        said = f"task {number} is dropped, since {verdict.reason}: {error}"
        self._log.add(logging.ERROR, said, error)

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
            await _until(lambda: bool(self._waiting) and self._capacity.free > 0, self._start_changed)
            group, index = self._waiting.popleft()
            if self._groups.get(group.number) is group:
                slot = self._capacity.enter()
                task = self._loop.create_task(self._run(group, index, slot))
                group.running[index] = task
                self._trajectories.add(task)
                task.add_done_callback(self._trajectories.discard)
                task.add_done_callback(self._check_end)
                # A task that is cancelled before its first step never runs its own cleanup.
                task.add_done_callback(lambda _, slot=slot: slot.leave())
                if (branch := group.branches.get(index)) is not None:
                    task.add_done_callback(lambda _, branch=branch: self._discard(branch))
            self._wake()
            await asyncio.sleep(0)  # the trajectory may ask the engine before the next one starts

    def _check_end(self, task: asyncio.Task[None]) -> None:
        """End the collector if `_run` itself raised: its group would never be whole."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _run(self, group: Group, index: int, slot: TrajectorySlot) -> None:
        """Run one trajectory of a group, and decide what follows from its end."""
        branch = group.branches.get(index)
        session = None if branch is None else branch.take_session()
        attempt = group.again.pop(index, group.attempts)
        key = self._key(group, index, attempt)
        if session is not None:  # named at the fork
            key = session.trajectory.removesuffix(self._suffix)
        name = f"{key}{self._suffix}"
        if n_losses := group.losses[index]:
            name = f"{name}+{n_losses}"
        self._stats.trajectory_began(name, str(group.number))
        group_name = f"{group.task.name}/{group.label}@{self._prefix}"
        observer = _Observer(self._stats, slot, self._start_changed.set)
        on_worker: WorkerRun | None = None
        if self._runs is None:
            run: Run = TrajectoryRun(
                self._spec,
                self._requests,
                group.task,
                name=name,
                index=index if branch is None else branch.index,
                group=group.number,
                max_new_tokens=self._options.max_new_tokens,
                reward=self._options.reward,
                speculate=self._options.speculate,
                observer=observer,
                fork=None if branch is None else branch.state,
                group_name=group_name,
                key=key,
                session=session,
                forking=self._forking(group, branch),
            )
        else:
            run = on_worker = self._runs.new_run(
                group.task,
                name=name,
                index=index,
                group=group.number,
                observer=observer,
                key=key,
                group_name=group_name,
            )
        group.runs[index] = attempt, run
        reason, is_kept, failure = "", False, None
        try:
            async with asyncio.timeout(self._options.trajectory_timeout) as limit:
                if on_worker is not None:
                    on_worker.time_limit = limit
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
            if group.running.get(index) is asyncio.current_task():  # its tree may have begun again
                del group.running[index]
                del group.runs[index]
            self._stats.trajectory_ended(name, reason or "abandoned", is_kept=is_kept)
            self._wake()
        if not self._is_open(group):
            return
        if failure is not None:
            self._handle_failure(group, index, attempt, run, *failure)
            return
        self._failures.succeed()
        if len(group.done) >= (len(group.branches) or self._options.group_size):
            self._complete(group)

    def _key(self, group: Group, number: int, attempt: int, path: str | None = None) -> str:
        """Return the key of a trajectory: its place in its group and in its tree, and the attempt."""
        branch = group.branches.get(number)
        if branch is not None:
            number, path = branch.index, branch.path if path is None else path
        place = f"/{path}" if path else ""
        mark = f"~{attempt}" if attempt else ""
        return f"{group.task.name}/{group.label}.{number}{place}{mark}@{self._prefix}"

    def _forking(self, group: Group, branch: Branch | None) -> Forking | None:
        """Return what lets a trajectory fork; None if trajectories never do."""
        if branch is None or self._options.branching is None:
            return None
        index = branch.index

        def begin(branches: Sequence[Branch]) -> None:
            if not self._is_open(group):
                for one in branches:
                    self._discard(one)
                return
            for one in branches:
                group.branches[group.n_begun] = one
                self._waiting.appendleft((group, group.n_begun))
                group.n_begun += 1
            self._wake()

        return Forking(
            self._options.branching,
            branch,
            name_of=lambda path: f"{self._key(group, index, group.attempts, path)}{self._suffix}",
            begin=begin,
        )

    def _discard(self, branch: Branch | None) -> None:
        """Close what a branch that does not start holds open."""
        session = None if branch is None else branch.take_session()
        if session is not None and not self._loop.is_closed():
            task = self._loop.create_task(_closed(session))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _regrow(self, group: Group, index: int) -> None:
        """Begin a tree again, because what its tools held open at a fork is lost."""
        assert self._options.branching is not None
        old = {number for number, branch in group.branches.items() if branch.index == index}
        for number in old:
            if task := group.running.pop(number, None):
                task.cancel()
            self._forget_waiting(group, number)
            del group.branches[number]
        for trajectory in [one for one in group.done if one.index == index]:
            group.done.remove(trajectory)
            self._stats.trajectory_ended(trajectory.name, trajectory.reason, is_kept=False)
        group.branches[index] = Branch(index, self._options.branching.n_leaves)
        self._waiting.appendleft((group, index))
        self._wake()

    def _is_open(self, group: Group) -> bool:
        """Return True if a group was neither dropped nor begun again."""
        return self._groups.get(group.number) is group

    def _complete(self, group: Group) -> None:
        """Queue a whole group for its batch."""
        self._has_whole_groups = True
        group.done.sort(key=lambda trajectory: trajectory.path)
        self._failures.forget(group.number)
        self._admission.finish(group.number)

    def _handle_failure(
        self, group: Group, index: int, attempt: int, run: Run, kind: FailureKind, error: BaseException
    ) -> None:
        """Replace a failed trajectory, drop its group, or end the collector."""
        name, hook = run.name, self._options.failure_hook
        if isinstance(error, WorkerLost) and group.losses[index] < MAX_LOSSES:
            logger.info("trajectory %s begins again: %s", name, error)
            group.losses[index] += 1
            group.again[index] = attempt
            self._stats.count("restarted")
            self._waiting.appendleft((group, index))
            return
        self._stats.failure(kind)
        self._last_failure = error
        if isinstance(error, EngineUnusable | WorkersFailed):
            self._fail(error)
            return
        branch = group.branches.get(index)
        is_tree_lost = branch is not None and not branch.can_begin_again
        verdict = self._failures.fail(
            group.number,
            branch.index if branch and is_tree_lost else index,
            kind,
            type(root_error(error)),
            is_overtaken=self._is_overtaken(run.phase, run.n_turns),
        )
        if verdict.action == "raise":
            self._fail(error, f"{verdict.reason}. {describe(error)} (trajectory {name}, {kind})")
        elif verdict.action == "replace":
            said = f"trajectory {name} failed ({kind}; {verdict.reason}): {error!r}"
            self._log.add(logging.WARNING, said, error, has_traceback=kind == "crash")
            group.attempts += 1
            self._stats.count("replaced")
            if branch is not None and is_tree_lost:
                self._regrow(group, branch.index)
            else:
                self._waiting.appendleft((group, index))
        elif hook is not None:
            self._drop(group)
            try:
                hook(FailedTask(group.place, group.task, kind, error, run.so_far()))
            except Exception as raised:
                self._fail(raised)
        else:
            said = (
                f"trajectory {name} failed ({kind}); its group is dropped, since {verdict.reason}: {error!r}"
            )
            self._log.add(logging.ERROR, said, error, has_traceback=kind == "crash")
            self._drop(group)

    def _is_overtaken(self, phase: Phase, n_turns: int = 0) -> bool:
        """Return True if a trajectory that runs has come further than this."""
        runs = (run for group in self._groups.values() for _, run in group.runs.values())
        place = _PHASES.index(phase), n_turns
        return any((_PHASES.index(run.phase), run.n_turns) > place for run in runs)

    def _drop(self, group: Group) -> None:
        """Drop a group; the next one takes its place."""
        del self._groups[group.number]
        self._finish_task(group.place)
        self._abandon(group)
        self._admission.drop(group.number)
        self._stats.count("dropped")

    def _restart(self, group: Group) -> None:
        """Begin a group again that has become too old."""
        new = self._groups[group.number] = Group(
            group.number,
            group.task,
            group.place,
            group.label,
            self._admission.version,
            attempts=group.attempts + 1,
        )
        self._abandon(group)
        self._failures.forget(group.number)
        self._admission.restart(group.number)
        self._begin_trajectories(new)

    def _abandon(self, group: Group) -> None:
        """Cancel the trajectories of a group, and forget those that have ended."""
        for task in list(group.running.values()):
            task.cancel()
        self._forget_waiting(group)
        for trajectory in group.done:
            self._stats.trajectory_ended(trajectory.name, trajectory.reason, is_kept=False)

    def _forget_waiting(self, group: Group, number: int | None = None) -> None:
        """Forget the trajectories of a group that have not started, or one of them."""
        forgotten = [item for item in self._waiting if item[0] is group and number in (None, item[1])]
        for item in forgotten:
            self._discard(group.branches.get(item[1]))
        self._waiting = deque(item for item in self._waiting if item not in forgotten)


def _rewards(group: Group) -> list[float]:
    return [trajectory.reward for trajectory in group.done]


def _begun(group: Group) -> tuple[tuple[Trajectory, ...], dict[int, int]]:
    """Return the trajectories of a group that have ended, and the attempts of the others that have begun.

    A group of trees has none: it begins again.
    """
    if group.branches:
        return (), {}
    begun = {index: attempt for index, (attempt, _) in group.runs.items()}
    return tuple(group.done), dict(sorted((begun | group.again).items()))


class _Observer:
    """Passes what a trajectory does on to the statistics and to the capacity."""

    __slots__ = ("_notify", "_slot", "_stats")

    def __init__(self, stats: CollectorStats, slot: TrajectorySlot, notify: Callable[[], None]) -> None:
        self._stats, self._slot, self._notify = stats, slot, notify

    def doing(self, name: str, cause: Cause, detail: str = "") -> None:
        """Note what a trajectory does from now on."""
        if cause == "engine":
            self._slot.ask()
        self._stats.doing(name, cause, detail)

    def started_early(self, name: str, count: int) -> None:
        """Count calls that started while the model wrote their message."""
        del name
        self._stats.count("early", count)

    def add(self, span: Span) -> None:
        """Add a span that has ended."""
        if span.cause == "engine":
            self._slot.answered()
            self._notify()  # another trajectory may ask the engine now
        self._stats.add(span)


async def _until(is_true: Callable[[], bool], changed: asyncio.Event) -> None:
    """Wait until a condition holds that changes only with an event."""
    while not is_true():
        changed.clear()
        await changed.wait()


async def _closed(session: Session) -> None:
    """Close a session, also if the task is cancelled."""
    await run_to_completion(session.close(), always_wait=True)


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
