"""Run one trajectory as one coroutine: sample → parse → run the calls → render → encode, turn by turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from tensordict import TensorDict

from torchrl_agentic.collectors.agent import Agent, lookup
from torchrl_agentic.collectors.early_calls import EarlyCalls
from torchrl_agentic.collectors.requests import Requests, is_cancelling
from torchrl_agentic.collectors.span import Cause, Span
from torchrl_agentic.collectors.speaker import MessageSpeaker, Speaker, TokenSpeaker
from torchrl_agentic.collectors.task import Task, Trajectory
from torchrl_agentic.dispatch import Session
from torchrl_agentic.dispatch.opening import open_tools, read_row
from torchrl_agentic.dispatch.rendering import render
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.interactions.user_tool import final_score, reply, set_arguments
from torchrl_agentic.messages import JSON, DispatchResult, Message, ParsedCall, ToolResult, Turn
from torchrl_agentic.parsers.base import parse_message
from torchrl_agentic.records import Recording, TokenRecord
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.transforms.conversation import StoredMessage
from torchrl_agentic.transforms.dataset_rows import HIDDEN_STATE
from torchrl_agentic.transforms.history import without_eos
from torchrl_agentic.transforms.user_sessions import choice

Reward = Callable[[Trajectory], Awaitable[float]]
LONG_TEXT = 200_000
"""Characters of new messages above which they are encoded on a thread, so that other trajectories go on."""


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

    def add(self, span: Span) -> None:
        """Add a span that has ended."""
        ...


class RewardError(RuntimeError):
    """A reward function raised, or returned no number."""


class TrajectoryRun:
    """One trajectory, from its task to its reward; created on the event loop that it runs on.

    Args:
        agent: Tools, parser, bounds, rewards and recorder.
        requests: Requests to the engine.
        task: What the trajectory starts from.
        name: Name of the trajectory, unique in the process.
        index: Number in its group.
        max_new_tokens: Upper bound on the tokens of one answer.
        reward: Returns a reward that is added to those of the transforms, or None.
        speculate: Whether calls of tools without effects start while the model still writes.
        observer: Follows what the trajectory does, or None.

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
        max_new_tokens: int = 1024,
        reward: Reward | None = None,
        speculate: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self._agent, self._requests, self._task = agent, requests, task
        self.name, self._index, self._reward = name, index, reward
        self._speculate = speculate
        self.phase: Literal["task", "trajectory", "reward"] = "task"
        self._max_new_tokens = max_new_tokens
        self._observer = observer
        self._time = asyncio.get_running_loop().time
        self._began = self._time()
        self._session: Session = agent.dispatcher.session(name, row=index)
        self._conversation: list[StoredMessage] = [StoredMessage(message) for message in task.messages]
        self._recorded = 0
        self._recording: Recording = Recording()
        self._turns: list[Turn] = []
        self._spans: list[Span] = []
        self._reason, self._terminated, self._truncated = "", False, False
        self._tool_reward = 0.0
        self._has_reward = bool(reward or agent.tool_rewards or agent.answer_rewards)
        self._user: Session | None = None
        self._user_name, self._n_replies, self._user_total, self._user_score = "", 0, 0.0, 0.0

    async def run(self) -> Trajectory:
        """Run the trajectory to its end, close what it holds open, and compute its reward.

        Raises:
            InfrastructureError: If the engine is lost.
            ValueError: If the task names unknown tools, or the engine cannot take its prompt.
            RewardError: If the reward function raises or returns no number.
        """
        try:
            try:
                speaker = await self._begin()
                self.phase = "trajectory"
                while not self._is_over:
                    await self._turn(speaker)
            finally:
                await run_to_completion(self._close(), always_wait=True)
            self.phase = "reward"
            trajectory = await self._rewarded(self._finished(speaker))
        except BaseException:
            self._recording.finish("failed")
            raise
        self._finish_recording(trajectory)
        return trajectory

    @property
    def _is_over(self) -> bool:
        return self._terminated or self._truncated

    async def _begin(self) -> Speaker:
        """Read the row, open what opens at the start, and encode the first prompt."""
        agent, session = self._agent, self._session
        tools = agent.dispatcher.tools
        session.data = read_row({**self._task.data}, tools)
        calls, results = await open_tools(session, tools)
        if calls:
            self._conversation += map(StoredMessage, self._render(calls, results))
        if agent.users is not None:
            told = lookup(self._task.data, agent.users.column)
            if told is None:
                told = lookup(self._task.data, ("extra_info", agent.users.column))
            chosen = choice(agent.users.interactions, self._index, agent.users.column, told)
            self._user = agent.users.dispatcher.session(self.name, row=self._index)
            self._user_name = chosen.name
            set_arguments(self._user, chosen.kwargs)
        kind = MessageSpeaker if agent.encoder is None else TokenSpeaker
        return kind(
            agent,
            self._requests,
            [message.for_template() for message in self._conversation],
            tools=session.data.selection_at(0),
            key=self.name,
            max_new_tokens=self._max_new_tokens,
        )

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
                await run_to_completion(early.close(), always_wait=True)

    def _early_calls(self) -> EarlyCalls | None:
        agent = self._agent
        if not self._speculate or agent.encoder is None:
            return None
        return EarlyCalls(
            agent.dispatcher,
            self._session,
            agent.parser,
            tokenizer=agent.encoder.tokenizer,
            stop_ids=agent.encoder.stop_token_ids,
        )

    async def _finish_turn(self, speaker: Speaker, message: Message, early: EarlyCalls | None) -> None:
        """Parse a message, run its calls, and append it with what follows."""
        agent, session = self._agent, self._session
        if isinstance(message.content, str):
            plain = without_eos(message.content, agent.eos_strings)
            if plain is not message.content:
                message = Message("assistant", plain, message.tool_calls, is_complete=message.is_complete)
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
        self._end_by_turn(speaker, results, has_calls=bool(calls))
        injected += await self._hear_user([*self._conversation, answer, *injected], has_calls=bool(calls))
        await self._extend(speaker, answer, injected)
        if not self._is_over and speaker.is_full:
            self._end("max_trajectory_tokens", truncated=True)

    async def _run_calls(self, calls: Sequence[ParsedCall], early: EarlyCalls | None) -> Sequence[ToolResult]:
        session = self._session
        start = self._doing("tools", ", ".join(dict.fromkeys(call.tool for call in calls)))
        if early is None:
            (results,) = await self._agent.dispatcher.run([(session, calls, self._state())])
        else:
            results = await early.run(calls, self._state())
        self._span("tools", start, turn=session.turn - 1)
        for call, result in zip(calls, results, strict=True):
            if result.timing is not None:
                began = start + result.timing.queue_s
                self._span(
                    "tool", began, began + result.timing.run_s, name=call.tool, turn=session.turn - 1,
                    status=result.status.name,
                )  # fmt: skip
        if any(result.stop for result in results):
            await session.close()
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

    def _end_by_turn(self, speaker: Speaker, results: Sequence[ToolResult], *, has_calls: bool) -> None:
        """End the trajectory if its tools, its bounds or the lack of calls do; the first reason counts."""
        if any(result.stop for result in results):
            self._end("stop_tool", terminated=True)
        if not speaker.had_room:
            self._end("max_trajectory_tokens", truncated=True)
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
        has_failed = False
        if is_answer and users.max_turns is not None and self._n_replies >= users.max_turns:
            self._end("max_turns", truncated=True)
        elif is_answer:
            start = self._doing("user", self._user_name)
            found = await reply(session, self._user_name, messages)
            self._span("user", start, name=self._user_name)
            has_failed = found is None
            if found is None:
                self._end("max_turns", truncated=True)
            else:
                self._n_replies += 1
                self._user_total += found.score or 0.0
                if found.text or not found.is_over:
                    text = self._agent.parser.control_escaper.escape(found.text)
                    said.append(StoredMessage({"role": users.role, "content": text}))
                if found.text:
                    messages.append(Message(users.role, found.text))
                if found.is_over:
                    self._end("user", terminated=True)
        if self._is_over:
            judged = None if has_failed else (await final_score(session, self._user_name, messages))[0]
            self._user_score = self._user_total if judged is None else judged
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
        """Keep a turn and its reward, and pass both to the recorder."""
        if self._agent.hook is not None:
            if not self._turns:
                self._recording = self._agent.hook.begin(self.name, self._index)
            self._recording.record_turn(turn)
        self._turns.append(turn)
        reward = sum(result.reward or 0.0 for result in turn.outcome.results)
        self._tool_reward += reward
        weighted = sum(one.calls * reward for one in self._agent.tool_rewards)
        if weighted:
            self._recording.add_reward(weighted)

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
            self._requests.engine.version,
            tokens,
            status,
        )
        self._spans.append(span)
        if self._observer is not None:
            self._observer.add(span)

    async def _close(self) -> None:
        users = () if self._user is None else (self._user,)
        await asyncio.gather(*(session.close() for session in (self._session, *users)))

    def _finished(self, speaker: Speaker) -> Trajectory:
        agent = self._agent
        final = self._session.take_reward()
        trajectory = Trajectory(
            self.name,
            self._task,
            self._index,
            tuple(message.read() for message in self._conversation),
            tuple(self._turns),
            self._reason,
            self._terminated,
            self._truncated,
            speaker.ledger,
            self._tool_reward,
            final,
            self._user_score,
            0.0,
            speaker.token_drift(),
            self._time() - self._began,
            tuple(self._spans),
        )
        reward = sum(one.calls * self._tool_reward + one.trajectories * final for one in agent.tool_rewards)
        return replace(trajectory, reward=reward)

    async def _rewarded(self, trajectory: Trajectory) -> Trajectory:
        """Add the rewards for the answer, and that of the reward function."""
        added = sum(self._answer_rewards(trajectory))
        if self._reward is not None:
            start = self._doing("reward")
            try:
                value: Any = await self._reward(trajectory)
                if isinstance(value, str):
                    raise TypeError(f"a reward is a number; got {value!r:.80}")
                added += float(value)
            except InfrastructureError:
                raise
            except BaseException as error:  # SystemExit too: it would end the loop that all share
                if isinstance(error, GeneratorExit) or is_cancelling():
                    raise
                raise RewardError(f"the reward of {self.name}: {type(error).__name__}: {error}") from error
            self._span("reward", start)
        reward = trajectory.reward + added
        if not math.isfinite(reward):  # it would spoil the advantages of its whole group
            raise RewardError(f"the reward of {self.name} is {reward}; it must be finite")
        return replace(trajectory, reward=reward, spans=tuple(self._spans))

    def _answer_rewards(self, trajectory: Trajectory) -> Iterator[float]:
        said = (message.text for message in reversed(trajectory.messages) if message.role == "assistant")
        answer = next(said, "")
        for one in self._agent.answer_rewards:
            only = one.columns[0] if len(one.columns) == 1 else None
            truth = self._agent.truth(self._task) if only is None else lookup(self._task.data, only)
            if truth is None:
                raise RewardError(f"task {self._task.name!r} has no right answer")
            yield one.reward_of(answer, str(truth))

    def _finish_recording(self, trajectory: Trajectory) -> None:
        """Complete the record of the trajectory."""
        agent, record = self._agent, self._agent.record
        if agent.hook is None or not self._turns:
            return
        if self._has_reward:
            of_turns = sum(one.calls * self._tool_reward for one in agent.tool_rewards)
            last = sum(result.reward or 0.0 for result in self._turns[-1].outcome.results)
            of_last = sum(one.calls * last for one in agent.tool_rewards)
            self._recording.add_reward(of_last + trajectory.reward - of_turns)
        self._recording.annotate(gts=agent.truth(self._task))
        if record is not None:
            extras = {name: lookup(self._task.data, key) for name, key in record.extras.items()}
            tokens = self._token_record(trajectory) if record.tokens else None
            self._recording.annotate(tokens=tokens, **extras)
        self._recording.add_messages([one.read() for one in self._conversation[self._recorded :]])
        self._recording.finish(trajectory.reason)

    def _token_record(self, trajectory: Trajectory) -> TokenRecord | None:
        encoder, ledger = self._agent.encoder, trajectory.ledger
        if encoder is None or ledger is None:
            return None
        ids = ledger.ids
        decode = encoder.tokenizer.decode
        return TokenRecord(ledger, tuple(decode(ids[span.start : span.stop]) for span in ledger.spans()))
