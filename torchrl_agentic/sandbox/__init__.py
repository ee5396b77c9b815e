"""Sandboxes: isolated places that run code written by a model.

To add a sandbox, subclass `Sandbox` in a module of its own, list in the docstring of the module what it stops
and what it does not stop, and write a test class that inherits `testing.SandboxContract`.
"""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
