"""Engines: token ids in, sampled token ids out; or messages in, a message out."""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
