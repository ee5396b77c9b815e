"""The stages that give rewards: for tool calls, for the right answer, and from simulated users."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from torchrl_agentic.messages import as_number
from torchrl_agentic.trajectory.columns import KEY, Column
from torchrl_agentic.trajectory.episode import Episode, Stage, finish_all, finish_turns, take_final_rewards
from torchrl_agentic.trajectory.final_answer import final_answer
from torchrl_agentic.trajectory.task import first_known
from torchrl_agentic.trajectory.users import UserStage

if TYPE_CHECKING:
    from torchrl_agentic.trajectory.episode import OpenTurn

logger = logging.getLogger(__name__)

Place = Literal["turn", "end", "tokens"]
_SO_FAR = (KEY, "tool_return")


class NoAnswer(LookupError):
    """A task, or a row of a data set, has no right answer."""


class ToolRewardStage(Stage):
    """Gives the rewards of calls, and at the end the final rewards of tools.

    It closes what trajectories that have ended hold open, since only then the final rewards are known.

    Args:
        place: "turn": each turn has its own reward. "end": the last turn has the sum of all. "tokens": as
            "turn", and the border writes them at the sampled tokens.
        calls: Weight of the rewards of calls.
        trajectories: Weight of the final rewards.
    """

    name = "ToolRewardTransform"
    reads_answer = False
    gives_rewards = True
    needs_end = True

    def __init__(self, *, place: Place, calls: float, trajectories: float) -> None:
        self.place: Place = place
        self.calls, self.trajectories = calls, trajectories

    @property
    def columns(self) -> Sequence[Column]:
        """The sum so far, if only the end has a reward."""
        if self.place != "end":
            return ()
        return (Column("tool_return", float, "last", of_episode=self.so_far),)

    def run(self, turns: Sequence[OpenTurn]) -> Coroutine[Any, Any, None] | None:
        """Add the reward of each turn."""
        if ended := finish_turns(turns):
            return self._after(ended, turns)
        self._reward(turns)
        return None

    async def _after(self, ended: Iterable[Episode], turns: Sequence[OpenTurn]) -> None:
        await finish_all(ended)
        self._reward(turns)

    def _reward(self, turns: Sequence[OpenTurn]) -> None:
        take_final_rewards(turns)
        for turn in turns:
            reward = 0.0
            if self.calls:  # a weight of 0 leaves out NaN, too
                reward += self.calls * turn.tool_reward
            if self.trajectories:
                reward += self.trajectories * turn.final_reward
            if self.place == "end":
                so_far = self._before(turn) + reward
                turn.episode.state[self] = so_far
                reward = so_far if turn.is_over else 0.0
            turn.give(reward)

    @staticmethod
    def _before(turn: OpenTurn) -> float:
        """Return the sum in front of a turn as the border knows it: an environment may go back to a root."""
        found: Any = turn.lookup([_SO_FAR]).get(_SO_FAR)
        numbers = cast("list[float]", found if isinstance(found, list) else [found or 0.0])
        return float(numbers[0])

    def so_far(self, episode: Episode) -> float:
        """Return the sum of the rewards of a trajectory, with the place "end"."""
        return episode.state.get(self, 0.0)


class UserRewardStage(Stage):
    """Gives the scores of a simulated user as rewards.

    Args:
        replies: Weight of the scores of its replies.
        trajectories: Weight of its final score.
    """

    name = "UserRewardTransform"
    reads_answer = False
    needs = (UserStage,)
    gives_rewards = True
    needs_end = True

    def __init__(self, *, replies: float, trajectories: float) -> None:
        self.replies, self.trajectories = replies, trajectories

    def run(self, turns: Sequence[OpenTurn]) -> None:
        """Add the reward of each turn."""
        for turn in turns:
            reward = 0.0
            if self.replies and turn.reply is not None:
                reward += self.replies * (turn.reply.score or 0.0)
            if self.trajectories:
                reward += self.trajectories * turn.user_score
            turn.give(reward)


class AnswerRewardStage(Stage):
    """Gives a reward at the end of a trajectory, whether its answer is right.

    Args:
        is_right: Function of (answer, right answer) that returns True if they agree.
        sources: Columns of the data set that may have the right answer; the first that has one counts.
        right: Reward of a right answer.
        wrong: Reward of any other answer.
    """

    name = "AnswerRewardTransform"
    gives_rewards = True
    needs_end = True

    def __init__(
        self, is_right: Callable[[str, str], bool], sources: Sequence[Any], *, right: float, wrong: float
    ) -> None:
        self.is_right, self.sources, self.right, self.wrong = is_right, tuple(sources), right, wrong
        self._has_warned = False

    def run(self, turns: Sequence[OpenTurn]) -> None:
        """Add the rewards of the trajectories that have ended."""
        for turn in turns:
            if not turn.is_over:
                continue
            try:
                turn.give(self._reward(turn))
            except Exception as error:
                self._warn(turn, error)
                turn.give(math.nan, error)

    def _reward(self, turn: OpenTurn) -> float:
        said = (message.read() for message in reversed(turn.messages))
        answer = next((message.text for message in said if message.role == "assistant"), "")
        truth = first_known(turn.lookup(self.sources), self.sources)
        if truth is None:
            raise NoAnswer(f"no right answer in {', '.join(map(repr, self.sources))}")
        return self.reward_of(answer, str(final_answer(truth)))

    def reward_of(self, answer: str, truth: str) -> float:
        """Return the reward of an answer.

        Args:
            answer: The last message of the model; its reasoning does not count.
            truth: The right answer.

        Raises:
            TypeError: If `is_right` returns neither True nor False.
        """
        found = as_number(self.is_right(answer.rpartition("</think>")[2], truth), "the result of is_right")
        if found not in (0.0, 1.0):
            raise TypeError(f"is_right returns True or False; got {found}")
        return self.right if found else self.wrong

    def _warn(self, turn: OpenTurn, error: Exception) -> None:
        """Log once why an answer has no verdict."""
        if not self._has_warned:
            self._has_warned = True
            logger.error(
                "%s: %s (trajectory %s): the reward is NaN, here and in further such rows",
                self.name,
                error,
                turn.episode.name,
                exc_info=None if isinstance(error, NoAnswer) else error,
            )
