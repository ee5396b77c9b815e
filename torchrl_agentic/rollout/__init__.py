"""Rollouts: recorded ones replayed, and those of real models, token by token, up to what a loss trains on."""

from torchrl_agentic.records.call_stats import ToolSummary, summarize
from torchrl_agentic.rollout.batch import group_advantage, ledgers, trajectory_batch
from torchrl_agentic.rollout.evaluate import answer_reward
from torchrl_agentic.rollout.generate import Trajectory, chats_of, media_of, roll_out
from torchrl_agentic.rollout.policies import agent_policy, training_policy
from torchrl_agentic.rollout.replay import Answered, Conversation, Difference, replay
from torchrl_agentic.tokens.ledger import TokenLedger

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
