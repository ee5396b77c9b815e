"""Reward functions and scorers: functions of a finished `Trajectory` that return a number, bool or `Score`.

They serve as `reward=` of `AgentCollector` and `rollout`, and as scorers of evaluations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily
from torchrl_agentic.trajectory.score import Score, Scorer
from torchrl_agentic.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    from torchrl_agentic.rewards.answer_scorers import (
        contains,
        exact_match,
        marked_answer,
        matches_regex,
        numeric_match,
    )
    from torchrl_agentic.rewards.answers import answer_reward
    from torchrl_agentic.rewards.batched_scorer import Batched, batched
    from torchrl_agentic.rewards.code_scorer import CodeScorer, last_code_block
    from torchrl_agentic.rewards.model_judge import ModelJudge, UnreadableGrade
    from torchrl_agentic.rewards.quantities import Quantity, find_quantities, read_quantity
    from torchrl_agentic.rewards.shaping import format_reward, length_penalty, tool_use_reward
    from torchrl_agentic.rewards.token_chat import TokenChat
    from torchrl_agentic.rewards.weighted import Weighted

__all__ = [
    "Batched",
    "CodeScorer",
    "ModelJudge",
    "Quantity",
    "Score",
    "Scorer",
    "TokenChat",
    "Trajectory",
    "UnreadableGrade",
    "Weighted",
    "answer_reward",
    "batched",
    "contains",
    "exact_match",
    "find_quantities",
    "format_reward",
    "last_code_block",
    "length_penalty",
    "marked_answer",
    "matches_regex",
    "numeric_match",
    "read_quantity",
    "tool_use_reward",
]

__getattr__ = load_lazily(
    __name__,
    {
        "answer_scorers": ("contains", "exact_match", "marked_answer", "matches_regex", "numeric_match"),
        "answers": ("answer_reward",),
        "batched_scorer": ("Batched", "batched"),
        "code_scorer": ("CodeScorer", "last_code_block"),
        "model_judge": ("ModelJudge", "UnreadableGrade"),
        "quantities": ("Quantity", "find_quantities", "read_quantity"),
        "shaping": ("format_reward", "length_penalty", "tool_use_reward"),
        "token_chat": ("TokenChat",),
        "weighted": ("Weighted",),
    },
)
