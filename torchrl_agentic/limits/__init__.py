"""Rate limits of one process (`RateLimiter`), or of all that share a service (`ClusterRateLimiter`)."""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
