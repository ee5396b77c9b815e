"""Simulated users that reply to the model; each session is one conversation.

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

__all__ = [
    "FunctionUser",
    "Gsm8kInteraction",
    "Interaction",
    "Reply",
    "ScriptedUser",
    "VerlInteraction",
    "as_interaction",
    "in_thread",
]
