"""`tree_advantage`: the advantages of the segments of a tree of trajectories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torchrl_agentic.errors import check_reward

Path = tuple[int, ...]
"""Numbers of the branches that lead to a node: that of the tree, then one for each fork."""


def tree_values(rewards: Mapping[Path, float]) -> dict[Path, float]:
    """Return the value of each node: the reward of a leaf, else the mean of the values of its branches.

    Branches are drawn alike, hence each counts the same, however many leaves it has. The mean of all leaves
    would prefer the branches that forked again. In a tree of equal branches both are the same.

    Args:
        rewards: Reward of each leaf. No leaf lies on the way to another one.

    Returns:
        The values; that of () is the value of the task.

    Raises:
        ValueError: If there are no leaves, a leaf lies on the way to another one, or a reward is not finite
            in float32.
    """
    if not rewards:
        raise ValueError("a tree has leaves; got no rewards")
    children: dict[Path, dict[Path, None]] = {}
    for leaf, reward in rewards.items():
        check_reward("a reward", reward)
        for size in range(len(leaf)):
            if leaf[:size] in rewards:
                raise ValueError(f"the leaf {leaf[:size]} lies on the way to the leaf {leaf}")
            children.setdefault(leaf[:size], {})[leaf[: size + 1]] = None
    values = dict(rewards)
    for node in sorted(children, key=len, reverse=True):
        values[node] = _mean([values[child] for child in children[node]])
    return values


def tree_advantage(rewards: Mapping[Path, float], *, eps: float = 1e-4) -> dict[Path, float]:
    """Return the advantage of each segment, which is the way from one fork to the next or to a leaf.

    The advantage of the segment that leads to the node n, with the parent p, is ::

        A(n) = (V(n) - V(p)) / (S + eps)

    V is the value of a node (`tree_values`); V(p) is the mean of the values of n and its siblings, so that
    a segment is compared with what else could have followed the same tokens. S is the standard deviation of
    the rewards of the leaves, each weighted by the probability of its way if the branch is drawn evenly at
    each fork. One S for the whole group keeps the sizes of differences: a fork whose branches hardly differ
    teaches little.

    - Without forks these are the advantages of `group_advantage`.
    - The advantages of siblings add up to 0.
    - The advantages on the way to a leaf add up to that of its reward in the group: (r - V()) / (S + eps).
    - If all rewards are equal, all advantages are exactly 0.

    Args:
        rewards: Reward of each leaf, as `tree_values` takes them: {(0,): 1.0, (1, 0): 0.0, (1, 1): 1.0}.
        eps: Added to the standard deviation.

    Returns:
        The advantages of all nodes but ().

    Raises:
        ValueError: If `tree_values` does.
    """
    values = tree_values(rewards)
    widths: dict[Path, int] = {}
    for node in values:
        if node:
            widths[node[:-1]] = widths.get(node[:-1], 0) + 1
    spread = math.sqrt(
        math.fsum(
            (reward - values[()]) ** 2 / math.prod(widths[leaf[:size]] for size in range(len(leaf)))
            for leaf, reward in rewards.items()
        )
    )
    scale = (spread + eps) or 1.0  # with eps=0 and equal rewards, all differences are 0
    return {node: (value - values[node[:-1]]) / scale for node, value in values.items() if node}


def _mean(values: Sequence[float]) -> float:
    """Return the mean, exactly the value of all if they are equal."""
    least = min(values)
    return least + math.fsum(value - least for value in values) / len(values)
