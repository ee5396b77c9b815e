"""Make the TensorDict batch of finished groups: one ragged row per trajectory."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase

from torchrl_agentic.collectors.segments import Segment, segments_of
from torchrl_agentic.tensors import column_tensor
from torchrl_agentic.tokens.ledger import SAMPLED, TokenLedger
from torchrl_agentic.trajectory.columns import COLUMNS, KEY
from torchrl_agentic.trajectory.reasons import NUMBER_OF
from torchrl_agentic.trajectory.trajectory import Trajectory
from torchrl_agentic.trajectory.tree_advantages import tree_advantage


def group_advantage(rewards: torch.Tensor, group: int, *, eps: float = 1e-4) -> torch.Tensor:
    """Return the advantage of each trajectory within its group, as `GRPOLoss` takes it.

    The rewards of a group are centred, and divided by their standard deviation plus `eps`, in float64. A
    group in which all are equal teaches nothing: its advantages are exactly 0. This is `tree_advantage` of
    trajectories without forks.

    Args:
        rewards: Rewards of trajectories, [N] or [N, 1, 1] as in `trajectory_batch`; those of a group in a
            row.
        group: Number of trajectories in a group.
        eps: Added to the standard deviation.

    Returns:
        Advantages, float32, [N, 1, 1].

    Raises:
        ValueError: If the groups do not come out even, or a reward is not finite in float32.
    """
    if rewards.numel() != len(rewards) or len(rewards) % group:
        raise ValueError(f"rewards are [N] or [N, 1, 1], N a multiple of {group}; got {list(rewards.shape)}")
    values: list[float] = rewards.flatten().tolist()
    found: list[float] = []
    for start in range(0, len(values), group):
        leaves = {(number,): reward for number, reward in enumerate(values[start : start + group])}
        found += tree_advantage(leaves, eps=eps).values()
    return torch.tensor(found, device=rewards.device).reshape(-1, 1, 1)


def ledger_row(ledger: TokenLedger) -> TensorDictBase:
    """Return the tokens of a trajectory as a row, [T], up to the last sampled one.

    Args:
        ledger: The tokens.
    """
    ids, sources, log_probs, _ = ledger.columns(ledger.sampled_stop or None)
    fields: dict[Any, torch.Tensor] = {
        ("tokens", "full"): column_tensor("q", ids, None),
        ("masks", "all_attention_mask"): torch.ones(len(ids), dtype=torch.bool),
        ("masks", "all_assistant_mask"): column_tensor("q", sources, None) == SAMPLED,
        ("log_probs", "full"): column_tensor("f", log_probs, None),
    }
    row = TensorDict({})
    for key, value in fields.items():
        row.set(key, value)
    return row


def collector_batch(
    groups: Sequence[tuple[int, Sequence[Trajectory]]], *, has_trees: bool = False
) -> LazyStackedTensorDict:
    """Return the trajectories of whole groups as a batch; see `AgentCollector` for its entries.

    Args:
        groups: Number and trajectories of each group.
        has_trees: Whether trajectories may have forked, which gives each `Segment` a row of its own.
    """
    rows: list[TensorDictBase] = []
    every = [one for _, trajectories in groups for one in trajectories]
    names = {name: column.kind for name, column in COLUMNS.items() if column.kind is not list}
    for one in every:
        names.update((name, type(value)) for name, value in one.columns.items() if name not in names)
    scores = [one.score for one in every]
    parts = sorted({name for score in scores if score is not None for name in score.parts})
    for number, trajectories in groups:
        if has_trees and any(trajectory.forks for trajectory in trajectories):
            rows += (_segment_row(segment, number, names, parts) for segment in segments_of(trajectories))
            continue
        rewards = torch.tensor([float(one.reward) for one in trajectories], dtype=torch.float64)
        advantages = group_advantage(rewards, len(trajectories))
        for trajectory, advantage in zip(trajectories, advantages, strict=True):
            row = _row(trajectory, number, advantage, names, parts)
            rows.append(_mark_shared(row, 0, trajectory.path) if has_trees else row)
    return LazyStackedTensorDict(*rows, stack_dim=0)


def _segment_row(
    segment: Segment, group: int, names: Mapping[str, type], parts: Sequence[str]
) -> TensorDictBase:
    """Return the row of a segment: its trajectory up to its end, of which only its own tokens count."""
    trajectory = segment.trajectory
    if not segment.is_leaf:
        assert trajectory.ledger is not None
        fork = trajectory.forks[len(segment.path) - 1]
        trajectory = replace(
            trajectory,
            turns=trajectory.turns[: fork.n_turns],
            reason="",
            terminated=False,
            truncated=False,
            ledger=trajectory.ledger.copy(segment.stop),
            columns=fork.columns,
            reward=segment.value,
            seconds=fork.seconds,
            score=None,
        )
    row = _row(trajectory, group, torch.tensor([[segment.advantage]]), names, parts)
    if not segment.is_leaf:
        row["next", "done"] = torch.zeros(1, dtype=torch.bool)
    return _mark_shared(row, segment.start, segment.path)


def _mark_shared(row: TensorDictBase, n_shared: int, path: Sequence[int]) -> TensorDictBase:
    """Mark the first tokens of a row as a prefix that other rows share, which no loss counts here."""
    row["masks", "all_assistant_mask"][:n_shared] = False
    row["log_probs", "full"][:n_shared] = math.nan
    row["collector", "policy_version"][:n_shared] = -1
    row["collector", "shared"] = torch.arange(len(row["tokens", "full"])) < n_shared
    row["collector", "path"] = NonTensorData(".".join(map(str, path)))
    return row


def _row(
    trajectory: Trajectory,
    group: int,
    advantage: torch.Tensor,
    names: Mapping[str, type],
    parts: Sequence[str],
) -> TensorDictBase:
    ledger = trajectory.ledger
    assert ledger is not None
    row = ledger_row(ledger)
    size = len(row["tokens", "full"])
    reward = torch.tensor([[float(trajectory.reward)]])
    entries: dict[Any, Any] = {
        "reward": reward,
        "advantage": advantage,
        ("next", "reward"): reward.clone(),
        ("next", "done"): torch.ones(1, dtype=torch.bool),
        ("next", "terminated"): torch.tensor([trajectory.terminated]),
        ("next", "truncated"): torch.tensor([trajectory.truncated]),
        ("collector", "policy_version"): column_tensor("q", ledger.columns(size).versions, None),
        ("collector", "group"): torch.tensor([group]),
        ("collector", "seconds"): torch.tensor([trajectory.seconds]),
        ("collector", "name"): NonTensorData(trajectory.name),
        ("collector", "reason"): NonTensorData(trajectory.reason),
        "query": NonTensorData(trajectory.question),
        **{(KEY, name): value for name, value in _figures(trajectory, names).items()},
        **{(KEY, "score", name): value for name, value in _parts(trajectory, parts).items()},
    }
    if trajectory.task.answer is not None:
        entries["answer"] = NonTensorData(trajectory.task.answer)
    for name, value in trajectory.task.data.items():
        if name not in row and name not in ("collector", "next", "reward", "advantage", KEY):
            entries[name] = value if isinstance(value, torch.Tensor) else NonTensorData(value)
    for key, value in entries.items():
        row.set(key, value)
    return row


def _figures(trajectory: Trajectory, names: Mapping[str, type]) -> Mapping[str, Any]:
    """Return the entries under "agentic": numbers, each [1], and lists."""
    known: dict[str, Any] = {"turn": len(trajectory.turns), **trajectory.columns}
    known["ended_by"] = NUMBER_OF[trajectory.reason]
    values = {name: known.get(name, kind()) for name, kind in names.items()}
    return {name: _entry(value, names[name]) for name, value in values.items()}


def _entry(value: Any, kind: type) -> Any:
    return NonTensorData(value) if kind is list else torch.tensor([kind(value)])


def _parts(trajectory: Trajectory, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
    """Return the parts of a score, each [1]; all rows of a batch need the same keys, hence NaN for others."""
    found = {} if trajectory.score is None else trajectory.score.parts
    return {name: torch.tensor([float(found.get(name, math.nan))]) for name in names}
