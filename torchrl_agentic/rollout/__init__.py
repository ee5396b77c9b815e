"""Rollouts: recorded conversations replayed against tools that really run, and what came of them."""

from torchrl_agentic.rollout.replay import Conversation, Difference, replay
from torchrl_agentic.rollout.summary import ToolSummary, summarize

__all__ = ["Conversation", "Difference", "ToolSummary", "replay", "summarize"]
