"""`AgentCollector`: collect trajectories that advance on their own, and hand out batches of whole groups."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
import time
import uuid
import warnings
import weakref
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_agentic.collectors.admission import Capacity, GroupAdmission
from torchrl_agentic.collectors.batching import collector_batch
from torchrl_agentic.collectors.branching import Branching, check_branches
from torchrl_agentic.collectors.collector_state import CollectorState
from torchrl_agentic.collectors.done_tasks import DoneTasks
from torchrl_agentic.collectors.failures import FailedTask, FailurePolicy, OnFailure
from torchrl_agentic.collectors.request_permits import RequestPermits
from torchrl_agentic.collectors.requests import OnUpdate, Requests
from torchrl_agentic.collectors.rollout_loop import (
    SHUT_DOWN,
    CollectorError,
    Group,
    LoopOptions,
    RolloutLoop,
)
from torchrl_agentic.collectors.stats import CollectorStats
from torchrl_agentic.collectors.task_stream import TaskStream
from torchrl_agentic.collectors.timeline import TimelineWriter
from torchrl_agentic.collectors.workers import Runs, Workers
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.dispatch.event_loop import WorkerThreads
from torchrl_agentic.engines.base import ChatEngine, Engine
from torchrl_agentic.engines.duck_typed_engine import ensure_engine
from torchrl_agentic.engines.sampling import TEMPERATURE, Sampling, warn_of_bias
from torchrl_agentic.errors import check_count, check_seconds
from torchrl_agentic.records import GroupMember, GroupRecord, Recorder
from torchrl_agentic.tensors import leaves
from torchrl_agentic.tokens.model_problems import model_problems
from torchrl_agentic.tokens.writer import check_tokenizer
from torchrl_agentic.trajectory.score import Score, Scorer, score_with
from torchrl_agentic.trajectory.spec import TrajectorySpec
from torchrl_agentic.trajectory.task import check_tool_names
from torchrl_agentic.trajectory.trajectory import Trajectory

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of TorchRL's own weight updaters, at import
    from torchrl.collectors import BaseCollector
    from torchrl.envs.transforms import Transform

T = TypeVar("T")
logger = logging.getLogger(__name__)
_numbers = itertools.count()
REWARD_THREADS = 64
"""Number of sync reward functions that run at once."""


@dataclass(slots=True)
class _Running:
    """A collector's loop, and the event loop, process and thread that it lives in."""

    rollouts: RolloutLoop
    loop: asyncio.AbstractEventLoop
    is_own: bool
    pid: int
    thread: int


class AgentCollector(BaseCollector):
    """Collects trajectories over an asynchronous engine; no trajectory waits for another one.

    Each trajectory is one coroutine: sample, parse, run the calls, render, encode, turn by turn. Trajectories
    of one task form a group. A batch holds whole groups, the oldest first. Groups begin while others use
    tools and while the trainer trains, so that the engine is never idle; none becomes older than
    `max_staleness` weight updates, and none is discarded for its age.

    ::

        collector = AgentCollector(compose, engine=engine, tokenizer=tokenizer, tasks=tasks, group_size=8)
        with collector:
            for batch in collector:
                loss = loss_fn(batch)
                ...
                collector.update_policy_weights_(model)

    `for` works in any thread; trajectories then run on the event loop of this package. `async for` runs them
    on the running loop. Tools that hold connections of another loop, such as those of MCP servers, need
    `for`.

    A batch is a `LazyStackedTensorDict` [N], ragged. T is the number of tokens up to the last sampled one:

    - ("tokens", "full"), int64, ("masks", "all_attention_mask"), ("masks", "all_assistant_mask"), bool, and
      ("log_probs", "full"), float32, in nats, NaN where nothing was sampled: [T].
    - ("collector", "policy_version"), int64, [T]: version of the weights that sampled each token, else -1.
    - ("collector", "turn"), int64, [T]: number of the turn that sampled each token, from 0, else -1.
    - "reward", "advantage" and ("next", "reward"), float32, [1, 1]; ("next", "done"), "terminated" and
      "truncated", bool, [1]. The advantage is that of `group_advantage`.
    - ("collector", "group"), int64, and "seconds", float32, [1]; "name" and "reason", text.
    - ("collector", "temperature"), float32, [1]: that of the sampling, if the engine tells it.
    - Under "agentic", [1], summed over the trajectory: `turn`, `n_calls`, `n_errors`, `n_infra`,
      `tool_reward`, `trajectory_reward`, `tool_seconds`, `user_final_score`, `token_drift`, and `ended_by`.
    - ("agentic", "score", NAME), float32, [1], for each of the `Score.parts` of the reward function; NaN
      where a trajectory lacks a part that another one of the batch has.
    - "query", "answer", and the columns of the task.

    With `branching`, a row is a segment of a tree: from the beginning or a fork to the next fork or the end.
    It contains the tokens in front of the segment too, as context. Of these, the assistant mask is False, the
    log-probabilities are NaN and the versions -1, so that each sampled token counts once in a loss.

    - ("collector", "shared"), bool, [T]: True for tokens in front of the segment, which other rows share.
    - ("collector", "path"), text: the numbers of its tree and of its branch at each fork, such as "0.1".
    - "advantage": that of `tree_advantage`. "reward": that of the trajectory; in a row that ends with a fork,
      the mean of its branches, and ("next", "done") is False and "reason" "".
    - Entries under "agentic" are sums from the beginning of the trajectory; the parts of a score are NaN in a
      row that ends with a fork.

    Args:
        transforms: A `ToolCompose`, or the `Compose` of one with `EndTrajectory`, `UserSimulator`, rewards,
            `TurnTokenizer` and `RecordTransform`, as it goes into a `TransformedEnv`. Without `EndTrajectory`
            a message without calls ends a trajectory, unless a simulated user answers it. With `workers`, it
            may be a function without arguments that returns them, called here and in each worker; needed if
            they cannot be pickled.
        engine: Samples the answers; the caller closes it.
        tokenizer: Tokenizer of the engine, unless there is a `TurnTokenizer`.
        tasks: `Task` objects or rows of a data set (see `Task.of`), sync or async, read as they are needed;
            or a `TaskStream`, for epochs, a curriculum, and a position that the collector's state contains.
        group_size: Number of trajectories per task.
        groups_per_batch: Number of groups in a batch; the last batch may be short.
        max_in_flight: Number of trajectories that run at once, or "auto" to keep the engine busy without
            overflowing its KV cache; see `Capacity` and `RequestPermits`.
        max_staleness: Largest number of weight updates between the begin of a group and its batch, if there
            is one update per batch. 0: the batches are those of a synchronous script. None: no bound.
        on_update: "resume": a weight update aborts running answers, which continue under the new weights.
            "finish": the update waits until running answers have ended.
        max_turns: Upper bound on the messages of the model in a trajectory.
        max_new_tokens: Upper bound on the tokens of one message.
        max_trajectory_tokens: Upper bound on the tokens of a trajectory, for engines that take tokens; None:
            the context length of the engine.
        reward: Function of a finished `Trajectory` that returns a number, a bool or a `Score`, added to the
            rewards of the transforms. Sync ones run on a thread; async and `batched` ones are awaited. Other
            trajectories go on meanwhile.
        trajectory_timeout: Seconds that a trajectory may take, its reward included, and without waiting for
            a worker; None: no limit.
        on_failure: What follows if a trajectory times out, loses its engine, or its reward fails. "replace":
            another one of the same task takes its place, up to `max_replacements` times; then, and if the
            task itself is invalid, the group is dropped. "drop": the group is dropped. "raise": the next
            batch raises CollectorError. Dropped groups are logged and counted, and other groups take their
            place.
        max_replacements: Number of times that each trajectory of a group may be replaced.
        max_failures: Number of failures without a trajectory that succeeds after which the next batch raises
            CollectorError, whatever `on_failure` says, if they are of one type, in two groups or more; at
            least `group_size`. Lost infrastructure must also fail for two minutes, which is enough by itself
            if the engine answers no request meanwhile. None: no bound, except for the engine.
        engine_retries: Number of times that a request is made again after an InfrastructureError.
        tokenizer_options: Further arguments of `ChatEncoder`, such as `max_tool_response_tokens`,
            `stop_token_ids` and `template_kwargs`. Ids that end the engine's answers
            (`Engine.stop_token_ids`) are known without.
        weight_updater: A weight updater of TorchRL, whose `push_weights` loads weights into the engine, on a
            thread, while this collector samples nothing; None: `Engine.update` gets the weights.
        speculate: Start calls of tools without effects as soon as they are complete in the stream.
        timeline: Folder, or the recorder whose folder gets it: the time line of each batch, for the viewer.
        name: Last part of the names of its trajectories; no two collectors of a process share one. An engine
            with a seed samples the same for the same names. None: a number.
        post_collect_hook: Called with each batch, as in TorchRL's collectors.
        workers: `RayWorkers` that the trajectories run on, with their tools, sandboxes and sessions, while
            engine, rewards and records stay in this process. None: they run in this process.
        failure_hook: Called on the event loop with the `FailedTask` of each group that is dropped, in place
            of the log line. Where many tasks may be impossible, pass `max_failures=None` too. An exception of
            the hook ends the collector.
        branching: When trajectories fork, so that each of the `group_size` trajectories of a group grows into
            a tree; None: never. Tools with sessions need `branch`; without simulated users.

    Attributes:
        engine: The engine.
        stats: Time by cause, trajectories in flight, ages, tokens per second, and who is late.

    Raises:
        TypeError: If an argument has the wrong type, or a transform needs an environment.
        ValueError: If a number is out of range, two arguments contradict each other, or a task of a list or a
            `TaskStream` names a tool that does not exist.
    """

    def __init__(
        self,
        transforms: Any,
        *,
        engine: Engine | ChatEngine,
        tokenizer: Any = None,
        tasks: Iterable[Any] | AsyncIterable[Any],
        group_size: int = 1,
        groups_per_batch: int = 1,
        max_in_flight: int | Literal["auto"] = "auto",
        max_staleness: int | None = 1,
        on_update: OnUpdate = "resume",
        max_turns: int = 16,
        max_new_tokens: int = 1024,
        max_trajectory_tokens: int | None = None,
        reward: Scorer | None = None,
        trajectory_timeout: float | None = None,
        on_failure: OnFailure = "replace",
        max_replacements: int = 3,
        max_failures: int | None = 16,
        engine_retries: int = 3,
        tokenizer_options: Mapping[str, Any] | None = None,
        weight_updater: Any = None,
        speculate: bool = False,
        timeline: str | Path | Recorder | TimelineWriter | None = None,
        name: str | None = None,
        post_collect_hook: Callable[[TensorDictBase], None] | None = None,
        workers: Workers | None = None,
        failure_hook: Callable[[FailedTask], object] | None = None,
        branching: Branching | None = None,
    ) -> None:
        super().__init__(post_collect_hook=post_collect_hook)
        engine = ensure_engine(engine)
        of_tokens = engine if isinstance(engine, Engine) else None
        takes_tokens = of_tokens is not None
        stop_token_ids = () if of_tokens is None else tuple(of_tokens.stop_token_ids)
        check_count("group_size", group_size, optional=False)
        check_count("groups_per_batch", groups_per_batch, optional=False)
        check_count("max_new_tokens", max_new_tokens, optional=False)
        check_count("engine_retries", engine_retries, optional=False, least=0)
        check_count("max_failures", max_failures)
        check_seconds("trajectory_timeout", trajectory_timeout)
        _check_choice("on_update", on_update, ("resume", "finish"))
        if not isinstance(cast("object", tasks), Iterable | AsyncIterable) or isinstance(
            tasks, str | Mapping
        ):
            raise TypeError(f"tasks is an iterable of tasks or rows; got {type(tasks).__name__}")
        if reward is not None and not callable(reward):
            raise TypeError(f"reward is a function of a Trajectory; got {type(reward).__name__}")
        if not isinstance(cast("object", tokenizer_options), Mapping | None):
            raise TypeError(f"tokenizer_options is a mapping; got {type(tokenizer_options).__name__}")
        if weight_updater is not None and not callable(getattr(weight_updater, "push_weights", None)):
            raise TypeError(f"weight_updater has a method push_weights; got {type(weight_updater).__name__}")
        if post_collect_hook is not None and not callable(post_collect_hook):
            raise TypeError(
                f"post_collect_hook is a function of a batch; got {type(post_collect_hook).__name__}"
            )
        if failure_hook is not None and not callable(failure_hook):
            raise TypeError(f"failure_hook is a function of a FailedTask; got {type(failure_hook).__name__}")
        if not isinstance(cast("object", speculate), bool):
            raise TypeError(f"speculate is True or False; got {speculate!r}")
        if not isinstance(cast("object", name), str | None) or name == "":
            raise TypeError(f"name is a text; got {name!r}")
        if not isinstance(cast("object", timeline), str | Path | Recorder | TimelineWriter | None):
            raise TypeError(f"timeline is a folder or a Recorder; got {type(timeline).__name__}")
        if max_in_flight != "auto":
            if isinstance(max_in_flight, str):
                raise ValueError(f"max_in_flight is a number or 'auto'; got {max_in_flight!r}")
            check_count("max_in_flight", max_in_flight, optional=False)
        options = {**(tokenizer_options or {})}
        if max_trajectory_tokens is not None:
            if not takes_tokens:
                raise ValueError(
                    "max_trajectory_tokens needs an engine that takes tokens; evaluate() bounds others, too"
                )
            options["max_trajectory_tokens"] = max_trajectory_tokens
        if takes_tokens and tokenizer is not None:
            check_tokenizer(tokenizer)
        if workers is not None and not isinstance(cast("object", workers), Workers):
            raise TypeError(f"workers is RayWorkers(8), or another Workers; got {workers!r:.80}")
        is_factory = workers is not None and callable(transforms) and not isinstance(transforms, Transform)
        self._spec = TrajectorySpec.of(
            list(leaves(transforms() if is_factory else transforms)),
            tokenizer if takes_tokens else None,
            max_turns=max_turns,
            tokenizer_options=options,
            stop_token_ids=stop_token_ids,
        )
        if isinstance(tasks, Sequence | TaskStream):  # others are read one by one
            given = tasks.tasks if isinstance(tasks, TaskStream) else tasks
            check_tool_names(given, self._spec.dispatcher.bound)
        if takes_tokens and self._spec.encoder is None:
            raise ValueError("the engine takes tokens: pass tokenizer=, the tokenizer of its model")
        if branching is not None:
            if not isinstance(cast("object", branching), Branching):
                raise TypeError(f"branching is a Branching; got {type(branching).__name__}")
            check_branches(self._spec)
        self.engine = engine
        self._tasks = tasks
        self._groups_per_batch, self._max_staleness = groups_per_batch, max_staleness
        self._admission = GroupAdmission(groups_per_batch, max_staleness, engine.version)
        self._capacity = Capacity(max_in_flight, engine_concurrent=engine.max_concurrent)
        self._followed = of_tokens if max_in_flight == "auto" else None
        self._failures = FailurePolicy(
            on_failure,
            max_replacements=max_replacements,
            max_failures=None if max_failures is None else max(max_failures, group_size),
        )
        self._engine_retries = engine_retries
        self._on_update: OnUpdate = on_update
        threads = WorkerThreads(REWARD_THREADS)  # of their own: rewards that hang must not stop the tools
        self._options = LoopOptions(
            group_size,
            max_new_tokens,
            trajectory_timeout,
            None if reward is None else _scored(reward, threads.run),
            speculate,
            failure_hook,
            branching,
        )
        self._weight_updater = weight_updater
        self._workers = workers
        if workers is not None:
            if branching is not None:
                raise ValueError(
                    "workers= and branching= exclude each other: trajectories on workers share nothing"
                )
            from torchrl_agentic.collectors.worker_spec import WorkerSpec, check_limiters

            if is_factory:
                check_limiters(self._spec)
            workers.check()
            encoder_of = tokenizer if takes_tokens else None
            self._workers_name = uuid.uuid4().hex
            self._worker_spec = workers.pack(
                WorkerSpec(
                    transforms,
                    encoder_of,
                    max_turns,
                    options,
                    max_new_tokens,
                    speculate,
                    None if of_tokens is None else of_tokens.context_length,
                    stop_token_ids,
                ),
                self._workers_name,
            )
            # Exit handlers run last to first: ours must run before Ray's, which ends the workers at once.
            atexit.unregister(_close_at_exit)
            atexit.register(_close_at_exit)
        self.stats: Any = CollectorStats(  # a method in TorchRL's collectors; calling it works too
            time.monotonic,
            groups_per_batch=groups_per_batch,
            group_size=group_size,
            max_concurrent=engine.max_concurrent,
            timeline=_timeline_writer(timeline),
        )
        self._prefix = f"c{next(_numbers)}" if name is None else name
        self._running: _Running | None = None
        self._skipped = DoneTasks()
        self._saved: CollectorState | None = None
        self._version_base = 0
        self._frames = 0
        self._iter = -1
        self._n_recorded = 0
        self._interrupted: deque[list[Group]] = deque()
        """Groups of batches whose consumers were interrupted before they had them."""
        self._is_shut_down = self._has_warned = False

    @property
    def policy_version(self) -> int:
        """Number of weight updates so far, those before the state that was loaded included."""
        if self._running is None and self._saved is not None:
            return self._saved.version
        return self._version_base + self.engine.version

    def _start(self) -> _Running:
        """Create the loop of this collector on the running event loop, unless there is one already."""
        running, loop = self._running, asyncio.get_running_loop()
        if running is not None:
            if running.pid != os.getpid():
                raise _NotHere(
                    "this collector began in another process: create an AgentCollector in this one"
                )
            if running.loop.is_closed():
                raise _NotHere(
                    "the event loop of this collector has ended, and its trajectories with it: create a new "
                    "AgentCollector; load_state_dict skips the tasks that have left"
                )
            if running.loop is not loop:
                raise _NotHere(
                    "this collector runs on another event loop: iterate either with `for` or with `async "
                    "for`, on one loop"
                )
            return running
        if self._is_shut_down:
            raise CollectorError(SHUT_DOWN)
        saved = self._saved
        if saved is not None:
            self._version_base = saved.version - self.engine.version
            self._admission = GroupAdmission(self._groups_per_batch, self._max_staleness, saved.version)
        permits = self._permits()
        self.stats.begin(loop.time, capacity=self._capacity, permits=permits, first_batch=self._iter + 1)
        encoder = self._spec.encoder
        if encoder is not None:
            for line in model_problems(
                encoder.tokenizer,
                encoder=encoder,
                parser=self._spec.parser,
                temperature=self._temperature_of_batches,
            ):
                logger.warning("%s", line)
        requests = Requests(
            self.engine,
            stop_ids=() if encoder is None else encoder.stop_token_ids,
            vocabulary=None if encoder is None else len(encoder.tokenizer),
            retries=self._engine_retries,
            on_update=self._on_update,
            is_pushed=self._weight_updater is not None,
            permits=permits,
            stats=self.stats,
            version_base=self._version_base,
        )
        rollouts = RolloutLoop(
            self._spec,
            requests,
            self._tasks,
            admission=self._admission,
            capacity=self._capacity,
            failures=self._failures,
            stats=self.stats,
            prefix=self._prefix,
            max_finished=max(2, 1 + (self._max_staleness or 0)) * self._groups_per_batch,
            skipped=self._skipped,
            saved=saved,
            options=self._options,
            runs=self._runs(requests),
        )
        is_own = event_loop.is_running_here()
        self._running = _Running(rollouts, loop, is_own, os.getpid(), threading.get_ident())
        weakref.finalize(self, _close_later, rollouts, loop, os.getpid()).atexit = False
        if is_own:
            _open.add(self)
        return self._running

    def _runs(self, requests: Requests) -> Runs | None:
        """Return the workers that trajectories run on, or None."""
        if self._workers is None:
            return None
        from torchrl_agentic.collectors.worker_pool import Shared, WorkerPool

        shared = Shared(self._spec, requests, self._options.reward)
        return WorkerPool(self._workers, self._worker_spec, shared, name=self._workers_name)

    def _permits(self) -> RequestPermits | None:
        """Return what holds requests back while the engine is full, with `max_in_flight="auto"`."""
        followed = self._followed
        if followed is None:
            return None
        return RequestPermits(followed, self._capacity, concurrent=followed.max_concurrent)

    async def _next(self, taken: list[Group]) -> None:
        """Add the groups of the next batch to a list; none after the last one.

        The list keeps them if the waiting thread is interrupted before it can return them.
        """
        running = self._running
        is_elsewhere = running is not None and running.loop is not asyncio.get_running_loop()
        if running is not None and is_elsewhere and running.rollouts.has_ended():
            return
        rollouts = self._start().rollouts
        self._take_back_interrupted(rollouts)
        taken.extend(await rollouts.next_batch() or ())

    def _take_back_interrupted(self, rollouts: RolloutLoop) -> None:
        """Return batches to the loop whose consumers were interrupted before they had them."""
        while self._interrupted:
            if groups := self._interrupted.popleft():
                rollouts.take_back(groups)

    def __iter__(self) -> Iterator[LazyStackedTensorDict]:
        return self.iterator()

    def iterator(self) -> Iterator[LazyStackedTensorDict]:
        """Iterate over the batches, from any thread.

        After Ctrl-C, iterate again: trajectories go on meanwhile, and no batch is lost. Other errors shut the
        collector down.

        Raises:
            CollectorError: If a failure ended the collector, the tasks raise, or it was shut down before they
                ended.
        """
        self._check_batches()
        return self._each(self._batch)

    def trajectories(self) -> Iterator[list[Trajectory]]:
        """Iterate over the batches as lists of `Trajectory`, for evaluations; from any thread."""
        return self._each(lambda groups: [trajectory for group in groups for trajectory in group.done])

    def _each(self, read: Callable[[list[Group]], T]) -> Iterator[T]:
        while True:
            taken: list[Group] = []
            try:
                event_loop.run(self._next(taken))
                if not taken:
                    return
                found = read(taken)
            except BaseException as error:
                self._interrupted.append(taken)
                if not isinstance(error, KeyboardInterrupt | _NotHere):
                    self._shut_down(error)
                raise
            yield found  # nothing in between may be interrupted

    async def __aiter__(self) -> AsyncIterator[LazyStackedTensorDict]:
        self._check_batches()
        while True:
            taken: list[Group] = []
            try:
                await self._next(taken)
                if not taken:
                    return
                batch = self._batch(taken)
            except BaseException as error:
                self._interrupted.append(taken)
                if not isinstance(error, KeyboardInterrupt | asyncio.CancelledError | _NotHere):
                    await self._aclose(error)
                raise
            yield batch

    @property
    def _sampling(self) -> Sampling | None:
        """The distribution that tokens are sampled from; None: unknown, or the engine takes messages."""
        return self.engine.sampling if isinstance(self.engine, Engine) else None

    @property
    def _temperature_of_batches(self) -> float | None:
        """The temperature that a loss has to know; None if no batches were asked for, or it is unknown."""
        sampling = self._sampling if self._has_warned else None
        return None if sampling is None else sampling.temperature

    def _check_batches(self) -> None:
        """Raise TypeError if there are no tokens to make batches of; log once that there is no reward."""
        if self._spec.encoder is None:
            raise TypeError(
                "these trajectories have no tokens to train on, since the engine takes messages: use "
                "collector.trajectories(), rollout() or evaluate()"
            )
        if self._has_warned:
            return
        self._has_warned = True
        warn_of_bias(self._sampling)
        if not (self._options.reward or self._spec.has_rewards):
            logger.warning(
                "no reward: the rewards and advantages of all batches are 0. Pass reward=, or add an "
                "AnswerRewardTransform, or a ToolRewardTransform for the rewards that tools return"
            )

    def __len__(self) -> int:
        """Raise TypeError: nobody knows the number of batches, since groups may be dropped."""
        raise TypeError("an AgentCollector has no length; groups of trajectories may be dropped")

    def _batch(self, groups: list[Group]) -> LazyStackedTensorDict:
        has_trees = self._options.branching is not None
        batch = collector_batch([(group.label, group.done) for group in groups], has_trees=has_trees)
        sampling = self._sampling
        if sampling is not None:
            batch.set(TEMPERATURE, torch.full((len(batch), 1), sampling.temperature))
        n_sampled = sum(int(row["masks", "all_assistant_mask"].sum()) for row in batch.tensordicts)
        if self._n_recorded == self._iter + 1:  # not yet, before an interrupt
            self._record_groups(groups, batch)
            self._n_recorded += 1
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        self._iter, self._frames = self._iter + 1, self._frames + n_sampled
        return batch

    def _record_groups(self, groups: list[Group], batch: LazyStackedTensorDict) -> None:
        """Pass the groups of a batch, with their advantages, on to the recorder."""
        hook = self._spec.hook
        if hook is None:
            return
        rows = iter([row for row in batch.tensordicts if row["next", "done"].all()])
        for group in groups:
            members = tuple(
                GroupMember(one.name, float(row["reward"]), float(row["advantage"]))
                for one, row in zip(group.done, rows, strict=False)
            )
            hook.group_left(
                GroupRecord(group.number, group.task.name, self._iter + 1, self.policy_version, members)
            )

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        **_: Any,
    ) -> None:
        """Load weights into the engine, and wait until it has them; not on the loop of an `async for`.

        The batches handed out so far count as trained on. Running answers continue or end, see `on_update`.

        Args:
            policy_or_weights: A module, a TensorDict or mapping of weights, whatever else the engine takes,
                or None to count an update of weights that the engine shares with the trainer.
            weights: The same, by keyword.
            policy: The same, by keyword.
        """
        given = next((one for one in (policy_or_weights, weights, policy) if one is not None), None)
        self._in_loop(self.update_weights(given))

    async def update_weights(self, weights: Any = None) -> int:
        """Load weights into the engine; from any event loop.

        Args:
            weights: As `update_policy_weights_` takes them.

        Returns:
            The new policy version.
        """
        if self._spec.hook is not None:
            self._spec.hook.weights_updated()
        updater, running = self._weight_updater, self._running
        push = None if updater is None else lambda: updater.push_weights(weights)
        given = named_weights(weights) if push is None else None
        if running is not None:
            return await self._on_its_loop(running.rollouts.update(given, push))
        # Before the first batch, nothing runs, and either kind of iteration may follow.
        if push is not None:
            await asyncio.to_thread(push)
        await self.engine.update(given)
        return self.policy_version

    async def _on_its_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine that belongs to the event loop of the collector."""
        running = self._running
        if running is None or running.loop is asyncio.get_running_loop() or running.loop.is_closed():
            return await coroutine
        return await asyncio.wrap_future(event_loop.submit_to(running.loop, coroutine))

    def _in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the collector, from another thread, and wait."""
        running = self._running
        if running is None or running.is_own or running.loop.is_closed():
            return event_loop.run(coroutine)
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is running.loop:
                coroutine.close()
                raise _OnItsLoop(
                    "this would wait for its own event loop: await collector.update_weights(...) or "
                    "collector.aclose()"
                )
        if running.thread == threading.get_ident():  # which has left the loop, maybe to return to it
            return running.loop.run_until_complete(coroutine)
        future = event_loop.submit_to(running.loop, coroutine)
        idle_s = 0.0
        while not running.loop.is_closed() and idle_s < event_loop.GRACE_S:
            done, _ = concurrent.futures.wait((future,), timeout=event_loop.SIGNAL_CHECK_S)
            idle_s = 0.0 if running.loop.is_running() else idle_s + event_loop.SIGNAL_CHECK_S
            if done and not future.cancelled():
                return future.result()
            if done:
                break
        raise _NotHere("the event loop of this collector ended meanwhile, and its trajectories with it")

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Cancel all trajectories and close what they hold open; may be called again. The engine stays open.

        If the tasks had not ended, further iteration raises CollectorError.

        Args:
            timeout: Ignored; TorchRL's collectors have it.
            close_env: Ignored.
            raise_on_error: Ignored.
        """
        del timeout, close_env, raise_on_error
        self._shut_down()

    def _shut_down(self, error: BaseException | None = None) -> None:
        running, self._is_shut_down = self._running, True
        if running is not None and running.pid == os.getpid() and not running.loop.is_closed():
            with contextlib.suppress(_NotHere):
                self._in_loop(running.rollouts.close(error))

    async def aclose(self) -> None:
        """Shut down like `shutdown`, from any event loop."""
        await self._aclose()

    async def _aclose(self, error: BaseException | None = None) -> None:
        running, self._is_shut_down = self._running, True
        if running is not None and running.pid == os.getpid() and not running.loop.is_closed():
            await self._on_its_loop(running.rollouts.close(error))

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the sampling of the engine, if it can be seeded.

        Args:
            seed: The seed.
            static_seed: Whether the seed is returned unchanged.

        Returns:
            The next seed.
        """
        self.engine.set_seed(seed)
        return seed if static_seed else seed + 1

    def state_dict(self) -> dict[str, Any]:
        """Return which tasks have left, the groups that have begun, and the policy version.

        It holds dicts, lists, texts and numbers, which `torch.save`, JSON and `Checkpoints` take. Any thread
        may call it at any time; trajectories go on meanwhile. A batch has left as soon as the iterator has
        returned it. After `shutdown` no group is left.

        The tasks are numbers in the order of `tasks`, or the state of the `TaskStream`. Of a group, the state
        contains the trajectories that have ended, with tokens, records and rewards, and what the others need
        to begin again.
        """
        running = self._running
        batches = {"batches": self._iter + 1}
        if running is None:
            state = self._saved or CollectorState(self.engine.version)
            return {**self._tasks_left(), **batches, **state.to_json()}

        def read() -> tuple[dict[str, Any], CollectorState]:
            self._take_back_interrupted(running.rollouts)
            return self._tasks_left(), running.rollouts.state()

        tasks, state = self._at_once(running, read)
        return {**tasks, **batches, **state.to_json()}

    def _tasks_left(self) -> dict[str, Any]:
        """Return which tasks have left."""
        if isinstance(self._tasks, TaskStream):
            return {"tasks": self._tasks.state_dict()}
        running = self._running
        return (self._skipped if running is None else running.rollouts.tasks_done()).to_json()

    def _at_once(self, running: _Running, read: Callable[[], T]) -> T:
        """Call a function while nothing else happens on the event loop of the collector."""
        loop = running.loop
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is loop:
                return read()
        if running.pid != os.getpid() or not loop.is_running():
            return read()

        async def call() -> T:
            return read()

        return self._in_loop(call())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state, with the same tasks in the same order, and in a new process, if need be.

        Tasks that had left are skipped, and those that had not begun begin in their order. Before them, the
        groups that had begun take up their work, with the age that they had:

        - Trajectories that had ended stay as they were, with their rewards.
        - The others, and trees, begin again. The engine gets the same keys as before: if it is seeded by
          them, and `max_staleness` is 0, the batches are those of a run that was not interrupted.

        The names of all trajectories that begin from now on have a new end, such as "+5f3a91", so that
        tools with effects see none twice.

        The policy version goes on from that of the state, whatever the engine counts. Load the weights into
        the engine before the first batch. A `TaskStream` gets its state too, so that its own
        `load_state_dict` need not be called.

        Args:
            state_dict: Result of `state_dict`.

        Raises:
            RuntimeError: If the collector has begun.
            ValueError: If the state is of a collector over tasks of another kind, or of something else.
                Other tasks are found when they are read: the next batch raises CollectorError.
        """
        if self._running is not None:
            raise RuntimeError("load the state before the first batch")
        if not isinstance(cast("object", state_dict), Mapping):
            raise ValueError(
                f"state_dict is the result of AgentCollector.state_dict(); got {type(state_dict).__name__}"
            )
        is_stream = isinstance(self._tasks, TaskStream)
        needed = {"tasks"} if is_stream else {"tasks_before", "tasks_done"}
        if not needed <= state_dict.keys():
            kind = "a TaskStream" if is_stream else "no TaskStream"
            raise ValueError(
                f"the state has the keys {', '.join(state_dict) or '(none)'}, while tasks= is {kind}: pass "
                "tasks of the kind that it was saved with"
            )
        saved = CollectorState.from_json(state_dict)
        batches = state_dict.get("batches", 0)
        check_count("batches", batches, optional=False, least=0)
        if isinstance(self._tasks, TaskStream):
            self._tasks.load_state_dict(state_dict["tasks"])
        else:
            self._skipped = DoneTasks(state_dict["tasks_before"], state_dict["tasks_done"])
        self._saved, self._iter, self._n_recorded = saved, batches - 1, batches

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"AgentCollector({self._spec.compose!r}, engine={self.engine.describe()})"


class _NotHere(CollectorError):
    """The collector runs on another event loop or in another process, or did until that ended."""


class _OnItsLoop(Exception):
    """A blocking method was called on the event loop that it would wait for."""


_open: weakref.WeakSet[AgentCollector] = weakref.WeakSet()


def _close_later(rollouts: RolloutLoop, loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """Close the loop of a collector that is garbage, without waiting for it."""
    if pid == os.getpid() and not loop.is_closed():
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            event_loop.submit_to(loop, rollouts.close())


@atexit.register
def _close_at_exit() -> None:
    for collector in list(_open):
        with contextlib.suppress(Exception):
            collector.shutdown()


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is one of {', '.join(map(repr, choices))}; got {value!r}")


def _timeline_writer(timeline: str | Path | Recorder | TimelineWriter | None) -> TimelineWriter | None:
    if timeline is None or isinstance(timeline, TimelineWriter):
        return timeline
    return TimelineWriter.beside(timeline) if isinstance(timeline, Recorder) else TimelineWriter(timeline)


def _scored(
    reward: Scorer, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
) -> Callable[[Trajectory], Awaitable[Score]]:
    """Return a reward function as a coroutine function; a sync one runs on a thread."""

    async def call(trajectory: Trajectory) -> Score:
        return await score_with(reward, trajectory, in_thread)

    return call


def named_weights(weights: Any) -> Any:
    """Return weights by the names of the model's parameters.

    Args:
        weights: A module, of which a wrapper of TorchRL is unwrapped to its model; a TensorDict; a mapping,
            function, or other object, which is returned unchanged; or None.
    """
    if isinstance(weights, torch.nn.Module):
        inner = getattr(weights, "model", None)
        if isinstance(inner, torch.nn.Module) and hasattr(weights, "in_keys"):
            weights = inner
        return dict(weights.state_dict())
    if isinstance(weights, TensorDictBase):
        return dict(weights.flatten_keys(".").items())
    return weights
