"""`EndTrajectory`: end trajectories after a number of turns, or at a message without calls."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from torchrl_agentic.errors import check_count
from torchrl_agentic.transforms.compose import ToolCompose
from torchrl_agentic.transforms.pipeline import beside, stepped
from torchrl_agentic.transforms.specs import (
    mark_ended,
    spec_with_truncated,
    truncate,
    with_truncated,
)


class EndTrajectory(Transform):
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

    def __init__(self, *, max_turns: int | None = None, when_no_calls: bool = False) -> None:
        if max_turns is None and not when_no_calls:
            raise ValueError(
                "EndTrajectory would never end a trajectory: pass max_turns or when_no_calls=True"
            )
        check_count("max_turns", max_turns)
        super().__init__()
        self.max_turns = max_turns
        self.when_no_calls = when_no_calls

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return with_truncated(tensordict_reset)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if ("agentic", "turn") not in next_tensordict.keys(True):
            raise RuntimeError("EndTrajectory reads what ToolCompose writes: put it behind it")
        done = next_tensordict.get("done")
        active = torch.tensor(stepped(tensordict), device=done.device).reshape(done.shape)
        if self.when_no_calls:
            called, cut, not_begun = (
                next_tensordict.get(("agentic", key)) for key in ("any_tool_calls", "cut", "not_begun")
            )
            answered = active & ~(called | cut | not_begun)
            mark_ended(next_tensordict, answered, "no_calls")
            next_tensordict.set("terminated", next_tensordict.get("terminated") | answered)
            next_tensordict.set("done", done | answered)
        if self.max_turns is not None:
            late = active & (next_tensordict.get(("agentic", "turn")) >= self.max_turns)
            mark_ended(next_tensordict, late, "max_turns")
            truncate(next_tensordict, late)
        done = next_tensordict.get("done")
        for compose in beside(self, ToolCompose):
            compose.end(done.reshape(-1).tolist(), next_tensordict)
        return next_tensordict

    def transform_done_spec(self, done_spec: Any) -> Any:
        """Add `truncated`."""
        return spec_with_truncated(done_spec)

    def __repr__(self) -> str:
        return f"EndTrajectory(max_turns={self.max_turns}, when_no_calls={self.when_no_calls})"
