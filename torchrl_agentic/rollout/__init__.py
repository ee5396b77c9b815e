"""Roll out models token by token, replay recorded conversations, and make batches for losses."""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
