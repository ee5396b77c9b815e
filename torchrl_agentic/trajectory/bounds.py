"""`BoundsStage`: end a trajectory after a number of turns, or at a message without calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchrl_agentic.trajectory.episode import Stage

if TYPE_CHECKING:
    from torchrl_agentic.trajectory.episode import OpenTurn


class BoundsStage(Stage):
    """Ends trajectories by their turns or their answers; the stage of `EndTrajectory`.

    Args:
        max_turns: Number of turns after which a trajectory is truncated, or None for no limit but its own.
        when_no_calls: Whether a message without calls terminates the trajectory, because it is the answer.
    """

    name = "EndTrajectory"
    reads_answer = False
    may_end = True

    def __init__(self, *, max_turns: int | None = None, when_no_calls: bool = False) -> None:
        self.max_turns, self.when_no_calls = max_turns, when_no_calls

    def run(self, turns: Sequence[OpenTurn]) -> None:
        """End the trajectories that are over."""
        for turn in turns:
            message = turn.message
            is_answer = not (turn.results or turn.is_cut or message.refusal) and turn.has_begun
            if self.when_no_calls and is_answer:
                turn.end("no_calls", terminated=True)
            bounds = [bound for bound in (self.max_turns, turn.episode.max_turns) if bound is not None]
            if bounds and turn.episode.n_turns >= min(bounds):
                turn.end("max_turns", truncated=True)
