"""`EndTrajectory`: end trajectories after a number of turns, or at a message without calls."""

from __future__ import annotations

from torchrl_agentic.errors import check_count
from torchrl_agentic.trajectory.calls import BoundsStage
from torchrl_agentic.transforms.turn_transform import TurnTransform


class EndTrajectory(TurnTransform):
    """End the trajectories of a chat environment, which never ends them itself. Put it behind `ToolCompose`.

    It writes the reason into ("agentic", "ended_by"). A message that was cut off is no answer: `ToolCompose`
    has truncated its row.

    Args:
        max_turns: Number of turns after which a trajectory is truncated, or None for no limit.
        when_no_calls: Whether a message without calls terminates the trajectory, because it is the answer. It
            must be False with a `UserSimulator`, which replies to such messages.

    Raises:
        ValueError: If neither is given, or `max_turns` is below 1.
    """

    stage: BoundsStage
    reads_messages = False

    def __init__(self, *, max_turns: int | None = None, when_no_calls: bool = False) -> None:
        if max_turns is None and not when_no_calls:
            raise ValueError(
                "EndTrajectory would never end a trajectory: pass max_turns or when_no_calls=True"
            )
        check_count("max_turns", max_turns)
        super().__init__(BoundsStage(max_turns=max_turns, when_no_calls=when_no_calls))

    @property
    def max_turns(self) -> int | None:
        """Number of turns after which a trajectory is truncated, or None."""
        return self.stage.max_turns

    @property
    def when_no_calls(self) -> bool:
        """True if a message without calls terminates the trajectory."""
        return self.stage.when_no_calls

    def __repr__(self) -> str:
        return f"EndTrajectory(max_turns={self.max_turns}, when_no_calls={self.when_no_calls})"
