"""The viewer of dumps, `torchrl-agentic view`: in a terminal, as text or as an HTML page; needs no torch."""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
