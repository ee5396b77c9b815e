"""`Segment`: the part of a trajectory between two forks, which the trajectories behind it share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrl_agentic.trajectory.trajectory import Trajectory
from torchrl_agentic.trajectory.tree_advantages import Path, tree_advantage, tree_values


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the trajectories of a group: from a fork, or the beginning, to the next fork or the end.

    Attributes:
        path: Number of the tree, then that of the branch at each fork on the way.
        trajectory: The trajectory, or the first of those that share the segment.
        start: Number of tokens before the segment.
        stop: Number of tokens up to its end; None: all of the trajectory.
        value: Mean of the rewards that it led to; see `tree_values`.
        advantage: Its advantage; see `tree_advantage`.
    """

    path: Path
    trajectory: Trajectory
    start: int
    stop: int | None
    value: float
    advantage: float

    @property
    def is_leaf(self) -> bool:
        """True if the segment ends with the trajectory, and not with a fork."""
        return self.stop is None


def segments_of(trajectories: Sequence[Trajectory]) -> list[Segment]:
    """Return the segments of a whole group: each before those that follow it, leaves in the given order.

    Together they contain each token of the group once.

    Args:
        trajectories: The trajectories, in the order of their paths.
    """
    rewards = {trajectory.path: float(trajectory.reward) for trajectory in trajectories}
    values, advantages = tree_values(rewards), tree_advantage(rewards)
    found: dict[Path, Segment] = {}
    for trajectory in trajectories:
        path, forks = trajectory.path, trajectory.forks
        for size in range(1, len(path) + 1):
            node = path[:size]
            if node not in found:
                start = 0 if size == 1 else forks[size - 2].n_tokens
                stop = None if size == len(path) else forks[size - 1].n_tokens
                found[node] = Segment(node, trajectory, start, stop, values[node], advantages[node])
    return list(found.values())
