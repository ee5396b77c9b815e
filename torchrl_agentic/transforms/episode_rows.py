"""`EpisodeRows`: the trajectories of an environment's rows, in one process. Run a stage for their turns."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import copy
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from torchrl_agentic.dispatch import SessionRows
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.trajectory.episode import (
    Episode,
    EpisodeRecording,
    OpenTurn,
    Stage,
    act,
    finish_all,
    finish_turns,
    take_final_rewards,
)
from torchrl_agentic.trajectory.reasons import REASONS
from torchrl_agentic.transforms import specs
from torchrl_agentic.transforms.history import Conversation

if TYPE_CHECKING:
    from torchrl_agentic.records import TrajectoryHook
    from torchrl_agentic.trajectory.user_side import UserSide

logger = logging.getLogger(__name__)


class EpisodeRows(SessionRows[dict[int, Episode]]):
    """The trajectories of an environment's rows, and the dispatcher that runs their calls.

    Args:
        tools: The tools.
        options: Keyword arguments of `Dispatcher`.
        hook: Receives the records of the trajectories, or None.
        owner: Object that tools find as `ToolContext.compose`, or None.

    Attributes:
        has_user: Whether simulated users take part.
    """

    def __init__(
        self,
        tools: Iterable[Tool],
        options: Mapping[str, Any],
        hook: TrajectoryHook | None,
        owner: Any = None,
    ) -> None:
        super().__init__(tools, options, dict, owner)
        self.hook = hook
        self.has_user = self._has_warned = False

    @property
    def episodes(self) -> Mapping[int, Episode]:
        """The open trajectories by row."""
        return self.state

    def episode(self, row: int) -> Episode:
        """Return the trajectory of a row; begin one if none is open.

        Args:
            row: Index in the flattened batch.
        """
        session = self.session(row)
        episode = self.state.get(row)
        if episode is None or episode.session is not session:
            recording = EpisodeRecording(self.hook, session.trajectory, row)
            episode = Episode(session, recording, number=self.ids[row], has_user=self.has_user)
            self.state[row] = episode
        return episode

    def open_turns(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, reader: str
    ) -> list[OpenTurn]:
        """Return the turns that `ToolCompose` has opened in this step, for the transforms behind it.

        Args:
            tensordict: The root of the step, [*B].
            next_tensordict: Its "next", [*B].
            reader: Name of the transform that asks, for the message.

        Raises:
            RuntimeError: If `ToolCompose` has not seen the step.
        """
        numbers, active = specs.row_numbers(next_tensordict, specs.TRAJECTORY), specs.stepped(tensordict)
        turns = [
            episode.turn
            for row, episode in self.episodes.items()
            if active[row] and episode.turn is not None and numbers[row] == episode.number
        ]
        if len(turns) != sum(active):
            raise RuntimeError(f"{reader} reads what ToolCompose writes: put it behind it")
        from torchrl_agentic.transforms.dataset_rows import row_columns

        for turn in turns:
            turn.lookup = partial(row_columns, (tensordict, next_tensordict), turn.episode.row)
        return turns

    def settle(self, turns: Sequence[OpenTurn], next_tensordict: TensorDictBase) -> None:
        """Close the trajectories that have ended, and write the final rewards of their tools.

        Args:
            turns: Turns of the step.
            next_tensordict: Its "next", [*B].
        """
        over = [turn for turn in turns if turn.is_over]
        if ended := finish_turns(over):
            run(finish_all(ended))
        take_final_rewards(over)
        if judged := [turn for turn in over if turn.final_reward]:
            specs.write_final_rewards(next_tensordict, judged)

    def finish_done(self, next_tensordict: TensorDictBase) -> None:
        """Close the rows that other transforms have ended, and end the records of all rows that are done.

        Args:
            next_tensordict: The "next" of a step, [*B], after all transforms.
        """
        done = next_tensordict.get("done").reshape(-1).tolist()
        ended = [episode for row, episode in self.episodes.items() if row < len(done) and done[row]]
        if busy := [episode for episode in ended if episode.must_finish]:
            run(finish_all(busy))
        self.finish_records(ended, next_tensordict)

    @staticmethod
    def finish_records(episodes: Iterable[Episode], next_tensordict: TensorDictBase) -> None:
        """End the records of rows that are done, with the reasons that the TensorDict holds.

        Args:
            episodes: Trajectories of these rows.
            next_tensordict: The "next" of the step, [*B].
        """
        for episode in episodes:
            recording = episode.recording
            if recording.is_open:
                number = specs.row_numbers(next_tensordict, specs.ENDED_BY)[episode.row] or 0
                truncated = specs.row_numbers(next_tensordict, "truncated")[episode.row]
                # The flags tell only where no reason was written.
                told = REASONS[number] or ("truncated" if truncated else "terminated")
                recording.finish(episode.reason or told)

    def end_rows(self, rows: Iterable[int], reason: str = "reset") -> None:
        """End the trajectories of some rows, and close them; the next ones get other names.

        Args:
            rows: Rows of the flattened batch.
            reason: Reason for the records that are still open.
        """
        ended = [self.episodes[row] for row in rows if row in self.episodes]
        if users := [episode.user for episode in ended if episode.user is not None]:
            run(_close_all(users))
        self.end(episode.row for episode in ended)
        are_lost = False
        for episode in ended:
            del self.state[episode.row]
            if reward := episode.session.take_reward():
                are_lost = True
                episode.recording.annotate(final_reward=None if math.isnan(reward) else reward)
            episode.recording.finish(episode.reason or reason)
        if are_lost and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the final rewards of tools are lost, because these trajectories were reset before a step "
                "ended them: add ToolRewardTransform(), or EndTrajectory, as the last one that may end them"
            )

    def branch(self, row: int, into: Sequence[int]) -> None:
        """Continue the trajectory of one row in other rows, whose trajectories end.

        Args:
            row: Row of the trajectory, in the flattened batch.
            into: Rows that continue it.

        Raises:
            TypeError: If a tool that is open defines no `branch`, or a simulated user takes part.
            InfrastructureError: If the state of a tool cannot be copied.
        """
        if self.episode(row).user is not None:
            raise TypeError("a trajectory with a UserSimulator cannot be branched: users have no branch()")
        targets = [target for target in dict.fromkeys(into) if target != row]
        self.end_rows(targets)
        super().branch(row, targets)
        for target in targets:
            state = self.episode(row).state.items()
            self.episode(target).state.update((stage, copy.deepcopy(value)) for stage, value in state)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "hook": self.hook, "has_user": self.has_user, "_has_warned": False}


async def _close_all(users: Iterable[UserSide]) -> None:
    await asyncio.gather(*(user.close() for user in users))


def run_stage(stage: Stage, turns: Sequence[OpenTurn]) -> None:
    """Run a stage for the turns that it has not seen; if it fails, it sees them again in a repeated step.

    Args:
        stage: The stage.
        turns: The turns.
    """
    new = [turn for turn in turns if stage not in turn.effects]
    try:
        rest = act(stage, new)
        if rest is not None:
            run(rest)
    except BaseException:  # Ctrl-C, too
        for turn in new:
            turn.effects.pop(stage, None)
        raise


def append_messages(rows: list[Conversation], turns: Iterable[OpenTurn], stage: Stage) -> bool:
    """Append the messages of a stage to the conversations, and return True if there are any.

    Args:
        rows: Conversations of all rows; changed.
        turns: The turns.
        stage: The stage, which has acted on them.
    """
    longer = [turn for turn in turns if turn.effects[stage].messages]
    for turn in longer:
        rows[turn.episode.row] = rows[turn.episode.row].extended(turn.effects[stage].messages)
    return bool(longer)
