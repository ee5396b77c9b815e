"""The TorchRL side: the transforms that put tool use into an environment.

Everything below this folder is torch-free.
"""

from torchrl_agentic.transforms.answer import AnswerRewardTransform
from torchrl_agentic.transforms.columns import collate_rows
from torchrl_agentic.transforms.compose import ToolCompose
from torchrl_agentic.transforms.ending import EndTrajectory
from torchrl_agentic.transforms.history import AgentHistory
from torchrl_agentic.transforms.interaction import UserSimulator
from torchrl_agentic.transforms.record import RecordTransform
from torchrl_agentic.transforms.reward import ToolRewardTransform
from torchrl_agentic.transforms.tokens import TurnTokenizer

__all__ = [
    "AgentHistory",
    "AnswerRewardTransform",
    "EndTrajectory",
    "RecordTransform",
    "ToolCompose",
    "ToolRewardTransform",
    "TurnTokenizer",
    "UserSimulator",
    "collate_rows",
]
