"""`Episode`: a live trajectory, from its beginning to its end, without its conversation and its tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchrl_agentic.dispatch.session import Session
from torchrl_agentic.messages import JSON, DispatchResult, Message, Turn
from torchrl_agentic.trajectory.open_turn import OpenTurn
from torchrl_agentic.trajectory.stored_message import StoredMessage
from torchrl_agentic.trajectory.watch import SILENT, Watch

if TYPE_CHECKING:
    from torchrl_agentic.trajectory.recording import EpisodeRecording
    from torchrl_agentic.trajectory.stage import Stage
    from torchrl_agentic.trajectory.user_side import UserSide


class Episode:
    """A live trajectory: what it holds open, and how far it has come.

    It holds neither conversation nor tokens: in an environment the TensorDict is their only truth, since
    other transforms may change it, in a collector `Prompting`.

    Args:
        session: What its tools hold open.
        number: A number above 0 that identifies it in batches.
        recording: Its record, or None.
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
        *,
        number: int = 0,
        recording: EpisodeRecording | None = None,
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
        if recording is None:
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
