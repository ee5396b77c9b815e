"""The TorchRL side: the transforms that put tool use into an environment.

Everything below this folder is torch-free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.transforms.compose import ToolCompose
    from torchrl_agentic.transforms.dataset_rows import collate_rows
    from torchrl_agentic.transforms.end_trajectory import EndTrajectory
    from torchrl_agentic.transforms.history import AgentHistory
    from torchrl_agentic.transforms.record_transform import RecordTransform
    from torchrl_agentic.transforms.rewards import (
        AnswerRewardTransform,
        ToolRewardTransform,
        UserRewardTransform,
    )
    from torchrl_agentic.transforms.turn_tokenizer import TurnTokenizer
    from torchrl_agentic.transforms.turn_transform import TurnTransform
    from torchrl_agentic.transforms.user_simulator import UserSimulator

__all__ = [
    "AgentHistory",
    "AnswerRewardTransform",
    "EndTrajectory",
    "RecordTransform",
    "ToolCompose",
    "ToolRewardTransform",
    "TurnTokenizer",
    "TurnTransform",
    "UserRewardTransform",
    "UserSimulator",
    "collate_rows",
]

__getattr__ = load_lazily(
    __name__,
    {
        "compose": ("ToolCompose",),
        "dataset_rows": ("collate_rows",),
        "end_trajectory": ("EndTrajectory",),
        "history": ("AgentHistory",),
        "record_transform": ("RecordTransform",),
        "rewards": (
            "AnswerRewardTransform",
            "ToolRewardTransform",
            "UserRewardTransform",
        ),
        "turn_tokenizer": ("TurnTokenizer",),
        "turn_transform": ("TurnTransform",),
        "user_simulator": ("UserSimulator",),
    },
)
