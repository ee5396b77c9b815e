"""When a trajectory is over, other than by a tool that says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from torchrl_agentic.errors import check_count
from torchrl_agentic.transforms.compose import ToolCompose
from torchrl_agentic.transforms.pipeline import beside, stepped
from torchrl_agentic.transforms.specs import out_of_room, spec_with_truncated, truncate, with_truncated


class EndTrajectory(Transform):
    """End trajectories of a chat environment, which never ends them itself. Put it behind `ToolCompose`.

    It also truncates a row whose prompt left the policy no room for an answer (`agent_policy`).

    Args:
        max_turns: the turn after which a trajectory is truncated; None: no bound.
        when_no_calls: whether a message without calls is the last one, as an answer is. It terminates. With a
            `UserSimulator`, who answers such messages, it must be false.

    Raises:
        ValueError: neither is asked for, or `max_turns` is below 1.
    """

    def __init__(self, *, max_turns: int | None = None, when_no_calls: bool = False) -> None:
        if max_turns is None and not when_no_calls:
            raise ValueError("EndTrajectory would never end one: give max_turns or when_no_calls=True")
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
        composes = list(beside(self, ToolCompose))
        active, full = stepped(tensordict), out_of_room(tensordict)
        active, full = (torch.tensor(rows, device=done.device).reshape(done.shape) for rows in (active, full))
        cut = active & full
        _say(composes, cut, "max_trajectory_tokens")
        if self.when_no_calls:
            answered = active & ~cut & ~next_tensordict.get(("agentic", "any_tool_calls"))
            _say(composes, answered, "no_calls")
            next_tensordict.set("terminated", next_tensordict.get("terminated") | answered)
            next_tensordict.set("done", done | answered)
        if self.max_turns is not None:
            late = active & (next_tensordict.get(("agentic", "turn")) >= self.max_turns)
            _say(composes, late, "max_turns")
            cut = cut | late
        done = truncate(next_tensordict, cut).get("done")
        for compose in composes:
            compose.end(done.reshape(-1).tolist(), next_tensordict)
        return next_tensordict

    def transform_done_spec(self, done_spec: Any) -> Any:
        """Add `truncated`."""
        return spec_with_truncated(done_spec)

    def __repr__(self) -> str:
        return f"EndTrajectory(max_turns={self.max_turns}, when_no_calls={self.when_no_calls})"


def _say(composes: Iterable[ToolCompose], rows: torch.Tensor, reason: str) -> None:
    for compose in composes:
        compose.recordings.because(rows.reshape(-1).tolist(), reason)
