"""`UserStage`: let a simulated user answer the messages that call no tool, and score the trajectory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchrl_agentic.errors import InvalidTask, UserFailed
from torchrl_agentic.interactions.base import Interaction, Reply
from torchrl_agentic.interactions.user_tool import final_score, reply
from torchrl_agentic.messages import Message
from torchrl_agentic.tools.row_data import EXTRA
from torchrl_agentic.trajectory.calls import BoundsStage
from torchrl_agentic.trajectory.columns import USER, Column
from torchrl_agentic.trajectory.episode import Stage
from torchrl_agentic.trajectory.prompting import EncodingStage
from torchrl_agentic.trajectory.task import first_known

if TYPE_CHECKING:
    from torchrl_agentic.trajectory.episode import OpenTurn
    from torchrl_agentic.trajectory.user_side import UserSide

ORDER = "Compose(ToolCompose(...), EndTrajectory(max_turns=...), UserSimulator(...), TurnTokenizer(...))"


class UserStage(Stage):
    """Asks the simulated users for their replies and scores; the stage of `UserSimulator`.

    A user that fails, or takes too long, ends its trajectory with the reason "user_failed".

    Args:
        interactions: Interactions by name.
        max_turns: Number of replies; the message that would be answered next truncates the trajectory. None:
            no limit.
        role: Role of the user's messages.
        column: Column of the data set that chooses the interaction.
    """

    name = "UserSimulator"
    reads_answer = False
    hears_user = True
    may_end = True

    def __init__(
        self, interactions: Mapping[str, Interaction], *, max_turns: int | None, role: str, column: str
    ) -> None:
        self.interactions, self.max_turns = interactions, max_turns
        self.role, self.column = role, column

    @property
    def columns(self) -> Sequence[Column]:
        """Replies and scores."""
        return USER

    def wanted(self, lookup: Callable[[Iterable[Any]], Mapping[Any, Any]]) -> Any:
        """Return which interaction a row asks for: its column, or the same key of "extra_info", or None.

        Args:
            lookup: Returns columns by name.
        """
        names = (self.column, (EXTRA, self.column))
        return first_known(lookup(names), names)

    def check(self, stages: Sequence[Stage]) -> None:
        """Check that no other stage ends what the user would answer, and that its replies are encoded."""
        for stage in stages:
            if isinstance(stage, BoundsStage) and stage.when_no_calls:
                raise ValueError(
                    "EndTrajectory(when_no_calls=True) ends trajectories that UserSimulator continues: "
                    "remove when_no_calls, and let the user or max_turns end them"
                )
            if isinstance(stage, EncodingStage) and stages.index(stage) < stages.index(self):
                raise ValueError(f"TurnTokenizer must see what UserSimulator writes: {ORDER}")

    def run(self, turns: Sequence[OpenTurn]) -> Coroutine[Any, Any, None] | None:
        """Ask the users whose trajectories go on, and score those that have ended."""
        heard: list[Coroutine[Any, Any, None]] = []
        for turn in turns:
            user = turn.episode.user
            if not turn.has_begun and not turn.is_over:  # the row named an unknown user
                turn.end("not_begun", truncated=True)
            if user is None or user.is_over or not turn.has_begun:
                continue
            is_asked = not (turn.is_over or turn.calls) and turn.last["role"] == "assistant"
            if is_asked and self.max_turns is not None and user.n_replies >= self.max_turns:
                turn.end("max_turns", truncated=True)
            if is_asked or turn.is_over:
                heard.append(self._hear(turn, user))
        return _all(heard) if heard else None

    async def _hear(self, turn: OpenTurn, user: UserSide) -> None:
        """Ask the user for a reply, unless the trajectory has ended, and at its end for the score."""
        had_ended = is_over = turn.is_over
        messages = turn.read()
        said: Reply | None = None
        try:
            if not had_ended:
                said = turn.reply = await self._reply(turn, user, messages)
                is_over = said.is_over
                if said.text:
                    messages.append(Message(self.role, said.text))
            if is_over:
                score = await final_score(user.session, user.name, messages)
                turn.user_score = user.total if score is None else score
        except (UserFailed, InvalidTask) as error:
            turn.user_error, turn.user_score = error, math.nan
        if said is not None and (said.text or not said.is_over):
            turn.add([{"role": self.role, "content": turn.escape(said.text)}])
        if turn.user_error is not None:
            user.is_over = True
            user.close_later()
            if not had_ended:
                turn.end("user_failed", truncated=True)
        elif is_over:
            if not had_ended:
                turn.end("user", terminated=True)
            await user.close()

    async def _reply(self, turn: OpenTurn, user: UserSide, messages: Sequence[Message]) -> Reply:
        watch = turn.episode.watch
        start = watch.doing("user", user.name)
        said = await reply(user.session, user.name, messages)
        watch.span("user", start, name=user.name, turn=turn.number + 1)
        user.n_replies += 1
        user.total += said.score or 0.0
        return said


async def _all(heard: Sequence[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*heard)
