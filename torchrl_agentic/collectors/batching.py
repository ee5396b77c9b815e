"""Make the TensorDict batch of finished groups: one ragged row per trajectory."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase

from torchrl_agentic.collectors.task import Trajectory
from torchrl_agentic.tokens.ledger import SAMPLED, TokenLedger
from torchrl_agentic.transforms import specs
from torchrl_agentic.transforms.token_rows import column_tensor


def group_advantage(rewards: torch.Tensor, group: int, *, eps: float = 1e-4) -> torch.Tensor:
    """Return the advantage of each trajectory within its group, as `GRPOLoss` takes it.

    The rewards of a group are centred, and divided by their standard deviation plus `eps`. A group in which
    all are equal teaches nothing: zeros.

    Args:
        rewards: Rewards of trajectories, [N] or [N, 1, 1] as in `trajectory_batch`; those of a group in a
            row.
        group: Number of trajectories in a group.
        eps: Added to the standard deviation.

    Returns:
        Advantages, [N, 1, 1].

    Raises:
        ValueError: If the groups do not come out even.
    """
    if rewards.numel() != len(rewards) or len(rewards) % group:
        raise ValueError(f"rewards are [N] or [N, 1, 1], N a multiple of {group}; got {list(rewards.shape)}")
    grouped = rewards.float().reshape(-1, group)
    spread = grouped.std(-1, unbiased=False, keepdim=True)
    advantage = (grouped - grouped.mean(-1, keepdim=True)) / (spread + eps)
    return advantage.reshape(-1, 1, 1)


def ledger_row(ledger: TokenLedger) -> TensorDictBase:
    """Return the tokens of a trajectory as a row, [T], up to the last sampled one.

    Args:
        ledger: The tokens.
    """
    size = max((span.stop for span in ledger.spans() if span.source == SAMPLED), default=len(ledger))
    fields: dict[Any, torch.Tensor] = {
        ("tokens", "full"): column_tensor("q", ledger.ids[:size], None),
        ("masks", "all_attention_mask"): torch.ones(size, dtype=torch.bool),
        ("masks", "all_assistant_mask"): column_tensor("q", ledger.sources[:size], None) == SAMPLED,
        ("log_probs", "full"): column_tensor("f", ledger.log_probs[:size], None),
    }
    row = TensorDict({})
    for key, value in fields.items():
        row.set(key, value)
    return row


def collector_batch(groups: Sequence[tuple[int, Sequence[Trajectory]]]) -> LazyStackedTensorDict:
    """Return the trajectories of whole groups as a batch; see `AgentCollector` for its entries.

    Args:
        groups: Number and trajectories of each group.
    """
    rows: list[TensorDictBase] = []
    for number, trajectories in groups:
        rewards = torch.tensor([float(trajectory.reward) for trajectory in trajectories])
        advantages = group_advantage(rewards, len(trajectories))
        for trajectory, advantage in zip(trajectories, advantages, strict=True):
            rows.append(_row(trajectory, number, advantage))
    return LazyStackedTensorDict(*rows, stack_dim=0)


def _row(trajectory: Trajectory, group: int, advantage: torch.Tensor) -> TensorDictBase:
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
        ("collector", "policy_version"): column_tensor("q", ledger.versions[:size], None),
        ("collector", "group"): torch.tensor([group]),
        ("collector", "seconds"): torch.tensor([trajectory.seconds]),
        ("collector", "name"): NonTensorData(trajectory.name),
        ("collector", "reason"): NonTensorData(trajectory.reason),
        "query": NonTensorData(_question(trajectory)),
        **{("agentic", name): value for name, value in _figures(trajectory).items()},
    }
    if trajectory.task.answer is not None:
        entries["answer"] = NonTensorData(trajectory.task.answer)
    for name, value in trajectory.task.data.items():
        if name not in row and name not in ("collector", "next", "reward", "advantage", specs.KEY):
            entries[name] = value if isinstance(value, torch.Tensor) else NonTensorData(value)
    for key, value in entries.items():
        row.set(key, value)
    return row


def _figures(trajectory: Trajectory) -> Mapping[str, torch.Tensor]:
    """Return the entries under "agentic", each [1], summed over the trajectory."""
    return {
        "turn": torch.tensor([len(trajectory.turns)]),
        "n_calls": torch.tensor([trajectory.n_calls]),
        "n_errors": torch.tensor([trajectory.n_errors]),
        "n_infra": torch.tensor([trajectory.n_infra]),
        "tool_reward": torch.tensor([float(trajectory.tool_reward)]),
        "trajectory_reward": torch.tensor([float(trajectory.final_reward)]),
        "tool_seconds": torch.tensor([float(trajectory.tool_seconds)]),
        "user_final_score": torch.tensor([float(trajectory.user_score)]),
        "token_drift": torch.tensor([trajectory.token_drift]),
        "ended_by": torch.tensor([specs.REASONS.index(trajectory.reason)]),
    }


def _question(trajectory: Trajectory) -> str:
    """Return the text of the last message of the task that the user wrote."""
    asked = [message for message in trajectory.task.messages if message["role"] == "user"]
    content = (asked or trajectory.task.messages)[-1]["content"]
    return content if isinstance(content, str) else str(content)
