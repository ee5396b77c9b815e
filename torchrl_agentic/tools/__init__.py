"""Tools that come with the package.

To add one: subclass `Tool` in a file of its own, and let a test inherit `testing.ToolContract`. The names are
loaded when they are first used: a tool that speaks HTTP takes longer to import than all the others.
"""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
