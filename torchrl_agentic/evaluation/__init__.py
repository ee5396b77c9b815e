"""Evaluate models with tools on tasks, compare runs, and read their folders again."""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
