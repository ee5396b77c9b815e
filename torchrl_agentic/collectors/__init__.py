"""`AgentCollector`: every trajectory advances on its own, and whole groups leave as batches."""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
