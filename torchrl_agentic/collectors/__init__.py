"""`AgentCollector`: every trajectory advances on its own, and whole groups leave as batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.collectors.agent_collector import AgentCollector
    from torchrl_agentic.collectors.batching import group_advantage
    from torchrl_agentic.collectors.rollout_loop import CollectorError
    from torchrl_agentic.collectors.stats import CollectorStats
    from torchrl_agentic.collectors.task import Task, Trajectory

__all__ = ["AgentCollector", "CollectorError", "CollectorStats", "Task", "Trajectory", "group_advantage"]

__getattr__ = load_lazily(
    __name__,
    {
        "agent_collector": ("AgentCollector",),
        "batching": ("group_advantage",),
        "rollout_loop": ("CollectorError",),
        "stats": ("CollectorStats",),
        "task": ("Task", "Trajectory"),
    },
)
