"""Roll out models token by token, replay recorded conversations, and make batches for losses."""

from torchrl_agentic.collectors.batching import group_advantage
from torchrl_agentic.collectors.task_stream import TaskStream
from torchrl_agentic.records.call_stats import ToolSummary, summarize
from torchrl_agentic.rewards.answers import answer_reward
from torchrl_agentic.rollout.batch import group_batches, ledgers, trajectory_batch
from torchrl_agentic.rollout.batch_metrics import average_metrics, batch_metrics
from torchrl_agentic.rollout.checkpoints import CheckpointMismatch, Checkpoints, ModelState, discard_steps
from torchrl_agentic.rollout.generate import media_of, rollout, tasks_of
from torchrl_agentic.rollout.load_tasks import load_tasks
from torchrl_agentic.rollout.lock_step import LockStep
from torchrl_agentic.rollout.loggers import log_metrics, open_logger
from torchrl_agentic.rollout.policies import agent_policy, training_policy
from torchrl_agentic.rollout.replay import Answered, Conversation, Difference, replay
from torchrl_agentic.rollout.task_loader import TaskLoader
from torchrl_agentic.rollout.to_sft import SFTData, SFTRow, to_sft
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.trajectory.task import Task
from torchrl_agentic.trajectory.trajectory import Trajectory

__all__ = [
    "Answered",
    "CheckpointMismatch",
    "Checkpoints",
    "Conversation",
    "Difference",
    "LockStep",
    "ModelState",
    "SFTData",
    "SFTRow",
    "Task",
    "TaskLoader",
    "TaskStream",
    "TokenLedger",
    "ToolSummary",
    "Trajectory",
    "agent_policy",
    "answer_reward",
    "average_metrics",
    "batch_metrics",
    "discard_steps",
    "group_advantage",
    "group_batches",
    "ledgers",
    "load_tasks",
    "log_metrics",
    "media_of",
    "open_logger",
    "replay",
    "rollout",
    "summarize",
    "tasks_of",
    "to_sft",
    "training_policy",
    "trajectory_batch",
]
