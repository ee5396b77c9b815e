"""Roll out and evaluate models token by token, replay recorded conversations, and make batches for losses."""

from torchrl_agentic.collectors import Trajectory, group_advantage
from torchrl_agentic.records.call_stats import ToolSummary, summarize
from torchrl_agentic.rollout.batch import ledgers, trajectory_batch
from torchrl_agentic.rollout.evaluate import Completion, Sample, answer_reward, evaluate
from torchrl_agentic.rollout.generate import as_engine, media_of, rollout, tasks_of
from torchrl_agentic.rollout.policies import agent_policy, training_policy
from torchrl_agentic.rollout.replay import Answered, Conversation, Difference, replay
from torchrl_agentic.tokens.ledger import TokenLedger

__all__ = [
    "Answered",
    "Completion",
    "Conversation",
    "Difference",
    "Sample",
    "TokenLedger",
    "ToolSummary",
    "Trajectory",
    "agent_policy",
    "answer_reward",
    "as_engine",
    "evaluate",
    "group_advantage",
    "ledgers",
    "media_of",
    "replay",
    "rollout",
    "summarize",
    "tasks_of",
    "training_policy",
    "trajectory_batch",
]
