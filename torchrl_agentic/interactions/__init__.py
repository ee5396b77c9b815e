"""Who the model talks to besides its tools: simulated users, each for one conversation at a time.

To add one: subclass `Interaction`, and let a test inherit `testing.InteractionContract`.
"""

from torchrl_agentic.interactions.adapters import (
    FunctionUser,
    Gsm8kInteraction,
    ScriptedUser,
    VerlInteraction,
    as_interaction,
)
from torchrl_agentic.interactions.base import Interaction, Reply, in_thread
from torchrl_agentic.interactions.load import load_interactions

__all__ = [
    "FunctionUser",
    "Gsm8kInteraction",
    "Interaction",
    "Reply",
    "ScriptedUser",
    "VerlInteraction",
    "as_interaction",
    "in_thread",
    "load_interactions",
]
