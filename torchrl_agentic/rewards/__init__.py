"""Reward functions and scorers: functions of a finished `Trajectory` that return a number, bool or `Score`.

They serve as `reward=` of `AgentCollector` and `rollout`, and as scorers of evaluations.
"""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
