"""`Episode`: a live trajectory, without its conversation and its tokens; `OpenTurn`: one message of it.

`Stage`: one rule of a turn, with its options, which both borders apply in the order of the transforms.
"""

from __future__ import annotations

import asyncio
import logging
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torchrl_agentic.dispatch.session import Session
from torchrl_agentic.errors import LARGEST_REWARD
from torchrl_agentic.messages import (
    JSON,
    DispatchResult,
    Message,
    ParsedCall,
    ParseResult,
    Status,
    StoredMessage,
    ToolResult,
    Turn,
)
from torchrl_agentic.trajectory.columns import COLUMNS, KEY
from torchrl_agentic.trajectory.watch import SILENT, Watch

if TYPE_CHECKING:
    from torchrl_agentic.interactions.base import Reply
    from torchrl_agentic.records import Origin, Recording, TokenRecord, TrajectoryHook
    from torchrl_agentic.tokens.writer import NextPrompt, TokenWriter
    from torchrl_agentic.trajectory.columns import Column
    from torchrl_agentic.trajectory.speculative_calls import SpeculativeCalls
    from torchrl_agentic.trajectory.user_side import UserSide

logger = logging.getLogger(__name__)
_logged: weakref.WeakSet[Stage] = weakref.WeakSet()  # an environment checks at each reset
_UNREAD = ParseResult("")


@dataclass(slots=True)
class Effect:
    """The changes that one stage made in one turn; a border writes them each time that the step is repeated.

    Attributes:
        messages: Messages that it added.
        reason: Why it ended the trajectory, one of `REASONS` or a word of its own; "" if it did not.
        terminated: Whether the trajectory ended by itself.
        truncated: Whether a bound ended it.
        reward: Reward that it gave; NaN without a verdict.
    """

    messages: list[StoredMessage] = field(default_factory=list[StoredMessage])
    reason: str = ""
    terminated: bool = False
    truncated: bool = False
    reward: float = 0.0


def _no_columns(names: Iterable[Any]) -> Mapping[Any, Any]:
    del names
    return {}


class OpenTurn:
    """One trajectory between a message of the model and the next prompt: what the stages read and change.

    `Episode.open_turn` creates it. What the border sees, it sets before each stage.

    Args:
        episode: The trajectory.
        number: Number of the turn, counted from 0.
        message: Message of the model.
        answer: The same message, with the fields that the conversation keeps.
        earlier: Messages in front of it.

    Attributes:
        injected: Messages behind it.
        is_over: Whether the trajectory has ended, by a stage or by another transform.
        is_cut: Whether the message was cut off by a bound, so that its calls do not run.
        is_full: Whether the bound of the trajectory, not that of the answer, cut the message off.
        parsed: Text and calls of the message.
        calls: Its calls, with ids that are unique in the trajectory; none if they do not run.
        results: One result per call; set by `take_results`.
        n_errors: Number of results that are errors.
        tool_reward: Sum of the rewards of its calls; NaN if it is not finite in float32.
        is_stopped: Whether a tool asked to end the trajectory.
        speculative: Calls that have started while the message was sampled, or None.
        view: Returns the row as tools with `wants_state` see it.
        lookup: Returns those of the named columns that the row of the data set, or the step, has.
        escape: Escapes control tokens of the model in a text.
        reply: Reply of the simulated user, or None.
        user_error: Error of the simulated user, or None.
        user_score: Score of the whole trajectory by its user, once it has ended.
        final_reward: Sum of the final rewards of the tools, once they are known; NaN without a verdict.
        is_unjudged: Whether a reward, or a part of it, is unknown.
        verdict_error: Why a reward is unknown, if a stage knows it, or None.
        n_before: Number of messages in front of the sampled one. Usually that is `message`; but a transform
            in front of `ToolCompose` may have added further ones behind it.
        shortened: Messages that were shortened as they were encoded, by their place in the conversation.
        writer: Writes the next prompt, or None without tokens.
        whole_writer: Returns a writer with all tokens of the trajectory.
        context_length: Number of tokens that the engine takes; None: unknown.
        prompt: The next prompt, once it is written.
        drift: Number of ids that differ from those of the whole conversation, encoded at once.
        effects: What each stage did that has acted.
    """

    __slots__ = (
        "_effect", "answer", "calls", "context_length", "drift", "earlier", "effects", "episode",
        "escape", "final_reward", "injected", "is_cut", "is_full", "is_over", "is_stopped",
        "is_unjudged", "lookup", "message", "n_before", "n_errors", "number", "parsed", "prompt",
        "reply", "results", "shortened", "speculative", "tool_reward", "user_error", "user_score",
        "verdict_error", "view", "whole_writer", "writer",
    )  # fmt: skip

    def __init__(
        self,
        episode: Episode,
        number: int,
        message: Message,
        answer: StoredMessage,
        earlier: Sequence[StoredMessage],
    ) -> None:
        self.episode, self.number, self.message = episode, number, message
        self.answer, self.earlier = answer, earlier
        self.injected: list[StoredMessage] = []
        self.is_cut = message.role == "assistant" and message.finish == "length"
        self.is_over = self.is_full = self.is_unjudged = self.is_stopped = False
        self.n_errors, self.tool_reward = 0, 0.0
        self.parsed, self.calls = _UNREAD, tuple[ParsedCall, ...]()
        self.results: Sequence[ToolResult] = ()
        self.speculative: SpeculativeCalls | None = None
        self.view: Callable[[], Any] = _nothing
        self.lookup: Callable[[Iterable[Any]], Mapping[Any, Any]] = _no_columns
        self.escape: Callable[[str], str] = str
        self.reply: Reply | None = None
        self.user_error: BaseException | None = None
        self.user_score = self.final_reward = 0.0
        self.verdict_error: BaseException | None = None
        self.n_before = len(earlier)
        self.shortened: dict[int, StoredMessage] = {}
        self.writer: TokenWriter | None = None
        self.whole_writer: Callable[[OpenTurn], Any] = _own_writer
        self.context_length: int | None = None
        self.prompt: NextPrompt | None = None
        self.drift = 0
        self.effects: dict[Stage, Effect] = {}
        self._effect = Effect()

    @property
    def has_begun(self) -> bool:
        """False if the trajectory could not begin, because a tool could not open."""
        return self.episode.session.begin_error is None

    @property
    def last(self) -> StoredMessage:
        """The last message of the conversation."""
        return self.injected[-1] if self.injected else self.answer

    @property
    def messages(self) -> list[StoredMessage]:
        """The whole conversation, in a new list."""
        return [*self.earlier, self.answer, *self.injected]

    def read(self) -> list[Message]:
        """Return the whole conversation; costs O(messages)."""
        return [message.read() for message in self.messages]

    def take_results(self, results: Sequence[ToolResult]) -> None:
        """Store the results of the calls, and what they add up to."""
        self.results, self.n_errors, self.is_stopped, reward = results, 0, False, 0.0
        for result in results:
            self.n_errors += result.status is not Status.OK
            self.is_stopped = self.is_stopped or result.stop
            reward += result.reward or 0.0
        if not abs(reward) <= LARGEST_REWARD:
            reward, self.is_unjudged = math.nan, True
        self.tool_reward = reward

    def behind_sampled(self) -> tuple[StoredMessage, list[StoredMessage]]:
        """Return the sampled message, and all messages behind it."""
        if self.n_before == len(self.earlier):
            return self.answer, self.injected
        sampled, *more = self.earlier[self.n_before :]
        return sampled, [*more, self.answer, *self.injected]

    def shorten(self, place: int, message: StoredMessage) -> None:
        """Replace a message behind the sampled one by the form in which it was encoded.

        Args:
            place: Its place behind the sampled message, from 0.
            message: The shorter message.
        """
        place += self.n_before + 1
        self.shortened[place] = message
        if (own := place - len(self.earlier) - 1) >= 0:
            self.injected[own] = message

    def claim(self, stage: Stage) -> bool:
        """Return True if a stage has not acted on this turn, and let it act; else False.

        Args:
            stage: The stage.
        """
        if stage in self.effects:
            return False
        self._effect = self.effects[stage] = Effect()
        return True

    def add(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Append messages to the conversation.

        Args:
            messages: Messages with "role" and "content"; texts of strangers are escaped.
        """
        new = [one if isinstance(one, StoredMessage) else StoredMessage(one) for one in messages]
        self.injected += new
        self._effect.messages += new

    def end(self, reason: str, *, terminated: bool = False, truncated: bool = False) -> None:
        """End the trajectory; the first reason that is given counts.

        Args:
            reason: One of `REASONS`, or a word of your own, which records and ("collector", "reason") show;
                ("agentic", "ended_by") is a number, 0 for such a word.
            terminated: Whether it has ended by itself.
            truncated: Whether a bound ends it.
        """
        effect = self._effect
        effect.reason = effect.reason or reason
        effect.terminated, effect.truncated = effect.terminated or terminated, effect.truncated or truncated
        self.is_over = True
        self.episode.end(reason, terminated=terminated, truncated=truncated)

    def give(self, reward: float, error: BaseException | None = None) -> None:
        """Add a reward of the turn, beside those of other stages.

        A reward that is not finite in float32 is unknown: NaN. So is that of a trajectory that could not
        begin, or whose user failed.

        Args:
            reward: The reward.
            error: Why it is unknown, or None.
        """
        if not self.has_begun or self.user_error is not None or not abs(reward) <= LARGEST_REWARD:
            reward, self.is_unjudged = math.nan, True
            self.verdict_error = self.verdict_error or error
        self._effect.reward += reward

    @property
    def reason(self) -> str:
        """Why this turn ended the trajectory, by the first stage that gave a reason; "" if none ended it."""
        for effect in self.effects.values():
            if effect.reason:
                return effect.reason
        return ""

    @property
    def reward(self) -> float:
        """Sum of the rewards of this turn so far."""
        return sum(effect.reward for effect in self.effects.values())


def _own_writer(turn: OpenTurn) -> TokenWriter | None:
    return turn.writer


def _nothing() -> None:
    return None


class EpisodeRecording:
    """The record of one trajectory, from its first turn to its end; it does nothing without a hook.

    Args:
        hook: Receives the record, or None.
        trajectory: Name of the trajectory.
        row: Its place in the batch, or in its group.
        origin: Where the trajectory comes from, if that is known.

    Attributes:
        row: Its place in the batch, or in its group.
        n_messages: Number of messages of the conversation that are recorded.
    """

    __slots__ = (
        "_has_ended",
        "_hook",
        "_origin",
        "_recording",
        "_trajectory",
        "n_messages",
        "row",
    )

    def __init__(
        self, hook: TrajectoryHook | None, trajectory: str, row: int, origin: Origin | None = None
    ) -> None:
        self._origin = origin
        self._hook, self._trajectory, self.row = hook, trajectory, row
        self._recording: Recording | None = None
        self._has_ended = False
        self.n_messages = 0

    @property
    def is_wanted(self) -> bool:
        """True if a hook receives the record."""
        return self._hook is not None

    @property
    def is_open(self) -> bool:
        """True if a turn is recorded, and the record has not ended."""
        return self._recording is not None

    def record(self, turn: Turn) -> None:
        """Record a turn."""
        self.n_messages += len(turn.context) + 1 + len(turn.messages)
        if self._hook is not None and not self._has_ended:
            if self._recording is None:
                self._recording = self._hook.begin(self._trajectory, self.row)
                if self._origin is not None:
                    self._recording.set_origin(self._origin)
            self._recording.record_turn(turn)

    def add_reward(self, value: float) -> None:
        """Record the reward of the last turn; a later one replaces it."""
        if self._recording is not None:
            self._recording.add_reward(value)

    def add_rest(self, messages: Sequence[StoredMessage | Message]) -> None:
        """Record the messages of a whole conversation that came after its last recorded turn.

        Args:
            messages: All messages.
        """
        rest, self.n_messages = messages[self.n_messages :], len(messages)
        if self._recording is not None:
            read = [one if isinstance(one, Message) else one.read() for one in rest]
            self._recording.add_messages(read)

    def annotate(
        self,
        *,
        score: float | None = None,
        gts: JSON = None,
        tokens: TokenRecord | None = None,
        **extras: JSON,
    ) -> None:
        """Record facts about the whole trajectory; see `Recording.annotate`.

        Args:
            score: Score of the trajectory.
            gts: The right answer.
            tokens: Tokens of the trajectory.
            extras: Other fields, by name.
        """
        if self._recording is not None:
            self._recording.annotate(score=score, gts=gts, tokens=tokens, **extras)

    def set_origin(self, origin: Origin) -> None:
        """Record where the trajectory comes from."""
        if self._recording is not None:
            self._recording.set_origin(origin)

    def finish(self, reason: str) -> None:
        """End the record, if there is one.

        Args:
            reason: Why the trajectory ended.
        """
        recording, self._recording = self._recording, None
        if recording is not None:
            self._has_ended = True
            recording.finish(reason)


class Episode:
    """A live trajectory: what it holds open, and how far it has come.

    It holds neither conversation nor tokens: in an environment the TensorDict is their only truth, since
    other transforms may change it, in a collector `Prompting`.

    Args:
        session: What its tools hold open.
        number: A number above 0 that identifies it in batches.
        recording: Its record.
        watch: Follows what it does.
        max_turns: Upper bound on its turns, besides those of stages; None: no other.
        has_user: Whether a simulated user takes part, so that tools stay open until it was heard.

    Attributes:
        user: The simulated user's side, or None.
        turn: The last turn that was opened, or None.
        reason: Why it ended; "" if it goes on.
        terminated: Whether it ended by itself.
        truncated: Whether a bound ended it.
        verdict_errors: Errors that left it without a final reward, by tool.
        turns: Records of its turns; None if nobody keeps them.
        state: State that stages keep for it.
    """

    def __init__(
        self,
        session: Session,
        recording: EpisodeRecording,
        *,
        number: int = 0,
        watch: Watch = SILENT,
        max_turns: int | None = None,
        has_user: bool = False,
    ) -> None:
        self.session, self.number, self.watch = session, number, watch
        self.recording, self.max_turns, self.has_user = recording, max_turns, has_user
        self.user: UserSide | None = None
        self.turn: OpenTurn | None = None
        self.reason, self.terminated, self.truncated = "", False, False
        self.verdict_errors: dict[str, BaseException] = {}
        self.turns: list[Turn] | None = None
        self.state: dict[Stage, Any] = {}

    @property
    def name(self) -> str:
        """Name of the trajectory, unique in the process."""
        return self.session.trajectory

    @property
    def row(self) -> int:
        """Index in the flattened batch, or in the group."""
        return self.session.row

    @property
    def is_over(self) -> bool:
        """True if a stage has ended it."""
        return self.terminated or self.truncated

    @property
    def n_turns(self) -> int:
        """Number of turns so far."""
        return self.session.turn

    @property
    def must_finish(self) -> bool:
        """True if `finish` has something to do."""
        user = self.user
        return self.session.must_finish or (user is not None and not user.is_over)

    def open_turn(
        self,
        message: Message,
        answer: StoredMessage,
        earlier: Sequence[StoredMessage],
        *,
        root_turn: int | None = None,
    ) -> OpenTurn:
        """Return the turn of a message; if it is that of the last turn again, the turn that there is.

        So a step that is repeated runs nothing twice. Another message, behind the same prompt or an older
        one, opens a new turn: what the tools hold open cannot go back.

        Args:
            message: Message of the model.
            answer: The same message, as the conversation keeps it.
            earlier: Messages in front of it.
            root_turn: Number of turns in front of it, as the border knows it; None: unknown.
        """
        last = self.turn
        if (
            last is not None
            and root_turn == last.number
            and len(earlier) == len(last.earlier)
            and last.message == message
        ):
            last.injected = []
            return last
        self.turn = OpenTurn(self, self.session.turn, message, answer, earlier)
        return self.turn

    def note_turn(self, turn: OpenTurn, rendered: Sequence[Mapping[str, JSON]]) -> None:
        """Record a turn whose calls have run.

        Args:
            turn: The turn.
            rendered: Messages that carry the results.
        """
        recording = self.recording
        if self.turns is None and not recording.is_wanted:
            return
        recording.n_messages = min(recording.n_messages, len(turn.earlier))  # a step may go back to a root
        record = Turn(
            self.name,
            self.n_turns - 1,
            turn.message,
            DispatchResult(turn.parsed.text, turn.calls, tuple(turn.results)),
            tuple(Message(m["role"], m["content"], tool_call_id=m.get("tool_call_id")) for m in rendered),
            tuple(message.read() for message in turn.earlier[recording.n_messages :]),
            turn.parsed.notes,
            recording.row,
            {
                call.tool: names
                for call in turn.calls
                if (names := self.session.dispatcher.secret_args(call.tool))
            },
        )
        if self.turns is not None:
            self.turns.append(record)
        recording.record(record)

    def end(self, reason: str, *, terminated: bool = False, truncated: bool = False) -> None:
        """End the trajectory; the first reason counts.

        Args:
            reason: Why, as for `OpenTurn.end`.
            terminated: Whether it has ended by itself.
            truncated: Whether a bound ends it.
        """
        self.reason = self.reason or reason
        self.terminated, self.truncated = self.terminated or terminated, self.truncated or truncated

    async def finish(self) -> None:
        """Close everything at the end of the trajectory, after the final rewards of its tools.

        The user's side is closed first, since it may act on the worlds of the tools.
        """
        if self.user is not None:
            await self.user.close()
        await self.session.finish()

    async def abandon(self) -> None:
        """Close everything, without final rewards."""
        try:
            if self.user is not None:
                await self.user.close()
        finally:
            await self.session.close(judge=False)


def finish_turns(turns: Iterable[OpenTurn]) -> list[Episode]:
    """Return the trajectories that have ended and still hold something open.

    A trajectory whose user has not been heard in this turn is left out: the user may act on its worlds.

    Args:
        turns: The open turns.
    """
    found: list[Episode] = []
    for turn in turns:
        if turn.is_over and not awaits_user(turn):
            if turn.episode.must_finish:
                found.append(turn.episode)
            else:
                turn.episode.session.is_finished = True
    return found


def awaits_user(turn: OpenTurn) -> bool:
    """Return True if a simulated user takes part in a trajectory and has not been heard in this turn."""
    return turn.episode.has_user and not any(stage.hears_user for stage in turn.effects)


async def finish_all(episodes: Iterable[Episode]) -> None:
    """Finish trajectories concurrently."""
    await asyncio.gather(*(episode.finish() for episode in episodes))


def take_final_rewards(turns: Iterable[OpenTurn]) -> list[OpenTurn]:
    """Move the final rewards of tools that have closed into the open turns, each once.

    Args:
        turns: The open turns.

    Returns:
        The turns that got one.
    """
    found: list[OpenTurn] = []
    for turn in turns:
        if not turn.is_over:
            continue
        turn.episode.verdict_errors.update(turn.episode.session.verdict_errors)
        if reward := turn.episode.session.take_reward():
            turn.final_reward += reward
            turn.is_unjudged = turn.is_unjudged or math.isnan(reward)
            found.append(turn)
    return found


class Stage(ABC):
    """One rule of a turn: run the calls, end the trajectory, ask the user, give a reward.

    A transform that has a `stage` works in an environment and in an `AgentCollector`: the environment calls
    it for all rows of a step at once, a collector for one trajectory at a time. A stage reads the turns, adds
    messages (`OpenTurn.add`), ends trajectories (`OpenTurn.end`) and gives rewards (`OpenTurn.give`). State
    of a trajectory belongs into `Episode.state`, under the stage as the key.

    Attributes:
        name: Name for messages: that of the transform it belongs to; by default made of the class's name.
        needs: Classes of stages that must stand in front of this one, besides that of `ToolCompose`.
        opens_turns: Whether it is the stage of `ToolCompose`, which stands in front of all others.
        gives_rewards: Whether it calls `OpenTurn.give`.
        reads_answer: Whether it may look up the right answer of a task, which a worker gets only then.
        hears_user: Whether the simulated user is heard here; the tools stay open until then.
        may_end: Whether it ends trajectories; stages with `needs_end` belong behind it.
        needs_end: Whether it acts when a trajectory has ended, in the same turn.
    """

    name: ClassVar[str] = "Stage"
    needs: ClassVar[tuple[type[Stage], ...]] = ()
    opens_turns: ClassVar[bool] = False
    gives_rewards: ClassVar[bool] = False
    reads_answer: ClassVar[bool] = True
    hears_user: ClassVar[bool] = False
    may_end: ClassVar[bool] = False
    needs_end: ClassVar[bool] = False

    @property
    def columns(self) -> Sequence[Column]:
        """Entries under "agentic" that it fills in."""
        return ()

    @abstractmethod
    def run(self, turns: Sequence[OpenTurn]) -> Coroutine[Any, Any, None] | None:
        """Act on the open turns of one or more trajectories.

        An ordinary method that has nothing to wait for returns None, which spares a step the way to the event
        loop and back. It may be a coroutine method, too.

        Args:
            turns: The turns, one per trajectory; each is passed to a stage once.

        Returns:
            What is left to do on the event loop, or None.
        """
        ...

    def check(self, stages: Sequence[Stage]) -> None:  # noqa: B027  most stages go together with all others
        """Check that the stage goes together with the others; called once, before the first trajectory.

        Args:
            stages: All stages, in the order of the transforms.

        Raises:
            ValueError: If it contradicts another one; the message says what would work.
        """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.removesuffix("Stage") or cls.__name__


def act(stage: Stage, turns: Iterable[OpenTurn]) -> Coroutine[Any, Any, None] | None:
    """Pass the turns to a stage that it has not seen.

    Args:
        stage: The stage.
        turns: Turns of several trajectories.

    Returns:
        What is left to do on the event loop, or None.
    """
    new = [turn for turn in turns if turn.claim(stage)]
    return stage.run(new) if new else None


def check_order(stages: Sequence[Stage]) -> None:
    """Check that each stage has what it needs in front of it, and goes together with the others.

    A stage that would miss the end of trajectories is logged, once.

    Args:
        stages: The stages, in the order of the transforms.

    Raises:
        ValueError: If one has not, or does not; the message names the order.
    """
    first = [type(stage) for stage in stages if stage.opens_turns][:1]
    for place, stage in enumerate(stages):
        for kind in (*([] if stage.opens_turns else first), *stage.needs):
            if not any(isinstance(one, kind) for one in stages[:place]):
                if any(isinstance(one, kind) for one in stages[place:]):
                    raise ValueError(
                        f"{stage.name} reads what {kind.name} writes, and stands in front of it; write "
                        f"Compose({kind.name}(...), {stage.name}(...))"
                    )
                raise ValueError(
                    f"{stage.name} reads what {kind.name} writes, and there is no {kind.name}; write "
                    f"Compose({kind.name}(...), {stage.name}(...))"
                )
        for column in stage.columns:
            if COLUMNS.get(column.name, column) is not column:
                raise ValueError(
                    f"{stage.name} has a column {column.name!r}, which is one of {KEY!r} already: rename it"
                )
        stage.check(stages)
        late = next((one for one in stages[place + 1 :] if one.may_end), None)
        if stage.needs_end and late is not None and stage not in _logged:
            _logged.add(stage)
            logger.warning(
                "%s acts on trajectories that have ended, and misses those that %s behind it ends; write "
                "Compose(%s(...), %s(...))",
                stage.name,
                late.name,
                late.name,
                stage.name,
            )
