"""Simulated users that reply to the model; each session is one conversation.

To add one: subclass `Interaction`, and let a test inherit `testing.InteractionContract`.
"""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
