"""From rollouts to what a loss trains on: one row per trajectory, with the mask of what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from torchrl_agentic.ledger import TokenLedger
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.tokens import read_ledger


def trajectory_batch(
    steps: TensorDictBase | Sequence[TensorDictBase] | Sequence[TokenLedger],
) -> LazyStackedTensorDict:
    """Give each finished trajectory as one row, whose tokens hold all its turns.

    steps: what an environment with a `TurnTokenizer` gave: a rollout [B, T], a collector's batch, a list of
    steps, or ledgers that were kept. Only steps in which a trajectory is done are read. Rows are ragged; each
    has ("tokens", "full") int64; ("masks", "all_attention_mask") bool; ("masks", "all_assistant_mask") bool,
    whether the token was sampled; ("log_probs", "full") float32, in nats, when it was sampled, NaN for the
    others. What follows the last sampled token is left out. For `GRPOLoss(..., masking_strategy="rlhf")`,
    with "advantage" [1, 1] per row.

    Raises:
        ValueError: no trajectory is done in these steps.
    """
    kept = [one for one in steps if isinstance(one, TokenLedger)] if isinstance(steps, Sequence) else []
    rows = [_row(ledger) for ledger in kept or ledgers(cast("TensorDictBase", steps))]
    if not rows:
        raise ValueError("no trajectory has ended in these steps; roll out to the end of each")
    return LazyStackedTensorDict(*rows, stack_dim=0)


def ledgers(steps: TensorDictBase | Sequence[TensorDictBase]) -> list[TokenLedger]:
    """Give the ledger of each finished trajectory, in the order of the steps."""
    return [read_ledger(step.get("next")) for step in finished(steps)]


def finished(steps: TensorDictBase | Sequence[TensorDictBase]) -> list[TensorDictBase]:
    """Give the steps, each of one row, in which a trajectory ended."""
    if not isinstance(steps, TensorDictBase):
        return [found for step in steps for found in finished(step)]
    if steps.batch_dims == 0:
        return [steps] if bool(steps.get(("next", "done")).any()) else []
    return [found for row in border.leaves(steps)[1] for found in finished(row)]


def group_advantage(rewards: torch.Tensor, group: int, *, eps: float = 1e-4) -> torch.Tensor:
    """Give the advantage of each trajectory within its group, [N, 1, 1], as `GRPOLoss` wants it.

    rewards: [N], those of a group next to each other. A group in which all are equal teaches nothing: zeros.

    Raises:
        ValueError: the groups do not come out even.
    """
    if rewards.ndim != 1 or len(rewards) % group:
        raise ValueError(f"rewards are [N], N a multiple of {group}; got {list(rewards.shape)}")
    grouped = rewards.float().reshape(-1, group)
    spread = grouped.std(-1, unbiased=False, keepdim=True)
    advantage = (grouped - grouped.mean(-1, keepdim=True)) / (spread + eps)
    return advantage.reshape(-1, 1, 1)


def _row(ledger: TokenLedger) -> TensorDictBase:
    size = max((span.stop for span in ledger.spans() if span.name == "sampled"), default=len(ledger))
    fields: dict[Any, torch.Tensor] = {
        ("tokens", "full"): torch.tensor(ledger.ids[:size], dtype=torch.int64),
        ("masks", "all_attention_mask"): torch.ones(size, dtype=torch.bool),
        ("masks", "all_assistant_mask"): torch.tensor(ledger.mask[:size], dtype=torch.bool),
        ("log_probs", "full"): torch.tensor(ledger.log_probs[:size], dtype=torch.float32),
    }
    row = TensorDict({})
    for key, value in fields.items():
        row.set(key, value)
    return row
