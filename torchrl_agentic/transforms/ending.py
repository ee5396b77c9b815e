"""When a trajectory is over, other than by a tool that says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Binary
from torchrl.envs.transforms import Transform

from torchrl_agentic.transforms.compose import ToolCompose
from torchrl_agentic.transforms.within import beside, stepped


class EndTrajectory(Transform):
    """Ends trajectories of a chat environment, which never ends them itself. Put it behind `ToolCompose`.

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
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more; got {max_turns}")
        super().__init__()
        self.max_turns = max_turns
        self.when_no_calls = when_no_calls

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if self.max_turns is not None:
            tensordict_reset.set("truncated", torch.zeros_like(tensordict_reset.get("done")))
        return tensordict_reset

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if ("agentic", "turn") not in next_tensordict.keys(True):
            raise RuntimeError("EndTrajectory reads what ToolCompose writes: put it behind it")
        done = next_tensordict.get("done")
        composes = list(beside(self, ToolCompose))
        active = torch.tensor(stepped(tensordict), device=done.device).reshape(done.shape)
        if self.when_no_calls:
            answered = active & ~next_tensordict.get(("agentic", "any_tool_calls"))
            _say(composes, answered, "no_calls")
            next_tensordict.set("terminated", next_tensordict.get("terminated") | answered)
            done = done | answered
        if self.max_turns is not None:
            late = active & (next_tensordict.get(("agentic", "turn")) >= self.max_turns)
            _say(composes, late, "max_turns")
            truncated = next_tensordict.get("truncated", None)
            next_tensordict.set("truncated", late if truncated is None else late | truncated)
            done = done | late
        next_tensordict.set("done", done)
        for compose in composes:
            compose.end(done.reshape(-1).tolist(), next_tensordict)
        return next_tensordict

    def transform_done_spec(self, done_spec: Any) -> Any:
        """Add `truncated`, where it can be set."""
        if self.max_turns is not None and "truncated" not in done_spec.keys():
            shape = torch.Size((*done_spec.shape, 1))
            done_spec["truncated"] = Binary(n=1, shape=shape, dtype=torch.bool, device=done_spec.device)
        return done_spec

    def __repr__(self) -> str:
        return f"EndTrajectory(max_turns={self.max_turns}, when_no_calls={self.when_no_calls})"


def _say(composes: Iterable[ToolCompose], rows: torch.Tensor, reason: str) -> None:
    for compose in composes:
        compose.recordings.because(rows.reshape(-1).tolist(), reason)
