"""Simulated users that reply to the model; each session is one conversation.

To add one: subclass `Interaction`, and let a test inherit `testing.InteractionContract`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
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

__getattr__ = load_lazily(
    __name__,
    {
        "adapters": (
            "FunctionUser",
            "Gsm8kInteraction",
            "ScriptedUser",
            "VerlInteraction",
            "as_interaction",
        ),
        "base": (
            "Interaction",
            "Reply",
            "in_thread",
        ),
    },
)
