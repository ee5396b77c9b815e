"""Run one trajectory as one coroutine: sample → parse → run the calls → render → encode, turn by turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from tensordict import TensorDict

from torchrl_agentic.collectors.agent import Agent
from torchrl_agentic.collectors.branching import BranchPoint, Forking
from torchrl_agentic.trajectory.speculative_calls import SpeculativeCalls
from torchrl_agentic.trajectory.fork import Fork, ForkState
from torchrl_agentic.collectors.outcome import Outcome, Reward, RewardError, n_recorded
from torchrl_agentic.collectors.requests import Requests
from torchrl_agentic.trajectory.span import Cause, Span
from torchrl_agentic.collectors.speaker import MessageSpeaker, Speaker, TokenSpeaker
from torchrl_agentic.trajectory.task import Task, lookup
from torchrl_agentic.trajectory.trajectory import Trajectory
from torchrl_agentic.dispatch import Session
from torchrl_agentic.dispatch.opening import open_tools, read_row
from torchrl_agentic.dispatch.rendering import render
from torchrl_agentic.errors import InvalidTask, ToolFailed
from torchrl_agentic.interactions.user_tool import final_score, reply, set_arguments
from torchrl_agentic.messages import JSON, DispatchResult, Message, ParsedCall, ToolResult, Turn
from torchrl_agentic.parsers.base import parse_message
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.tokens.ledger import SAMPLED
from torchrl_agentic.trajectory.stored_message import StoredMessage
from torchrl_agentic.transforms.dataset_rows import HIDDEN_STATE, has_rows, reset_tools
from torchrl_agentic.transforms.history import without_eos
from torchrl_agentic.transforms.user_sessions import choice

LONG_TEXT = 200_000
"""Characters of new messages above which they are encoded on a thread, so that other trajectories go on."""
LONG_LEDGER = 50_000
"""Tokens above which the check for drift runs on a thread."""


class Observer(Protocol):
    """Follows what a trajectory does."""

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


@dataclass(frozen=True, slots=True)
class _UserState:
    """The simulated user's part: the number of replies, the sum of their scores, and the final score."""

    n_replies: int = 0
    total: float = 0.0
    score: float = 0.0


class TrajectoryRun:
    """One trajectory, from its task to its reward; created on the event loop that it runs on.

    Args:
        agent: Tools, parser, bounds, rewards and recorder.
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
        agent: Agent,
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
        self._key = key or name
        self._agent, self._requests, self._task = agent, requests, task
        self.name, self._index, self._reward = name, index, reward
        self._outcome = Outcome(agent, task, name=name, index=index, group=group, reward=reward)
        self._speculate = speculate
        self.phase: Literal["task", "trajectory", "reward"] = "task"
        self._max_new_tokens = max_new_tokens
        self._observer = observer
        self._time = asyncio.get_running_loop().time
        self._began = self._time()
        self._fork, self._forking = fork, forking
        self._session: Session = agent.dispatcher.session(name) if session is None else session
        self._session.group = group_name
        self._conversation: list[StoredMessage] = [StoredMessage(message) for message in task.messages]
        self._recorded = 0
        self._turns: list[Turn] = []
        self._spans: list[Span] = []
        self._reason, self._terminated, self._truncated = "", False, False
        self._user: Session | None = None
        self._user_name, self._user_state = "", _UserState()
        self._speaker: Speaker | None = None

    async def run(self) -> Trajectory:
        """Run the trajectory to its end, close what it holds open, and compute its reward.

        Raises:
            InfrastructureError: If the engine is lost; `ToolFailed` if a tool cannot open at the beginning,
                and `UserFailed` if the simulated user fails.
            ValueError: If the task names unknown tools, or the engine cannot take its prompt.
            InvalidTask: If the prompt leaves no room for an answer, or a reward or the user says so.
            RewardError: If the reward function, or a final reward of a tool, raises or is no finite number.
        """
        try:
            has_ended = False
            try:
                self._speaker = speaker = await self._begin()
                self.phase = "trajectory"
                while not self._is_over:
                    await self._turn(speaker)
                    if self._forking is not None and not self._is_over:
                        await self._forking.after_turn(self)
                has_ended = True
            finally:
                await run_to_completion(self._close(has_ended=has_ended), always_wait=True)
            self.phase = "reward"
            self._check_verdicts()
            drift = await self._token_drift(speaker)
            trajectory = await self._rewarded(self._finished(speaker, drift))
        except BaseException:
            self._outcome.fail()
            raise
        self._outcome.finish(trajectory)
        return trajectory

    def so_far(self) -> Trajectory:
        """Return what has happened in a trajectory that failed, without its tokens."""
        return Trajectory(
            self.name,
            self._task,
            self._index,
            tuple(message.read() for message in self._conversation),
            tuple(self._turns),
            "failed",
            tool_reward=self._outcome.tool_reward,
            seconds=self._time() - self._began,
            spans=tuple(self._spans),
            forks=self._forks,
        )

    def since(self, n_messages: int, n_turns: int) -> tuple[tuple[Mapping[str, Any], ...], tuple[Turn, ...]]:
        """Return the fields of the newest messages, and the newest turns; call it between two turns.

        Args:
            n_messages: Number of first messages that are left out.
            n_turns: Number of first turns that are left out.
        """
        messages = tuple({**message} for message in self._conversation[n_messages:])
        return messages, tuple(self._turns[n_turns:])

    def fork_state(self) -> ForkState:
        """Return the trajectory as its branches continue it; call it between two turns. Costs O(length)."""
        ledger = None if self._speaker is None else self._speaker.written
        messages, turns = self.since(0, 0)
        return ForkState(
            messages,
            turns,
            None if ledger is None else ledger.copy(),
            self._session.counts(),
            self._session.is_open,
            self._time() - self._began,
        )

    def branch_point(self) -> BranchPoint:
        """Return the end of the last turn, for a function that decides whether the trajectory forks."""
        ledger = None if self._speaker is None else self._speaker.written
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
        self._doing("tools", "branch")
        sessions = [self._agent.dispatcher.session(name) for name in names]
        await self._session.branch(sessions)
        return sessions

    @property
    def _forks(self) -> tuple[Fork, ...]:
        return () if self._forking is None else self._forking.forks

    @property
    def _is_over(self) -> bool:
        return self._terminated or self._truncated

    async def _begin(self) -> Speaker:
        """Read the row, open what opens at the start, and encode the first prompt."""
        agent, session, fork = self._agent, self._session, self._fork
        tools = agent.dispatcher.tools
        session.data = read_row({**self._task.data}, tools)
        if has_rows(tools):
            rows = [row == session.row for row in range(agent.dispatcher.row_numbers.count)]
            await session.threads.run(lambda: reset_tools(tools, rows))
        if fork is not None:
            self._continue(fork)
        else:
            calls, results = await open_tools(session, tools)
            if (error := session.begin_error) is not None:
                if isinstance(error, InvalidTask):
                    raise error
                raise ToolFailed(f"{self.name} could not begin: {type(error).__name__}: {error}") from error
            if calls:
                self._conversation += map(StoredMessage, self._render(calls, results))
        if agent.users is not None:
            told = lookup(self._task.data, agent.users.column)
            if told is None:
                told = lookup(self._task.data, ("extra_info", agent.users.column))
            chosen = choice(agent.users.interactions, self._index, agent.users.column, told)
            self._user = agent.users.dispatcher.session(self.name)
            self._user_name = chosen.name
            set_arguments(self._user, chosen.kwargs, session)
        kind = MessageSpeaker if agent.encoder is None else TokenSpeaker
        speaker = kind(
            agent,
            self._requests,
            [message.for_template() for message in self._conversation],
            tools=session.data.selection_at(0),
            key=self._key,
            max_new_tokens=self._max_new_tokens,
            written=None if fork is None else fork.ledger,
            is_first=fork is None,
        )
        if fork is None and speaker.is_full:
            raise InvalidTask(f"the prompt of task {self._task.name!r} leaves no room for an answer")
        return speaker

    def _continue(self, fork: ForkState) -> None:
        """Take over what another run has done before a fork, its records included."""
        self._session.resume(fork.counts)
        self._conversation = [StoredMessage(fields) for fields in fork.messages]
        self._began -= fork.seconds
        for turn in fork.turns:
            self._record(replace(turn, trajectory=self.name, row=self._index))
        self._recorded = n_recorded(fork.turns)

    async def _turn(self, speaker: Speaker) -> None:
        """Sample a message, and handle it; its first calls may start while it is sampled."""
        start = self._doing("engine")
        early = self._early_calls()
        try:
            message = await speaker.answer(None if early is None else early.feed)
            self._span("engine", start, tokens=speaker.n_sampled, status=speaker.finish)
            await self._finish_turn(speaker, message, early)
        finally:
            if early is not None:
                if early.n_started and self._observer is not None:
                    self._observer.started_early(self.name, early.n_started)
                await run_to_completion(early.close(), always_wait=True)

    def _early_calls(self) -> SpeculativeCalls | None:
        agent = self._agent
        if not self._speculate or agent.encoder is None:
            return None
        return SpeculativeCalls(
            agent.dispatcher,
            self._session,
            agent.parser,
            tokenizer=agent.encoder.tokenizer,
            stop_ids=agent.encoder.stop_token_ids,
        )

    async def _finish_turn(self, speaker: Speaker, message: Message, early: SpeculativeCalls | None) -> None:
        """Parse a message, run its calls, and append it with what follows."""
        agent, session = self._agent, self._session
        if isinstance(message.content, str):
            plain = without_eos(message.content, agent.eos_strings)
            if plain is not message.content:
                message = replace(message, content=plain)
        answer = StoredMessage.of(message)
        before = len(self._conversation)
        parsed = parse_message(
            agent.parser,
            message,
            tools=agent.dispatcher.schemas,
            turn=session.turn,
            trajectory=self.name,
        )
        calls: tuple[ParsedCall, ...] = ()
        results: Sequence[ToolResult] = ()
        rendered: Sequence[Mapping[str, JSON]] = ()
        if parsed.calls:
            calls = session.begin_turn(parsed.calls)
            results = await self._run_calls(calls, early)
            rendered = self._render(calls, results)
        else:
            session.turn += 1
        injected = [StoredMessage(one) for one in rendered]
        turn = Turn(
            self.name,
            session.turn - 1,
            message,
            DispatchResult(parsed.text, calls, tuple(results)),
            tuple(Message(m["role"], m["content"], tool_call_id=m.get("tool_call_id")) for m in rendered),
            tuple(one.read() for one in self._conversation[self._recorded : before]),
            parsed.notes,
            self._index,
        )
        self._recorded = before + 1 + len(injected)
        self._record(turn)
        self._end_by_turn(speaker, message, results, has_calls=bool(calls))
        injected += await self._hear_user([*self._conversation, answer, *injected], has_calls=bool(calls))
        await self._extend(speaker, answer, injected)
        if not self._is_over and speaker.is_full:
            self._end("max_trajectory_tokens", truncated=True)

    async def _run_calls(self, calls: Sequence[ParsedCall], early: SpeculativeCalls | None) -> Sequence[ToolResult]:
        session = self._session
        start = self._doing("tools", ", ".join(dict.fromkeys(call.tool for call in calls)))
        if early is None:
            (results,) = await self._agent.dispatcher.run([(session, calls, self._state())])
        else:
            results = await early.run(calls, self._state())
        self._span("tools", start, turn=session.turn - 1)
        starts = {} if early is None else early.starts
        for number, (call, result) in enumerate(zip(calls, results, strict=True)):
            if result.timing is not None:
                began = starts.get(number, start) + result.timing.queue_s
                self._span(
                    "tool", began, began + result.timing.run_s, name=call.tool, turn=session.turn - 1,
                    status=result.status.name,
                )  # fmt: skip
        if self._user is None and any(result.stop for result in results):
            await session.finish()
        return results

    def _render(
        self, calls: Sequence[ParsedCall], results: Sequence[ToolResult]
    ) -> Sequence[Mapping[str, JSON]]:
        agent = self._agent
        return render(
            agent.parser, calls, results, trajectory=self.name, tool_role=agent.tool_role, media=agent.media
        )

    def _state(self) -> Any:
        """Return the row of the data set for tools with `wants_state`, without answers."""
        agent = self._agent
        if not (agent.passes_state and any(tool.wants_state for tool in agent.dispatcher.tools)):
            return None
        shown = {name: value for name, value in self._task.data.items() if name not in HIDDEN_STATE}
        return TensorDict(shown).lock_()

    def _end_by_turn(
        self, speaker: Speaker, message: Message, results: Sequence[ToolResult], *, has_calls: bool
    ) -> None:
        """End the trajectory if its tools, a refusal, its bounds or the lack of calls do."""
        if any(result.stop for result in results):
            self._end("stop_tool", terminated=True)
        if message.refusal:
            self._end("refused", terminated=True)
        elif speaker.cut_by:
            self._end(speaker.cut_by, truncated=True)
        elif self._agent.when_no_calls and not has_calls:
            self._end("no_calls", terminated=True)
        bounds = (self._agent.max_turns, self._task.max_turns)
        if self._session.turn >= min(bound for bound in bounds if bound is not None):
            self._end("max_turns", truncated=True)

    def _end(self, reason: str, *, terminated: bool = False, truncated: bool = False) -> None:
        self._reason = self._reason or reason
        self._terminated = self._terminated or terminated
        self._truncated = self._truncated or truncated

    async def _hear_user(
        self, conversation: Sequence[StoredMessage], *, has_calls: bool
    ) -> list[StoredMessage]:
        """Ask the simulated user for a reply to a message without calls, and for its final score."""
        users, session = self._agent.users, self._user
        if users is None or session is None:
            return []
        said: list[StoredMessage] = []
        messages = [message.read() for message in conversation]
        is_answer = not (self._is_over or has_calls)
        heard = self._user_state
        if is_answer and users.max_turns is not None and heard.n_replies >= users.max_turns:
            self._end("max_turns", truncated=True)
        elif is_answer:
            start = self._doing("user", self._user_name)
            found = await reply(session, self._user_name, messages)
            self._span("user", start, name=self._user_name)
            heard = _UserState(heard.n_replies + 1, heard.total + (found.score or 0.0))
            self._outcome.record_reply(found.score or 0.0)
            if found.text or not found.is_over:
                text = self._agent.parser.control_escaper.escape(found.text)
                said.append(StoredMessage({"role": users.role, "content": text}))
            if found.text:
                messages.append(Message(users.role, found.text))
            if found.is_over:
                self._end("user", terminated=True)
        if self._is_over:
            judged = await final_score(session, self._user_name, messages)
            heard = replace(heard, score=heard.total if judged is None else judged)
        self._user_state = heard
        return said

    async def _extend(
        self, speaker: Speaker, answer: StoredMessage, injected: Sequence[StoredMessage]
    ) -> None:
        """Append a turn to the conversation and to the tokens."""
        shown = [message.for_template() for message in injected]
        size = sum(len(text) for one in shown if isinstance(text := one["content"], str))
        if size > LONG_TEXT:
            heard = await self._session.threads.run(lambda: speaker.hear(answer.for_template(), shown))
        else:
            heard = speaker.hear(answer.for_template(), shown)
        self._conversation.append(answer)
        for message, old, new in zip(injected, shown, heard, strict=True):
            fitted = message if new is old else StoredMessage({**message, "content": new["content"]})
            self._conversation.append(fitted)

    def _record(self, turn: Turn) -> None:
        """Keep a turn."""
        self._turns.append(turn)
        self._outcome.record(turn)

    def _doing(self, cause: Cause, detail: str = "") -> float:
        """Report what begins, and return the time."""
        if self._observer is not None:
            self._observer.doing(self.name, cause, detail)
        return self._time()

    def _span(
        self,
        cause: Cause,
        start: float,
        stop: float | None = None,
        *,
        name: str = "",
        turn: int | None = None,
        tokens: int = 0,
        status: str = "",
    ) -> None:
        span = Span(
            cause,
            start,
            self._time() if stop is None else stop,
            self.name,
            name,
            self._session.turn if turn is None else turn,
            self._requests.version,
            tokens,
            status,
        )
        self._spans.append(span)
        if self._observer is not None:
            self._observer.add(span)

    async def _close(self, *, has_ended: bool) -> None:
        """Close the user, then the tools, on whose worlds it may act; ask for final rewards at the end."""
        try:
            if self._user is not None:
                await self._user.close()
        finally:
            await (self._session.finish() if has_ended else self._session.close(judge=False))

    @property
    def n_turns(self) -> int:
        """Number of turns so far."""
        return len(self._turns)

    def _check_verdicts(self) -> None:
        """Raise the error of a tool that has no final reward."""
        errors = self._session.verdict_errors
        for error in errors.values():
            if isinstance(error, InvalidTask):
                raise error
        for name, error in errors.items():
            what = f"the final reward of {name} in {self.name}"
            raise RewardError(f"{what}: {type(error).__name__}: {error}") from error

    async def _token_drift(self, speaker: Speaker) -> int:
        ledger = speaker.ledger
        if ledger is None or len(ledger) <= LONG_LEDGER:
            return speaker.token_drift()
        return await self._session.threads.run(speaker.token_drift)

    def _finished(self, speaker: Speaker, drift: int) -> Trajectory:
        return Trajectory(
            self.name,
            self._task,
            self._index,
            tuple(message.read() for message in self._conversation),
            tuple(self._turns),
            self._reason,
            self._terminated,
            self._truncated,
            speaker.ledger,
            self._outcome.tool_reward,
            self._session.take_reward(),
            self._user_state.score,
            n_replies=self._user_state.n_replies,
            replies_score=self._user_state.total,
            token_drift=drift,
            seconds=self._time() - self._began,
            spans=tuple(self._spans),
            forks=self._forks,
        )

    async def _rewarded(self, trajectory: Trajectory) -> Trajectory:
        """Add the rewards; the reward function has a span."""
        if self._reward is None:
            return await self._outcome.rewarded(trajectory)
        start = self._doing("reward")
        trajectory = await self._outcome.rewarded(trajectory)
        self._span("reward", start)
        return replace(trajectory, spans=tuple(self._spans))
