"""`AgentCollector`: every trajectory advances on its own, and whole groups leave as batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.collectors.agent_collector import AgentCollector
    from torchrl_agentic.collectors.batching import group_advantage
    from torchrl_agentic.collectors.branching import Branching, BranchPoint
    from torchrl_agentic.collectors.failures import FailedTask
    from torchrl_agentic.collectors.ray_workers import RayWorkers
    from torchrl_agentic.collectors.rollout_loop import CollectorError
    from torchrl_agentic.collectors.stats import CollectorStats
    from torchrl_agentic.collectors.task_stream import Curriculum, Progress, TaskStream
    from torchrl_agentic.collectors.workers import Workers
    from torchrl_agentic.trajectory.advantages import tree_advantage, tree_values
    from torchrl_agentic.trajectory.fork import Fork
    from torchrl_agentic.trajectory.score import Score, Scorer
    from torchrl_agentic.trajectory.task import Task
    from torchrl_agentic.trajectory.trajectory import Trajectory

__all__ = [
    "AgentCollector",
    "BranchPoint",
    "Branching",
    "CollectorError",
    "CollectorStats",
    "Curriculum",
    "FailedTask",
    "Fork",
    "Progress",
    "RayWorkers",
    "Score",
    "Scorer",
    "Task",
    "TaskStream",
    "Trajectory",
    "Workers",
    "group_advantage",
    "tree_advantage",
    "tree_values",
]

__getattr__ = load_lazily(
    __name__,
    {
        "agent_collector": ("AgentCollector",),
        "batching": ("group_advantage",),
        "branching": ("BranchPoint", "Branching"),
        "failures": ("FailedTask",),
        "ray_workers": ("RayWorkers",),
        ".trajectory.fork": ("Fork",),
        "rollout_loop": ("CollectorError",),
        ".trajectory.score": ("Score", "Scorer"),
        "stats": ("CollectorStats",),
        ".trajectory.task": ("Task",),
        ".trajectory.trajectory": ("Trajectory",),
        "task_stream": ("Curriculum", "Progress", "TaskStream"),
        "workers": ("Workers",),
        ".trajectory.advantages": ("tree_advantage", "tree_values"),
    },
)
