"""Entries by which a policy and an environment agree on how long a trajectory may become."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Binary

from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms import telemetry

TOKENS_LEFT = (telemetry.KEY, "tokens_left")
"""Tokens that the prompt leaves of `max_trajectory_tokens`; int64, [*B, 1].

`TurnTokenizer` writes it for the next turn; `agent_policy` reads it.
"""
ROOM = (telemetry.KEY, "room")
"""Tokens that the prompt left for the answer; int64, [*B, 1]; 0 or less: no room.

`agent_policy` writes it into the root of a step; `EndTrajectory` and `TurnTokenizer` read it.
"""


def out_of_room(tensordict: TensorDictBase) -> list[bool]:
    """Return for each row of a step whether its answer is incomplete for want of room.

    Args:
        tensordict: The root of the step, [*B].
    """
    if tensordict.get(ROOM, None) is None:
        return [False] * tensordict.batch_size.numel()
    stack, rows = border.leaves(tensordict)
    answered = border.prompts(stack, "full")
    return [
        len(row.get(("tokens", "response"))) >= int(row.get(ROOM))
        and not border.read_message(border.messages(conversation)[-1]).is_complete
        for row, conversation in zip(rows, answered, strict=True)
    ]


def with_truncated(tensordict_reset: TensorDictBase) -> TensorDictBase:
    """Begin with "truncated" false in all rows, where it is not written yet."""
    if tensordict_reset.get("truncated", None) is None:
        tensordict_reset.set("truncated", torch.zeros_like(tensordict_reset.get("done")))
    return tensordict_reset


def spec_with_truncated(done_spec: Any) -> Any:
    """Describe "truncated", [*B, 1], where it is not described yet."""
    if "truncated" not in done_spec.keys():
        shape = torch.Size((*done_spec.shape, 1))
        done_spec["truncated"] = Binary(n=1, shape=shape, dtype=torch.bool, device=done_spec.device)
    return done_spec


def truncate(next_tensordict: TensorDictBase, cut: torch.Tensor) -> TensorDictBase:
    """End rows as truncated; those that have ended already stay as they are.

    Args:
        next_tensordict: The "next" of a step, [*B].
        cut: The rows to end, bool, [*B, 1].
    """
    known = next_tensordict.get("truncated", None)
    next_tensordict.set("truncated", cut if known is None else known | cut)
    return next_tensordict.set("done", next_tensordict.get("done") | cut)
