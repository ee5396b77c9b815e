"""`RemoteRun`: the collector's side of a trajectory that runs on a worker."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

from torchrl_agentic.collectors.requests import Requests
from torchrl_agentic.collectors.scored_record import Reward, finish_record, scored
from torchrl_agentic.collectors.trajectory_run import Observer
from torchrl_agentic.collectors.worker_messages import (
    Answer,
    Ask,
    AskChat,
    Begin,
    Cancel,
    Doing,
    Ended,
    EngineMessage,
    Failed,
    FromWorker,
    News,
    Refuse,
    Sealed,
    StartedEarly,
    TokenChunk,
    ToWorker,
    WrittenTurns,
)
from torchrl_agentic.collectors.workers import WorkerLost
from torchrl_agentic.engines.base import ContextExceeded, OnIds
from torchrl_agentic.messages import StoredMessage, Turn
from torchrl_agentic.records import Origin
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.trajectory.episode import EpisodeRecording
from torchrl_agentic.trajectory.span import Cause, Span
from torchrl_agentic.trajectory.spec import TrajectorySpec
from torchrl_agentic.trajectory.task import Task
from torchrl_agentic.trajectory.training_rows import Contexts
from torchrl_agentic.trajectory.trajectory import Trajectory

STOP_LIMIT_S = 30.0
"""Seconds that a worker may send nothing while a cancelled trajectory is open there; it is ended then."""


class WorkerSlot(Protocol):
    """A trajectory's place on a worker.

    Attributes:
        clock_offset: Seconds that the clock of this process is ahead of the worker's.
        heard_at: Time of the event loop at which the worker sent its last batch.
    """

    clock_offset: float
    heard_at: float

    def post(self, message: ToWorker) -> None:
        """Send a message with the next batch."""
        ...

    def leave(self, run: RemoteRun) -> None:
        """Free the place of a trajectory."""
        ...

    def give_up(self, error: WorkerLost) -> None:
        """End the worker; another one takes its place."""
        ...


class Places(Protocol):
    """Assigns trajectories to workers."""

    async def enter(self, run: RemoteRun, begin: Begin) -> WorkerSlot:
        """Wait for a worker, and begin a trajectory on it.

        Args:
            run: The trajectory.
            begin: Its first message.
        """
        ...


class Shared(NamedTuple):
    """Objects that all trajectories of a collector share on its side.

    Attributes:
        spec: What its trajectories share.
        requests: Requests to the engine.
        reward: The reward function, or None.
    """

    spec: TrajectorySpec
    requests: Requests
    reward: Reward | None


class RemoteRun:
    """A trajectory that runs on a worker; created on the event loop of the collector.

    Keeps the ids, log-probabilities and versions of its tokens, and its turns.

    Args:
        shared: What all trajectories of the collector share.
        places: Assigns it to a worker.
        task: What the trajectory starts from.
        name: Name of the trajectory.
        index: Number in its group.
        group: Number of the group; None without one.
        observer: Follows what the trajectory does, or None.
        key: Name of the trajectory for the engine, which may seed its answers by it; None: `name`.
        group_name: Name of the group for its tools, unique in the process; "" without one.

    Attributes:
        name: Name of the trajectory.
        group: Number of the group; None without one.
        phase: What runs: the preparation of the task, the turns, or the rewards.
        time_limit: Time limit of the trajectory, or None.
    """

    def __init__(
        self,
        shared: Shared,
        places: Places,
        task: Task,
        *,
        name: str,
        index: int = 0,
        group: int | None = None,
        observer: Observer | None = None,
        key: str | None = None,
        group_name: str = "",
    ) -> None:
        self._shared, self._places, self._task = shared, places, task
        self._key, self._group_name = key or name, group_name
        self.name, self._index, self.group = name, index, group
        self.phase: Literal["task", "trajectory", "reward"] = "task"
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._origin = Origin(task.name, group, index)
        self._recording = EpisodeRecording(shared.spec.hook, name, index, self._origin)
        self._rewards: list[float] = []
        self._messages: list[Mapping[str, Any]] = []
        self._turns: list[Turn] = []
        self._spans: list[Span] = []
        self._sealed: list[Sealed[WrittenTurns]] = []  # the turns behind those
        self._n_turns = 0
        self._ledger: TokenLedger | None = None if shared.spec.encoder is None else TokenLedger()
        encoder = shared.spec.encoder
        renders_anew = encoder is not None and encoder.use_inference_chat_template
        self._contexts = Contexts() if renders_anew else None
        self._chat: list[Mapping[str, Any]] = []
        self._chat_tools: Sequence[Mapping[str, Any]] = ()
        self._media: dict[str, list[Any]] = {}
        self._engine_error: Exception | None = None
        self._next: asyncio.Future[FromWorker] = self._loop.create_future()
        self._place: WorkerSlot | None = None
        self.time_limit: asyncio.Timeout | None = None

    @property
    def n_turns(self) -> int:
        """Number of turns so far."""
        return self._n_turns

    async def run(self) -> Trajectory:
        """Run the trajectory on a worker, and compute its reward here.

        Raises:
            InfrastructureError: If the engine is lost.
            WorkerLost: If its worker has died.
            ValueError: If the task names unknown tools, or the engine cannot take its prompt.
            RewardError: If the reward function raises or returns no number.
        """
        try:
            ended = await self._turns_on_worker()
            self.phase = "reward"
            trajectory = await self._rewarded(self._finished(ended))
        except BaseException:
            self._recording.finish("failed")
            raise
        spec, has_reward = self._shared.spec, self._shared.reward is not None
        has_reward = has_reward or spec.has_rewards
        finish_record(self._recording, trajectory, spec, origin=self._origin, has_reward=has_reward)
        return trajectory

    async def _turns_on_worker(self) -> Ended:
        """Run the turns on a worker."""
        task = self._task
        if not any(stage.reads_answer for stage in self._shared.spec.stages):
            task = replace(task, answer=None)  # which may be anything
        self._place = await self._entered(Begin(self.name, task, self._index, self._group_name))
        try:
            return await self._follow(self._place)
        except WorkerLost as error:
            if self._engine_error is not None:
                raise self._engine_error from error
            raise
        finally:
            self._place.leave(self)
            self._place = None

    async def _entered(self, begin: Begin) -> WorkerSlot:
        """Wait for a worker, while the time limit of the trajectory stands still, and begin there."""
        limit, left = self.time_limit, None
        if limit is not None and (deadline := limit.when()) is not None:
            left = deadline - self._loop.time()
            limit.reschedule(None)
        try:
            return await self._places.enter(self, begin)
        finally:
            if limit is not None and left is not None:
                limit.reschedule(self._loop.time() + left)

    async def _follow(self, place: WorkerSlot) -> Ended:
        """Answer a worker's requests until the trajectory has ended there."""
        try:
            while True:
                expected = self._next
                message = await expected
                if isinstance(message, Ended):
                    self._take_news(message.news)
                    return message
                if isinstance(message, Failed):
                    self.phase = message.phase
                    raise self._engine_error or message.error
                if self._next is expected:  # else the next message is here already
                    self._next = self._loop.create_future()
                self.phase = "trajectory"
                if isinstance(message, Ask):
                    await self._sample(place, message)
                elif isinstance(message, AskChat):
                    await self._message(place, message)
        except asyncio.CancelledError:
            await run_to_completion(self._stop(place), always_wait=True)
            raise

    async def _stop(self, place: WorkerSlot) -> None:
        """End the trajectory on its worker, and wait until everything is closed there.

        A worker that sends nothing for `STOP_LIMIT_S` is ended.
        """
        place.post(Cancel(self.name))
        began = self._loop.time()
        while True:
            if self._next.done() and not self._next.cancelled():
                error = self._next.exception()
                if error is not None or isinstance(self._next.result(), Ended | Failed):
                    return
            if self._next.done():
                self._next = self._loop.create_future()
            left = max(began, place.heard_at) + STOP_LIMIT_S - self._loop.time()
            if left <= 0:
                place.give_up(WorkerLost(f"it sent nothing for {STOP_LIMIT_S:g} s after a cancellation"))
                return
            await asyncio.wait((self._next,), timeout=left)

    def take(self, message: FromWorker) -> None:
        """Take a message of the worker."""
        if isinstance(message, Doing):
            if self._observer is not None:
                self._observer.doing(self.name, message.cause, message.detail)
            return
        if isinstance(message, StartedEarly):
            if self._observer is not None:
                self._observer.started_early(self.name, message.n_calls)
            return
        if self._next.done():  # a request that crossed our cancellation, or its answer
            self._next = self._loop.create_future()
        self._next.set_result(message)

    def lose(self, error: WorkerLost) -> None:
        """Report the death of the worker to the trajectory."""
        if self._next.done():
            self._next = self._loop.create_future()
        self._next.set_exception(error)
        self._next.exception()  # nobody may be waiting; asyncio would report that

    def refuse(self, error: Exception) -> None:
        """Fail the trajectory, because a message for the worker cannot be pickled."""
        self.take(Failed(self.name, error, self.phase))

    async def _sample(self, place: WorkerSlot, ask: Ask) -> None:
        """Sample an answer, and send it."""
        self._take_news(ask.news)
        for kind, items in ask.media.items():
            self._media.setdefault(kind, []).extend(items)
        assert self._ledger is not None
        on_ids = self._stream(place) if ask.streams else None
        start, size = self._doing("engine"), len(self._ledger)
        try:
            ids, finish = await self._shared.requests.sample(
                self._ledger, max_tokens=ask.max_tokens, key=self._key, on_ids=on_ids, media=self._media
            )
        except Exception as error:
            self._refuse(place, error)
            return
        if self._contexts is not None and ids:
            self._contexts.note(self._ledger, size)
        self._span("engine", start, tokens=len(ids), status=finish)
        place.post(Answer(self.name, array("q", ids), finish, self._version))

    def _stream(self, place: WorkerSlot) -> OnIds:
        def send(ids: Sequence[int]) -> None:
            place.post(TokenChunk(self.name, list(ids)))

        return send

    async def _message(self, place: WorkerSlot, ask: AskChat) -> None:
        """Request a message, and send it."""
        self._take_news(ask.news)
        if ask.tools is not None:
            self._chat, self._chat_tools = [], ask.tools
        self._chat += ask.messages
        start = self._doing("engine")
        try:
            message = await self._shared.requests.chat(
                lambda engine: engine.chat(
                    self._chat, tools=self._chat_tools, max_tokens=ask.max_tokens, key=self._key
                ),
                self.name,
            )
        except Exception as error:
            self._refuse(place, error)
            return
        self._span("engine", start, status=message.finish)
        place.post(EngineMessage(self.name, message, self._version))

    def _refuse(self, place: WorkerSlot, error: Exception) -> None:
        """Pass a failure of the engine on, which ends the trajectory, and maybe as truncated."""
        is_too_long = isinstance(error, ContextExceeded)
        if not is_too_long:
            self._engine_error = error
        place.post(Refuse(self.name, str(error), is_too_long))

    @property
    def _version(self) -> int:
        return self._shared.requests.version

    def _take_news(self, news: News) -> None:
        """Take over what the worker reports: turns, tokens and spans."""
        if news.said is not None:
            self._sealed.append(news.said)
            self._n_turns += news.n_turns
            if self._shared.spec.hook is not None:  # it records each turn when it has ended
                self._open()
        offset = 0.0 if self._place is None else self._place.clock_offset
        for span in news.spans:
            self._add(span.shifted(offset))
        ledger = self._ledger
        if ledger is None:
            return
        if news.base < len(ledger):  # the prompt was rendered anew
            ledger = self._ledger = ledger.copy(news.base)
        ledger.add_injected(news.ids, news.sources)

    def _open(self) -> None:
        """Read the turns that are still sealed, and record them."""
        while self._sealed:
            said = self._sealed[0].open()
            self._messages += said.messages
            self._turns += said.turns
            for turn, reward in zip(said.turns, said.rewards, strict=True):
                self._recording.record(turn)
                self._rewards.append(reward)
                if reward:
                    self._recording.add_reward(reward)
            del self._sealed[0]

    def _doing(self, cause: Cause) -> float:
        if self._observer is not None:
            self._observer.doing(self.name, cause)
        return self._loop.time()

    def _span(self, cause: Cause, start: float, *, tokens: int = 0, status: str = "") -> None:
        stop = self._loop.time()
        self._add(Span(cause, start, stop, self.name, "", self._n_turns, self._version, tokens, status))

    def _add(self, span: Span) -> None:
        self._spans.append(span)
        if self._observer is not None:
            self._observer.add(span)

    def so_far(self) -> Trajectory:
        """Return what has happened in a trajectory that failed, without its tokens."""
        self._open()
        return Trajectory(
            self.name,
            self._task,
            self._index,
            tuple(StoredMessage(one).read() for one in self._messages or self._task.messages),
            tuple(self._turns),
            "failed",
            turn_rewards=tuple(self._rewards),
            seconds=self._loop.time() - self._began,
            spans=tuple(self._spans),
        )

    def _finished(self, ended: Ended) -> Trajectory:
        self._open()
        return Trajectory(
            self.name,
            self._task,
            self._index,
            tuple(StoredMessage(one).read() for one in self._messages),
            tuple(self._turns),
            ended.reason,
            ended.terminated,
            ended.truncated,
            self._ledger,
            () if self._contexts is None else tuple(self._contexts.ledgers),
            ended.columns,
            tuple(self._rewards),
            sum(self._rewards),
            self._loop.time() - self._began,
            spans=tuple(self._spans),
        )

    async def _rewarded(self, trajectory: Trajectory) -> Trajectory:
        """Add the rewards; the reward function has a span."""
        if self._shared.reward is None:
            return await scored(trajectory, None)
        start = self._doing("reward")
        trajectory = await scored(trajectory, self._shared.reward)
        self._span("reward", start)
        return replace(trajectory, spans=tuple(self._spans))
