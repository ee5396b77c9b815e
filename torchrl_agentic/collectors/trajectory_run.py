"""Run one trajectory as one coroutine: sample a message, pass it to the stages, until it has ended."""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

from torchrl_agentic.collectors.branching import BranchPoint, Forking
from torchrl_agentic.collectors.requests import Requests
from torchrl_agentic.collectors.scored_record import Reward, finish_record, scored, task_columns
from torchrl_agentic.dispatch import Session
from torchrl_agentic.dispatch.opening import read_row
from torchrl_agentic.errors import InvalidTask, RewardError, ToolFailed, UserFailed
from torchrl_agentic.messages import StoredMessage, Turn
from torchrl_agentic.records import Origin
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.tensors import has_rows, reset_tools, state_of
from torchrl_agentic.tokens.ledger import SAMPLED
from torchrl_agentic.trajectory.calls import without_eos
from torchrl_agentic.trajectory.columns import fold_turn
from torchrl_agentic.trajectory.episode import Episode, EpisodeRecording, act, take_final_rewards
from torchrl_agentic.trajectory.fork import Fork, ForkState
from torchrl_agentic.trajectory.prompting import MessagePrompting, Prompting, TokenPrompting
from torchrl_agentic.trajectory.reward_stages import NoAnswer
from torchrl_agentic.trajectory.span import Cause, Span
from torchrl_agentic.trajectory.spec import TrajectorySpec
from torchrl_agentic.trajectory.speculative_calls import SpeculativeCalls
from torchrl_agentic.trajectory.task import Task
from torchrl_agentic.trajectory.trajectory import Trajectory
from torchrl_agentic.trajectory.user_side import UserSide, chosen
from torchrl_agentic.trajectory.users import UserStage
from torchrl_agentic.trajectory.watch import Watch


class Observer(Protocol):
    """Follows what trajectories do."""

    def doing(self, name: str, cause: Cause, detail: str = "") -> None:
        """Note what a trajectory does from now on.

        Args:
            name: Name of the trajectory.
            cause: What it does.
            detail: Names of the tools or of the user; "" otherwise.
        """
        ...

    def started_early(self, name: str, count: int) -> None:
        """Note calls that started while the model wrote their message.

        Args:
            name: Name of the trajectory.
            count: Number of the calls.
        """
        ...

    def add(self, span: Span) -> None:
        """Add a span that has ended."""
        ...


class _RunWatch(Watch):
    """Notes the time of a trajectory by the clock of its event loop."""

    __slots__ = ("_name", "_observer", "_requests", "spans", "time")

    def __init__(self, name: str, requests: Requests, observer: Observer | None) -> None:
        self._name, self._requests, self._observer = name, requests, observer
        self.time = asyncio.get_running_loop().time
        self.spans: list[Span] = []

    def doing(self, cause: Cause, detail: str = "") -> float:
        if self._observer is not None:
            self._observer.doing(self._name, cause, detail)
        return self.time()

    def span(
        self,
        cause: Cause,
        start: float,
        stop: float | None = None,
        *,
        turn: int,
        name: str = "",
        tokens: int = 0,
        status: str = "",
    ) -> None:
        stop = self.time() if stop is None else stop
        span = Span(cause, start, stop, self._name, name, turn, self._requests.version, tokens, status)
        self.spans.append(span)
        if self._observer is not None:
            self._observer.add(span)


class TrajectoryRun:
    """One trajectory, from its task to its reward; created on the event loop that it runs on.

    Args:
        spec: The stages, and what the trajectories share.
        requests: Requests to the engine.
        task: What the trajectory starts from.
        name: Name of the trajectory, unique in the process.
        index: Number in its group.
        group: Number of the group; None without one.
        max_new_tokens: Upper bound on the tokens of one answer.
        reward: Returns a score that is added to the rewards of the transforms, or None.
        speculate: Whether calls of tools without effects start while the model still writes.
        observer: Follows what the trajectory does, or None.
        fork: State of another run at a fork, which this one continues; None: it begins.
        group_name: Name of the group for its tools, unique in the process; "" without one.
        key: Name of the trajectory for the engine, which may seed its answers by it; None: `name`.
        session: Session with what was open at the fork, from `branch_session`; None: a new one.
        forking: Decides after each turn whether the trajectory forks; None: it never does.

    Attributes:
        name: Name of the trajectory.
        phase: What runs: the preparation of the task, the turns, or the rewards.
    """

    def __init__(
        self,
        spec: TrajectorySpec,
        requests: Requests,
        task: Task,
        *,
        name: str,
        index: int = 0,
        group: int | None = None,
        max_new_tokens: int = 1024,
        reward: Reward | None = None,
        speculate: bool = False,
        observer: Observer | None = None,
        fork: ForkState | None = None,
        group_name: str = "",
        key: str | None = None,
        session: Session | None = None,
        forking: Forking | None = None,
    ) -> None:
        self._spec, self._requests, self._task = spec, requests, task
        self.name, self._index, self._key = name, index, key or name
        self._max_new_tokens, self._reward, self._speculate = max_new_tokens, reward, speculate
        self.phase: Literal["task", "trajectory", "reward"] = "task"
        self._fork, self._forking, self._observer = fork, forking, observer
        self._watch = _RunWatch(name, requests, observer)
        self._began = self._watch.time()
        session = spec.dispatcher.session(name) if session is None else session
        session.group = group_name
        self._origin = Origin(task.name, group, index)
        self._recording = EpisodeRecording(spec.hook, name, index, self._origin)
        self._episode = Episode(
            session,
            self._recording,
            number=_number_of(name),
            watch=self._watch,
            max_turns=task.max_turns,
            has_user=spec.users is not None,
        )
        self._turns = self._episode.turns = list[Turn]()
        self._columns: dict[str, Any] = {}
        self._rewards: list[float] = []
        self._prompt: Prompting | None = None

    async def run(self) -> Trajectory:
        """Run the trajectory to its end, close what it holds open, and compute its reward.

        Raises:
            InfrastructureError: If the engine is lost; `ToolFailed` if a tool cannot open at the beginning,
                and `UserFailed` if the simulated user fails.
            ValueError: If the task names unknown tools, or the engine cannot take its prompt.
            InvalidTask: If the prompt leaves no room for an answer, or a reward or the user says so.
            RewardError: If the reward function, or a final reward of a tool, raises or is not finite.
        """
        episode = self._episode
        try:
            has_ended = False
            try:
                self._prompt = prompt = await self._begin()
                self.phase = "trajectory"
                while not episode.is_over:
                    await self._turn(prompt)
                    if self._forking is not None and not episode.is_over:
                        await self._forking.after_turn(self)
                has_ended = True
            finally:
                closing = episode.finish() if has_ended else episode.abandon()
                await run_to_completion(closing, always_wait=True)
            self.phase = "reward"
            self._judge()
            trajectory = await self._scored(self._finished(prompt))
        except BaseException:
            self._recording.finish("failed")
            raise
        has_reward = self._reward is not None or self._spec.has_rewards
        finish_record(
            self._recording,
            trajectory,
            self._spec,
            origin=self._origin,
            has_reward=has_reward,
            is_annotated=True,
        )
        return trajectory

    async def _begin(self) -> Prompting:
        """Read the row, open what opens at the start, and encode the first prompt."""
        spec, episode, fork = self._spec, self._episode, self._fork
        session, tools = episode.session, spec.dispatcher.tools
        session.data = read_row({**self._task.data}, tools)
        if has_rows(tools):
            rows = [row == session.row for row in range(spec.dispatcher.row_numbers.count)]
            await session.threads.run(lambda: reset_tools(tools, rows))
        if fork is not None:
            messages = self._continue(fork)
        else:
            (opened,) = await spec.calls.open([episode])
            if (error := session.begin_error) is not None:
                if isinstance(error, InvalidTask):
                    raise error
                raise ToolFailed(f"{self.name} could not begin: {type(error).__name__}: {error}") from error
            messages = [*map(StoredMessage, self._task.messages), *map(StoredMessage, opened)]
        episode.user = self._user()
        prompt = self._prompting(messages)
        if fork is None and not prompt.has_room:
            raise InvalidTask(f"the prompt of task {self._task.name!r} leaves no room for an answer")
        return prompt

    def _continue(self, fork: ForkState) -> list[StoredMessage]:
        """Take over what another run has done before a fork, its records included; return the messages."""
        self._episode.session.resume(fork.counts)
        self._episode.state.update(_copied(fork.stage_states))
        self._began -= fork.seconds
        self._columns = dict(fork.columns)
        for turn, reward in zip(fork.turns, fork.turn_rewards, strict=True):
            turn = replace(turn, trajectory=self.name, row=self._index)
            self._turns.append(turn)
            self._recording.record(turn)
            self._note_reward(reward)
        return [StoredMessage(fields) for fields in fork.messages]

    def _user(self) -> UserSide | None:
        """Return the side of the simulated user that the task asks for, or None without one."""
        stage, dispatcher = self._spec.stage_of(UserStage), self._spec.users
        if stage is None or dispatcher is None:
            return None
        value = stage.wanted(partial(task_columns, self._task, columns={}))
        where = f"{stage.column!r} of task {self._task.name!r}"
        return UserSide(dispatcher, self._episode.session, *chosen(stage.interactions, where, value))

    def _prompting(self, messages: Sequence[StoredMessage]) -> Prompting:
        fork, shown = self._fork, self._episode.session.data.selection_at(0)
        options: dict[str, Any] = {
            "key": self._key,
            "max_new_tokens": self._max_new_tokens,
        }
        encoder = self._spec.encoder
        if encoder is None:
            tools = self._spec.compose.tools
            listed = [tool for tool in tools if shown is None or tool.name in shown]
            return MessagePrompting(self._requests, messages, tools=listed, is_first=fork is None, **options)
        return TokenPrompting(
            self._requests,
            messages,
            encoder=encoder,
            tools=shown,
            context_length=self._requests.engine.context_length,
            written=None if fork is None else fork.ledger,
            **options,
        )

    async def _turn(self, prompt: Prompting) -> None:
        """Sample a message, and pass it to the stages; its first calls may start while it is sampled."""
        number = self._episode.n_turns
        start = self._watch.doing("engine")
        early = self._speculative()
        try:
            message = await prompt.generate(None if early is None else early.feed)
            self._watch.span("engine", start, turn=number, tokens=prompt.n_sampled, status=prompt.finish)
            if isinstance(message.content, str):
                plain = without_eos(message.content, self._spec.calls.eos_strings)
                if plain is not message.content:
                    message = replace(message, content=plain)
            turn = self._episode.open_turn(message, StoredMessage.of(message), prompt.messages)
            turn.speculative = early
            turn.view = partial(state_of, self._task.data)
            turn.lookup = self._lookup
            prompt.open(turn)
            for stage in self._spec.stages:
                rest = act(stage, [turn])
                if rest is not None:
                    await rest
                if turn.user_error is not None:
                    self._raise_user_error(turn.user_error)
            prompt.take(turn)
            self._note_reward(turn.reward)
            if not self._episode.is_over:
                fold_turn(self._columns, turn, self._spec.columns)
        finally:
            if early is not None:
                if early.n_started and self._observer is not None:
                    self._observer.started_early(self.name, early.n_started)
                await run_to_completion(early.close(), always_wait=True)

    def _speculative(self) -> SpeculativeCalls | None:
        spec = self._spec
        if not self._speculate or spec.encoder is None:
            return None
        return SpeculativeCalls(
            spec.dispatcher,
            self._episode.session,
            spec.parser,
            tokenizer=spec.encoder.tokenizer,
            stop_ids=spec.encoder.stop_token_ids,
        )

    def _lookup(self, names: Any) -> dict[Any, Any]:
        """Return the named columns of the task, and of the turn so far."""
        turn = self._episode.turn
        assert turn is not None
        columns = {column.name: column.value(turn) for column in self._spec.columns}
        return task_columns(self._task, names, columns)

    def _raise_user_error(self, error: BaseException) -> None:
        if isinstance(error, InvalidTask | UserFailed):
            raise error
        raise UserFailed(f"the user of {self.name}: {type(error).__name__}: {error}") from error

    def _note_reward(self, reward: float) -> None:
        """Keep the reward of the last turn."""
        self._rewards.append(reward)
        if reward:
            self._recording.add_reward(reward)

    def _judge(self) -> None:
        """Raise what left the trajectory without a reward; else count its last turn."""
        turn = self._episode.turn
        assert turn is not None
        take_final_rewards([turn])
        errors = self._episode.verdict_errors
        for error in (*errors.values(), turn.verdict_error):
            if isinstance(error, InvalidTask):
                raise error
        for name, error in errors.items():
            what = f"the final reward of {name} in {self.name}"
            raise RewardError(f"{what}: {type(error).__name__}: {error}") from error
        if isinstance(error := turn.verdict_error, NoAnswer):
            raise RewardError(f"task {self._task.name!r} has no right answer: {error}") from error
        if error is not None:
            raise RewardError(f"the reward of {self.name}: {type(error).__name__}: {error}") from error
        fold_turn(self._columns, turn, self._spec.columns)

    def _finished(self, prompt: Prompting) -> Trajectory:
        episode = self._episode
        return Trajectory(
            self.name,
            self._task,
            self._index,
            tuple(message.read() for message in prompt.messages),
            tuple(self._turns),
            episode.reason,
            episode.terminated,
            episode.truncated,
            prompt.ledger,
            prompt.contexts,
            self._columns,
            tuple(self._rewards),
            sum(self._rewards),
            self._watch.time() - self._began,
            tuple(self._watch.spans),
            forks=self._forks,
        )

    async def _scored(self, trajectory: Trajectory) -> Trajectory:
        """Add the reward of the reward function, which has a span."""
        if self._reward is None:
            return await scored(trajectory, None)
        start = self._watch.doing("reward")
        trajectory = await scored(trajectory, self._reward)
        self._watch.span("reward", start, turn=self.n_turns)
        return replace(trajectory, spans=tuple(self._watch.spans))

    def so_far(self) -> Trajectory:
        """Return what has happened in a trajectory that failed, without its tokens."""
        prompt = self._prompt
        messages = map(StoredMessage, self._task.messages) if prompt is None else prompt.messages
        return Trajectory(
            self.name,
            self._task,
            self._index,
            tuple(message.read() for message in messages),
            tuple(self._turns),
            "failed",
            columns=self._columns,
            turn_rewards=tuple(self._rewards),
            seconds=self._watch.time() - self._began,
            spans=tuple(self._watch.spans),
            forks=self._forks,
        )

    @property
    def n_turns(self) -> int:
        """Number of turns so far."""
        return len(self._turns)

    def since(
        self, n_messages: int, n_turns: int
    ) -> tuple[tuple[Mapping[str, Any], ...], tuple[Turn, ...], tuple[float, ...]]:
        """Return the fields of the newest messages, the newest turns and their rewards.

        Call it between two turns.

        Args:
            n_messages: Number of first messages that are left out.
            n_turns: Number of first turns that are left out.
        """
        known = [] if self._prompt is None else self._prompt.messages
        messages = tuple({**message} for message in known[n_messages:])
        return messages, tuple(self._turns[n_turns:]), tuple(self._rewards[n_turns:])

    def fork_state(self) -> ForkState:
        """Return the trajectory as its branches continue it; call it between two turns. Costs O(length)."""
        session = self._episode.session
        ledger = None if self._prompt is None else self._prompt.written
        messages, turns, rewards = self.since(0, 0)
        return ForkState(
            messages,
            turns,
            None if ledger is None else ledger.copy(),
            session.counts(),
            session.is_open,
            self._watch.time() - self._began,
            dict(self._columns),
            rewards,
            _copied(self._episode.state),
        )

    def branch_point(self) -> BranchPoint:
        """Return the end of the last turn, for a function that decides whether the trajectory forks."""
        ledger = None if self._prompt is None else self._prompt.written
        log_probs: Sequence[float] = ()
        if ledger is not None:
            spans = [span for span in ledger.spans() if span.source == SAMPLED]
            log_probs = ledger.log_probs[spans[-1].start : spans[-1].stop] if spans else ()
        return BranchPoint(len(self._turns), self._turns[-1], log_probs, len(self._forks))

    async def branch_session(self, names: Sequence[str]) -> list[Session]:
        """Copy what the trajectory holds open, for its branches; the caller closes them.

        Args:
            names: Names of the other trajectories, each unique in the process.

        Raises:
            TypeError: If a tool that is open defines no `branch`.
            InfrastructureError: If the state of a tool cannot be copied.
        """
        self._watch.doing("tools", "branch")
        sessions = [self._spec.dispatcher.session(name) for name in names]
        await self._episode.session.branch(sessions)
        return sessions

    @property
    def _forks(self) -> tuple[Fork, ...]:
        return () if self._forking is None else self._forking.forks


def _copied(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of the state that stages keep; the stages are the keys."""
    return {stage: copy.deepcopy(value) for stage, value in states.items()}


def _number_of(name: str) -> int:
    """Return a number above 0 for a trajectory, the same whenever it has this name."""
    return 1 + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
