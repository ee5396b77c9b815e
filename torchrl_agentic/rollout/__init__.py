"""Rollouts: recorded ones replayed, and those of real models, token by token, up to what a loss trains on."""

from torchrl_agentic.ledger import TokenLedger
from torchrl_agentic.records.calls import ToolSummary, summarize
from torchrl_agentic.rollout.collect import group_advantage, ledgers, trajectory_batch
from torchrl_agentic.rollout.generate import Trajectory, chats_of, roll_out
from torchrl_agentic.rollout.media import media_of
from torchrl_agentic.rollout.policies import agent_policy, training_policy
from torchrl_agentic.rollout.replay import Answered, Conversation, Difference, replay
from torchrl_agentic.rollout.rewards import answer_reward

__all__ = [
    "Answered",
    "Conversation",
    "Difference",
    "TokenLedger",
    "ToolSummary",
    "Trajectory",
    "agent_policy",
    "answer_reward",
    "chats_of",
    "group_advantage",
    "ledgers",
    "media_of",
    "replay",
    "roll_out",
    "summarize",
    "training_policy",
    "trajectory_batch",
]
