"""Make the TensorDict batch of finished groups: one ragged row per trajectory."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase

from torchrl_agentic.tensors import column_tensor
from torchrl_agentic.tokens.ledger import SAMPLED, TokenLedger
from torchrl_agentic.trajectory.advantages import tree_advantage
from torchrl_agentic.trajectory.columns import COLUMNS, KEY
from torchrl_agentic.trajectory.fork import Fork
from torchrl_agentic.trajectory.reasons import number_of
from torchrl_agentic.trajectory.training_rows import TrainingRow, training_rows
from torchrl_agentic.trajectory.trajectory import Trajectory


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
        has_trees: Whether trajectories may have forked, which gives each segment a row of its own.
    """
    every = [one for _, trajectories in groups for one in trajectories]
    names = {name: column.kind for name, column in COLUMNS.items() if column.kind is not list}
    for one in every:
        names.update((name, type(value)) for name, value in one.columns.items() if name not in names)
    scores = [one.score for one in every]
    parts = sorted({name for score in scores if score is not None for name in score.parts})
    rows: list[TensorDictBase] = []
    for number, trajectories in groups:
        for one in training_rows(trajectories):
            row = _row(one, number, names, parts)
            rows.append(_mark_shared(row, one) if has_trees else row)
    return LazyStackedTensorDict(*rows, stack_dim=0)


def _mark_shared(row: TensorDictBase, of: TrainingRow) -> TensorDictBase:
    """Mark the first tokens of a row as a prefix that other rows share, which no loss counts here."""
    row["masks", "all_assistant_mask"][: of.start] = False
    row["log_probs", "full"][: of.start] = math.nan
    row["collector", "policy_version"][: of.start] = -1
    row["collector", "shared"] = torch.arange(len(row["tokens", "full"])) < of.start
    row["collector", "path"] = NonTensorData(".".join(map(str, of.path)))
    return row


def _row(of: TrainingRow, group: int, names: Mapping[str, type], parts: Sequence[str]) -> TensorDictBase:
    trajectory, ledger, is_end = of.trajectory, of.ledger, of.is_end
    row = ledger_row(ledger)
    size = len(row["tokens", "full"])
    reward = torch.tensor([[of.reward]])
    fork = None if is_end or len(of.path) > len(trajectory.forks) else trajectory.forks[len(of.path) - 1]
    seconds = trajectory.seconds if fork is None else fork.seconds
    entries: dict[Any, Any] = {
        "reward": reward,
        "advantage": torch.tensor([[of.advantage]]),
        ("next", "reward"): reward.clone(),
        ("next", "done"): torch.tensor([is_end]),
        ("next", "terminated"): torch.tensor([is_end and trajectory.terminated]),
        ("next", "truncated"): torch.tensor([is_end and trajectory.truncated]),
        ("collector", "policy_version"): column_tensor("q", ledger.columns(size).versions, None),
        ("collector", "turn"): torch.tensor(of.turns[:size]),
        ("collector", "group"): torch.tensor([group]),
        ("collector", "seconds"): torch.tensor([seconds]),
        ("collector", "name"): NonTensorData(trajectory.name),
        ("collector", "reason"): NonTensorData(trajectory.reason if is_end else ""),
        "query": NonTensorData(trajectory.question),
        **{(KEY, name): value for name, value in _figures(of, fork, names).items()},
        **{(KEY, "score", name): value for name, value in _parts(of, parts).items()},
    }
    if trajectory.task.answer is not None:
        entries["answer"] = NonTensorData(trajectory.task.answer)
    for name, value in trajectory.task.data.items():
        if name not in row and name not in ("collector", "next", "reward", "advantage", KEY):
            entries[name] = value if isinstance(value, torch.Tensor) else NonTensorData(value)
    for key, value in entries.items():
        row.set(key, value)
    return row


def _figures(of: TrainingRow, fork: Fork | None, names: Mapping[str, type]) -> Mapping[str, Any]:
    """Return the entries under "agentic": numbers, [1], and lists; of an inner row, those at its fork."""
    known: dict[str, Any] = {}
    if of.is_end:
        known = {"turn": len(of.trajectory.turns), **of.trajectory.columns}
        known["ended_by"] = number_of(of.trajectory.reason)
    elif fork is not None:
        known = {"turn": fork.n_turns, **fork.columns}
    return {name: _entry(known.get(name, kind()), kind) for name, kind in names.items()}


def _entry(value: Any, kind: type) -> Any:
    return NonTensorData(value) if kind is list else torch.tensor([kind(value)])


def _parts(of: TrainingRow, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
    """Return the parts of a score, each [1]; all rows of a batch need the same keys, hence NaN for others."""
    score = of.trajectory.score if of.is_end else None
    found = {} if score is None else score.parts
    return {name: torch.tensor([float(found.get(name, math.nan))]) for name in names}
