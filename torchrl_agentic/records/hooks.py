"""The interface of recorders: a `TrajectoryHook` starts a `Recording` for each trajectory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from torchrl_agentic.messages import JSON, Message, Turn

if TYPE_CHECKING:
    from torchrl_agentic.records.group_record import GroupRecord
    from torchrl_agentic.records.record import Origin, TokenRecord


class Recording:
    """Observer of one trajectory; this base class ignores everything. All methods run on the stepping thread.

    `record_turn` is called once per turn. The other methods are called where the values are known:
    `add_reward` after the turn that it belongs to, `annotate` at any time. Nothing is called after `finish`.
    """

    __slots__ = ()

    def record_turn(self, turn: Turn) -> None:
        """Record a turn."""
        del turn

    def add_reward(self, value: float) -> None:
        """Record the reward of the environment for the last turn."""
        del value

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Record messages that were added after the last turn, as the trajectory ended."""
        del messages

    def annotate(
        self,
        *,
        score: float | None = None,
        gts: JSON = None,
        tokens: TokenRecord | None = None,
        **extras: JSON,
    ) -> None:
        """Record facts about the whole trajectory; None means not known yet.

        Args:
            score: Score of the trajectory.
            gts: The right answer (ground truth), as the data set has it.
            tokens: Tokens of the trajectory.
            extras: Other fields, by name.
        """
        del score, gts, tokens, extras

    def set_origin(self, origin: Origin) -> None:
        """Record where the trajectory comes from; called again when more is known."""
        del origin

    def finish(self, reason: str) -> None:
        """End the recording.

        Args:
            reason: See `TrajectoryRecord.termination_reason`.
        """
        del reason


class TrajectoryHook:
    """Observer of the trajectories of environments: `ToolCompose(recorder=...)`. The default does nothing.

    One hook may serve several environments, and is copied to workers with them. The first exception of a hook
    is logged with its traceback, later ones are ignored; the step and the other hooks continue.
    """

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Start the recording of a trajectory.

        Args:
            trajectory: Name of the trajectory in its environment.
            row: Its place in the batch.

        Returns:
            The recording, which gets the turns.
        """
        del trajectory, row
        return Recording()

    def group_left(self, group: GroupRecord) -> None:
        """Record that a group of trajectories left its collector in a batch, with their advantages."""
        del group

    def weights_updated(self) -> None:
        """Record that the policy was updated with the groups that left since the last update."""


Recorders: TypeAlias = "TrajectoryHook | Callable[[Turn], object] | Sequence[Recorders] | None"
"""Argument of `ToolCompose(recorder=...)`: a hook, a function that gets each turn, or several of them."""
