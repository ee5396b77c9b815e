"""Interpreters inside sandboxes that keep their state from one call to the next.

To add an interpreter, subclass `Repl` in a module of its own, and write a test class that inherits
`testing.ReplContract`.
"""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
